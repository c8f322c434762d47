//! The kernels of a head in device memory, and the memory of their launches.
#![allow(unsafe_code)]

use super::hidden_states::HiddenStates;
use super::inputs::staged_bytes;
use super::launch_plan::PlannedLaunch;
use super::source::LaunchRows;
use super::uploaded_weight::{UploadedWeight, row_stride};
use crate::abi::{DeviceAddress, Draw, RowFilters};
use crate::device::{
    Device, DeviceGroups, DeviceHead, DeviceTiled, GroupRule, KernelChoice, MAX_ROWS, Pinned, Queue, Scratch, results,
    wait,
};
use crate::error::CudaError;
use crate::exchange::cuda_exchange::CudaExchange;
use crate::exchange::sharded::FilterSupport;
use crate::first_use::get_or_make;
use crate::sampler::pinned_items::ROOM;
use crate::sampler::{FilterSource, Staging};
use crate::selection::{
    CanonicalInputs, DeviceFilters, DeviceLogprobs, FilterKinds, FilteredRows, StoredRows, SummaryInput, rows_within,
};
use core::mem::replace;
use core::ops::Range;
use cudarc::driver::{CudaEvent, CudaStream};
use flash_sampling_core::{Plan, RowParams};
use std::sync::Arc;

/// The draws of several launches whose results are copied at once.
const MAX_RESULTS: usize = 4096;

/// The choice of kernels; and of variants with groups, the tokens of a group and their draw.
pub(super) type Choice = (KernelChoice, Option<(u32, GroupRule)>);

/// The kernels of a head in device memory, and the memory of their launches.
#[derive(Debug)]
pub(super) struct HeadKernels {
    pub(super) fused: DeviceTiled,
    /// The kernels that draw instead of `fused`, for variants with groups.
    groups: Option<DeviceGroups>,
    choice: Choice,
    /// The maximum number of draws in a launch, and with filters unless stored logits need more memory.
    pub(super) max_draws: usize,
    max_filtered: usize,
    pub(super) device: Arc<Device>,
    pub(super) head: DeviceHead,
    pub(super) inputs: Scratch,
    /// Page-locked memory for the inputs of a launch, except its lists.
    pub(super) staged: Pinned,
    draws: Scratch,
    /// Page-locked memory for the draws. A copy to other memory holds a lock of the driver while it waits, and could
    /// block a rank in another thread.
    results: Pinned,
    /// The kernels for filters, and the memory for a launch's filters. Made for the first row with filters.
    pub(super) filters: Option<(DeviceFilters, Scratch)>,
    /// For calls whose parameters are in device memory, with log-probabilities or kept tokens.
    pub(super) logprobs: Option<DeviceLogprobs>,
    /// Recorded after the last kernel that reads hidden states of the caller, and before the exchange with other ranks.
    read: CudaEvent,
    /// Whether the kernels for filters over ranks are loaded.
    is_prepared: bool,
    /// The draws of all launches that could not read the shadow of the weight.
    pub(super) draws_by_weight: u32,
    /// The kernels hold its address, so this field is dropped last.
    pub(super) uploaded: Option<UploadedWeight>,
}

/// Loads the kernels for launches of `max_draws` draws. With groups, the fused kernel only stores logits.
fn load(
    head: DeviceHead,
    max_draws: usize,
    (choice, groups): Choice,
    device: &Arc<Device>,
) -> Result<(DeviceTiled, Option<DeviceGroups>), CudaError> {
    let groups = groups.map(|(size, rule)| DeviceGroups::plan(head, max_draws, size, rule, device)).transpose()?;
    let fused = match groups {
        Some(_) => DeviceTiled::unplanned(head, max_draws, device, KernelChoice::Portable),
        None => DeviceTiled::plan(head, max_draws, device, choice),
    }?;
    Ok((fused, groups))
}

/// The maximum number of draws in a launch of a plan.
pub(crate) fn max_launch_draws(plan: &Plan) -> usize {
    plan.max_rows.saturating_mul(plan.max_draws as usize).min(MAX_ROWS)
}

impl HeadKernels {
    /// Loads the kernels and allocates their memory: for inputs on the GPU and on the host, and for the draws of several
    /// launches. Without an uploaded weight, the first hidden states on the host allocate more.
    pub(super) fn new(
        head: DeviceHead,
        is_uploaded: bool,
        plan: &Plan,
        choice: Choice,
        device: &Arc<Device>,
        stream: &CudaStream,
    ) -> Result<Self, CudaError> {
        let (max_draws, results) =
            (max_launch_draws(plan), plan.max_rows.saturating_mul(plan.max_draws as usize).min(MAX_RESULTS));
        let (mut fused, groups) = load(head, max_draws, choice, device)?;
        if plan.canonical {
            fused.round_weights();
        }
        // Over device memory, a launch makes one draw of each row.
        let (hidden, filtered) = match is_uploaded {
            true => (row_stride(head.weight.cols) * size_of::<f32>(), max_draws),
            false => (0, plan.max_rows.min(max_draws)),
        };
        let (size, max_filtered) = (staged_bytes(max_draws, hidden), filtered.min(rows_within(head.weight.rows)));
        let (inputs, staged) = (Scratch::new(size + ROOM, &[], device)?, Pinned::new(size, stream)?);
        let bytes = results * size_of::<Draw>();
        let (draws, results) = (Scratch::new(bytes, &[], device)?, Pinned::new(bytes, stream)?);
        let read = stream.context().new_event(None).map_err(CudaError::driver("create an event"))?;
        let (device, filters, logprobs) = (device.clone(), None, None);
        let (is_prepared, uploaded) = (false, None);
        Ok(HeadKernels {
            fused,
            groups,
            choice,
            max_draws,
            max_filtered,
            device,
            head,
            inputs,
            staged,
            draws,
            results,
            filters,
            logprobs,
            read,
            is_prepared,
            draws_by_weight: 0,
            uploaded,
        })
    }

    /// Changes the number of rows. No launch may be in progress.
    pub(super) fn replan(&mut self, plan: &Plan, stream: &CudaStream) -> Result<(), CudaError> {
        if max_launch_draws(plan) == self.max_draws {
            return Ok(());
        }
        let is_uploaded = self.uploaded.is_some();
        let planned = HeadKernels::new(self.head, is_uploaded, plan, self.choice, &self.device, stream)?;
        let before = replace(self, planned);
        self.uploaded = before.uploaded;
        // Other ranks rely on what this rank has prepared.
        if before.is_prepared { self.prepare_sharded() } else { Ok(()) }
    }

    /// Draws of a launch.
    pub(super) fn max_draws(&self) -> usize {
        self.max_draws
    }

    /// The maximum number of draws with filters in a launch.
    pub(super) fn max_filtered(&self) -> usize {
        self.max_filtered
    }

    /// The maximum number of draws in launches whose results are copied at once.
    pub(super) fn max_results(&self) -> usize {
        self.draws.len() / size_of::<Draw>()
    }

    pub(super) fn tokens(&self) -> Range<u32> {
        self.fused.tokens()
    }

    /// Whether lists can decide filters for these hidden states.
    pub(super) fn can_list(&self, hidden: HiddenStates<'_>) -> bool {
        self.fused.can_list(&match hidden {
            HiddenStates::Host(input) => self.copied(DeviceAddress::NULL, input.dtype(), 1),
            HiddenStates::Device(hidden) => hidden,
        })
    }

    /// Enqueues the draws of a launch whose rows are staged, with results from number `at` on.
    ///
    /// Without filters, a launch has at most [`HeadKernels::max_draws`] draws, else [`HeadKernels::max_filtered`].
    /// Lists need [`HeadKernels::can_list`]. With an exchange, the draws are of the whole vocabulary, in a call with
    /// the given parameters. Filters then need [`HeadKernels::prepare_sharded`] and [`HeadKernels::filter_support`],
    /// and with logits, all rows have top-p alone or no filters.
    pub(super) fn launch(
        &mut self,
        queue: Queue<'_>,
        LaunchRows { staging, filters, .. }: &mut LaunchRows,
        hidden: HiddenStates<'_>,
        (launch, at): (&PlannedLaunch, usize),
        from: Option<FilterSource>,
        exchange: Option<(&mut CudaExchange, &[RowParams<'_>])>,
    ) -> Result<(), CudaError> {
        let (hidden, rows) = self.copy(queue, staging, hidden.rows(launch.first..launch.first + launch.slots.len()))?;
        let (hidden, draws, features) = (&hidden, self.draws.begin_use::<Draw>().add(at), staging.features());
        results::poison(draws, hidden.rows, queue)?;
        let by_shadow = match from {
            None => self.fused.uses_shadow(hidden),
            // An exchange decides filters by the weight.
            Some(FilterSource::Lists) if exchange.is_none() => {
                let largest_top_k = filters.iter().map(|filters| filters.top_k).max().unwrap_or(0);
                self.fused.lists_by_shadow(hidden, largest_top_k)
            }
            Some(_) => false,
        };
        if self.has_shadow() && !by_shadow {
            self.draws_by_weight = self.draws_by_weight.wrapping_add(hidden.rows as u32);
        }
        let Some(from) = from else {
            match &mut self.groups {
                Some(groups) => groups.enqueue(queue, hidden, (rows, draws), DeviceAddress::NULL),
                None => self.fused.enqueue(queue, hidden, (rows, draws), features),
            }?;
            self.record_read(queue)?;
            let Some((exchange, params)) = exchange else { return Ok(()) };
            return exchange.launch(queue, (rows, draws), hidden.rows, params);
        };
        let ((selection, room), fused) = self.filters()?;
        let filters_at = room.begin_use();
        queue.copy_up(filters, filters_at)?;
        let rows = FilteredRows::new(rows, filters_at, draws);
        let launched = match exchange.map(|(exchange, params)| (exchange.peers(), params)) {
            Some((Some((peers, mark)), params)) => {
                let peers = (peers, || mark.of(params));
                match from {
                    FilterSource::Lists => selection.enqueue_listed_ranks(queue, fused, hidden, rows, peers),
                    FilterSource::Logits => {
                        selection.enqueue_by_mass_ranks(queue, fused, hidden, (rows, features), peers)
                    }
                }
            }
            Some((None, _)) => Err(CudaError::NotSharded { reason: "filters need the exchange by peers" }),
            None => {
                let kinds = FilterKinds::of(filters).with_rows(features);
                let by_list = from == FilterSource::Lists;
                match by_list && selection.enqueue_listed(queue, fused, hidden, rows, by_shadow)? {
                    true => Ok(()),
                    false => selection.enqueue(queue, fused, hidden, rows, kinds),
                }
            }
        };
        self.record_read(queue)?;
        launched
    }

    /// Marks the end of the kernels that read hidden states of the caller.
    fn record_read(&self, queue: Queue<'_>) -> Result<(), CudaError> {
        self.read.record(queue.stream()).map_err(CudaError::driver("record an event"))
    }

    /// Waits until no kernel reads hidden states of the caller. Does not wait for other ranks, except with filters.
    pub(super) fn wait_for_reads(&self) {
        wait(self.device.context(), || self.read.synchronize());
    }

    /// Copies the first `count` results of launches, and waits for the stream.
    pub(super) fn finish(&mut self, queue: Queue<'_>, count: usize, draws: &mut Vec<Draw>) -> Result<(), CudaError> {
        let size = count * size_of::<Draw>();
        self.results.copy_down(self.draws.begin_use::<Draw>(), 0, size, queue)?;
        // Without a sleep, unlike the wait for the event of the copy.
        queue.stream().synchronize().map_err(CudaError::driver("run the kernels"))?;
        draws.clear();
        draws.extend_from_slice(bytemuck::cast_slice(&self.results.bytes()?[..size]));
        results::written(draws)?;
        self.fused.mark_idle();
        self.groups.iter_mut().for_each(DeviceGroups::mark_idle);
        [&mut self.inputs, &mut self.draws].into_iter().for_each(Scratch::mark_idle);
        self.filters.iter_mut().for_each(|(selection, room)| {
            selection.mark_idle();
            room.mark_idle();
        });
        Ok(())
    }

    /// The kernels for filters and their memory, made at first use; and the fused kernel.
    pub(super) fn filters(&mut self) -> Result<(&mut (DeviceFilters, Scratch), &mut DeviceTiled), CudaError> {
        let (tokens, max_draws) = (self.tokens(), self.max_filtered());
        let filters = get_or_make(&mut self.filters, || {
            let room = Scratch::new(max_draws * size_of::<RowFilters>(), &[], &self.device)?;
            Ok((DeviceFilters::new(tokens, max_draws, &self.device)?, room))
        })?;
        Ok((filters, &mut self.fused))
    }

    /// The filters that this rank supports in an exchange by peers, for aligned hidden states of the weight's type. Top-p
    /// alone needs a shard that begins at a multiple of 4.
    ///
    /// One block per draw waits for other ranks, and the GPU must hold all waiting blocks: two per multiprocessor. This
    /// limit assumes one rank per GPU. If ranks share a GPU, waiting blocks can displace the blocks that they wait for,
    /// until the time limit.
    pub(super) fn filter_support(&self) -> FilterSupport {
        let lists =
            self.fused.can_list(&self.copied(DeviceAddress::NULL, self.head.hidden_dtype(), self.max_filtered()));
        let most = self.max_filtered().min(2 * self.device.multiprocessors() as usize);
        FilterSupport { lists, masses: lists && self.head.first_token.is_multiple_of(4), most }
    }

    /// Loads kernels and allocates memory for launches with filters and an exchange.
    pub(super) fn prepare_sharded(&mut self) -> Result<(), CudaError> {
        let ((selection, _), fused) = self.filters()?;
        selection.prepare_sharded(fused)?;
        self.is_prepared = true;
        Ok(())
    }

    /// Stores and summarizes the logits of the staged rows, at most [`HeadKernels::max_draws`].
    ///
    /// The results are one draw per row, with the row's first invalid logit. Hidden states on the device are those of
    /// the call; `which` are the staged rows. Returns the inputs of the logits, for a canonical plan.
    /// Canonical plans use the error bounds of the portable kernel.
    pub(super) fn store(
        &mut self,
        staging: &mut Staging,
        states: HiddenStates<'_>,
        which: &[usize],
        is_canonical: bool,
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<CanonicalInputs, CudaError> {
        let queue = HeadKernels::queue(stream);
        let (hidden, rows) = self.copy(queue, staging, states)?;
        let draws = self.draws.begin_use::<Draw>();
        results::poison(draws, which.len(), queue)?;
        let is_copied = matches!(states, HiddenStates::Host(_));
        let (mut at, mut is_transformed) = (0, false);
        for run in which.chunk_by(|a, b| is_copied || a + 1 == *b) {
            let first = if is_copied { 0 } else { run[0] };
            let (part, room) = (hidden.rows(first..first + run.len()), stored.place(at));
            let rows = (rows.add(at), draws.add(at));
            is_transformed = if is_canonical {
                self.fused.enqueue_storing(queue, &part, rows, room.logits, room.stride as usize)?;
                true
            } else {
                self.fused.enqueue_storing_fast(queue, &part, rows, staging.features(), room)?
            };
            at += run.len();
        }
        self.record_read(queue)?;
        let rows_to_apply = if is_transformed { DeviceAddress::NULL } else { rows };
        stored.summarize(&SummaryInput { rows: rows_to_apply, ..SummaryInput::default() })?;
        Ok(CanonicalInputs { head: self.head, hidden, rows })
    }

    /// A queue for the kernels on the sampler's own stream.
    pub(super) fn queue(stream: &CudaStream) -> Queue<'_> {
        // SAFETY: *Memory*: a `HeadKernels` owns inputs and draws, sized by `new` for `max_draws` draws; `Scratch`
        // frees them after their launches. Weight and bias belong to it, or to the caller by `DeviceSampler::new`.
        // Hidden states are copied, or belong to the caller by `DeviceHidden::new` or `DeviceSampler::sample`. *Order*:
        // the sampler's own stream follows the stream of a call, and every call waits at its end. *Rows*: `Staging`
        // makes rows from checked parameters; checked greedy rows have no filters; `RowFilters::of` bounds top-k.
        unsafe { Queue::new(stream) }
    }
}
