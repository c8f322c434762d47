//! A head in device memory, with its kernels and memory for a launch.
#![allow(unsafe_code)]

use crate::abi::{DeviceAddress, Draw, Row, RowFilters};
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::groups::DeviceGroups;
use crate::device::head::DeviceHead;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::device::pinned::Pinned;
use crate::device::results;
use crate::device::row_features::KernelChoice;
use crate::device::select::GroupRule;
use crate::device::tiled::DeviceTiled;
use crate::error::CudaError;
use crate::exchange::cuda_exchange::CudaExchange;
use crate::sampler::pinned_items::ROOM;
use crate::sampler::row_scan::FilterSource;
use crate::sampler::staging::Staging;
use crate::selection::filtered::{DeviceFilters, FilterKinds, FilteredRows, NOT_PREPARED, rows_within};
use crate::selection::queries::CanonicalInputs;
use crate::selection::stored_rows::{StoredRows, SummaryInput};
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::{Head, Matrix, Plan, RowParams};
use std::sync::Arc;

/// The maximum bytes of the weight in one copy.
const PART: usize = 64 << 20;

/// A head in device memory, with its kernels and memory for the inputs and draws of a launch.
#[derive(Debug)]
pub(crate) struct UploadedHead {
    fused: DeviceTiled,
    /// The kernels that draw instead of `fused`, for variants with groups.
    groups: Option<DeviceGroups>,
    /// The choice of kernels, and of groups with their tokens.
    choice: (KernelChoice, Option<(u32, GroupRule)>),
    /// Draws of a launch.
    most: usize,
    device: Arc<Device>,
    head: DeviceHead,
    /// The row stride of the weight and of hidden states, in elements.
    row_stride: usize,
    inputs: CudaSlice<u8>,
    /// Page-locked memory for the inputs of a call, except its lists.
    staged: Pinned,
    draws: CudaSlice<Draw>,
    /// The kernels for filters, and the memory for a call's filters. Made for the first row with filters.
    filters: Option<(DeviceFilters, CudaSlice<RowFilters>)>,
    /// Whether the kernels for filters over ranks are loaded.
    is_prepared_for_ranks: bool,
    /// The weight and bias. The kernels hold their addresses, so these fields are dropped last.
    _weight: CudaSlice<u8>,
    _bias: Option<CudaSlice<f32>>,
}

/// Loads the kernels for launches of `most` draws. With groups, the fused kernel only stores logits.
fn kernels(
    head: DeviceHead,
    most: usize,
    (choice, groups): (KernelChoice, Option<(u32, GroupRule)>),
    device: &Arc<Device>,
) -> Result<(DeviceTiled, Option<DeviceGroups>), CudaError> {
    let groups = groups.map(|(size, rule)| DeviceGroups::plan(head, most, size, rule, device)).transpose()?;
    let fused = match groups {
        Some(_) => DeviceTiled::unplanned(head, most, device, KernelChoice::Portable),
        None => DeviceTiled::plan(head, most, device, choice),
    }?;
    Ok((fused, groups))
}

/// Allocates memory for the inputs and draws of launches of `most` draws, on the GPU and page-locked on the host.
fn room(
    most: usize,
    row_stride: usize,
    stream: &Arc<CudaStream>,
) -> Result<(CudaSlice<u8>, Pinned, CudaSlice<Draw>), CudaError> {
    let failed = CudaError::driver("allocate room for a launch");
    let size = most * (row_stride * size_of::<f32>() + size_of::<Row>()) + 16;
    let (inputs, staged) = (stream.alloc_zeros(size + ROOM).map_err(&failed)?, Pinned::new(size, stream)?);
    Ok((inputs, staged, stream.alloc_zeros(most).map_err(&failed)?))
}

impl UploadedHead {
    pub(crate) fn new(
        head: &Head<'_>,
        plan: &Plan,
        device: &Arc<Device>,
        choice: KernelChoice,
        groups: Option<(u32, GroupRule)>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let failed = CudaError::driver("copy the head to the GPU");
        let tokens = head.tokens();
        let rows = head.weight_row(tokens.start)..head.weight_row(tokens.start) + tokens.len();
        let row_stride = head.hidden().next_multiple_of(8);
        let dtype = head.weight().dtype();
        let weight = upload(&head.weight().row_range(rows.clone()), row_stride, stream)?;
        let bias = head.bias().map(|bias| stream.clone_htod(&bias[rows])).transpose().map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let on_device = DeviceHead {
            weight: DeviceMatrix {
                address: DeviceAddress::of(&weight, stream),
                dtype,
                rows: tokens.len(),
                cols: head.hidden(),
                row_stride,
            },
            first_token: tokens.start,
            bias: bias.as_ref().map(|bias| DeviceAddress::of(bias, stream)),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
        };
        let (most, choice) = (UploadedHead::most_of(plan), (choice, groups));
        let (fused, groups) = kernels(on_device, most, choice, device)?;
        let (inputs, staged, draws) = room(most, row_stride, stream)?;
        Ok(UploadedHead {
            fused,
            groups,
            choice,
            most,
            row_stride,
            inputs,
            staged,
            draws,
            filters: None,
            is_prepared_for_ranks: false,
            device: device.clone(),
            head: on_device,
            _weight: weight,
            _bias: bias,
        })
    }

    /// Changes the number of rows. No launch may be in progress.
    pub(crate) fn replan(&mut self, plan: &Plan, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let most = UploadedHead::most_of(plan);
        if most == self.most {
            return Ok(());
        }
        let (fused, groups) = kernels(self.head, most, self.choice, &self.device)?;
        (self.inputs, self.staged, self.draws) = room(most, self.row_stride, stream)?;
        (self.fused, self.groups, self.filters, self.most) = (fused, groups, None, most);
        // Other ranks rely on what this rank has prepared.
        if self.is_prepared_for_ranks { self.prepare_sharded(stream) } else { Ok(()) }
    }

    /// The device.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The maximum number of draws in a launch of a plan.
    pub(crate) fn most_of(plan: &Plan) -> usize {
        plan.max_rows.saturating_mul(plan.max_draws as usize).min(MAX_ROWS)
    }

    /// Draws of a launch.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Makes the staged draws, at most [`UploadedHead::most`], and waits. `draws` receives one result per draw.
    ///
    /// With an exchange, the draws are of the whole vocabulary, in a call with the given parameters. `input` has the
    /// type and width of the hidden states.
    pub(crate) fn draw(
        &mut self,
        staging: &mut Staging,
        input: &Matrix<'_>,
        draws: &mut Vec<Draw>,
        stream: &Arc<CudaStream>,
        exchange: Option<(&mut CudaExchange, &[RowParams<'_>])>,
    ) -> Result<(), CudaError> {
        let (hidden, rows) = self.copy(staging, input, stream)?;
        let (queue, rows) = (UploadedHead::queue(stream), (rows, DeviceAddress::of(&self.draws, stream)));
        match &mut self.groups {
            Some(groups) => groups.enqueue(queue, &hidden, rows, DeviceAddress::NULL),
            None => self.fused.enqueue(queue, &hidden, rows, staging.kinds()),
        }?;
        let Some((exchange, params)) = exchange else { return self.copy_draws(hidden.rows, draws, stream) };
        exchange.launch(queue, rows, hidden.rows, params)?;
        self.copy_draws(hidden.rows, draws, stream)?;
        exchange.check(draws)
    }

    /// The maximum number of draws with filters in a launch.
    pub(crate) fn most_filtered(&self) -> usize {
        self.most.min(rows_within(self.head.weight.rows))
    }

    /// Whether lists can decide filters for these hidden states.
    pub(crate) fn lists(&self, input: &Matrix<'_>) -> bool {
        let (dtype, row_stride) = (input.dtype(), self.row_stride);
        self.fused.lists(&DeviceMatrix { address: DeviceAddress::NULL, dtype, rows: 1, cols: input.cols(), row_stride })
    }

    /// Draws as [`UploadedHead::draw`] does, with one entry of `filters` per draw, and at most
    /// [`UploadedHead::most_filtered`] draws. Lists need [`UploadedHead::lists`].
    pub(crate) fn draw_filtered(
        &mut self,
        staging: &mut Staging,
        (filters, from): (&[RowFilters], FilterSource),
        input: &Matrix<'_>,
        draws: &mut Vec<Draw>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let (hidden, rows) = self.copy(staging, input, stream)?;
        let (queue, rows) = (UploadedHead::queue(stream), self.filtered_rows(rows, filters, stream)?);
        let Some((selection, _)) = &mut self.filters else { return Err(NOT_PREPARED) };
        match from {
            FilterSource::Lists if selection.enqueue_listed(queue, &mut self.fused, &hidden, rows)? => {}
            _ => {
                let kinds = FilterKinds::of(filters).with_rows(staging.kinds());
                selection.enqueue_kinds(queue, &mut self.fused, &hidden, rows, kinds)?;
            }
        }
        self.copy_draws(hidden.rows, draws, stream)
    }

    /// Copies the filters of a call to the GPU.
    fn filtered_rows(
        &mut self,
        rows: DeviceAddress<Row>,
        filters: &[RowFilters],
        stream: &Arc<CudaStream>,
    ) -> Result<FilteredRows, CudaError> {
        let failed = CudaError::driver("copy the filters of a call");
        let draws = DeviceAddress::of(&self.draws, stream);
        let (_, room) = self.selection(stream)?;
        stream.memcpy_htod(filters, &mut room.slice_mut(..filters.len())).map_err(&failed)?;
        Ok(FilteredRows { rows, filters: DeviceAddress::of(room, stream), draws })
    }

    /// A queue for the kernels over this value's memory.
    pub(crate) fn queue(stream: &CudaStream) -> Queue<'_> {
        // SAFETY: *Memory*: weight, bias, inputs and draws are those of an `UploadedHead`, sized by `new` for the most
        // draws, and freed behind the work on the same stream. *Order*: one stream is used, and every call waits at its
        // end. *Rows*: `Staging` makes them of checked parameters; `RowFilters::of` bounds top-k.
        unsafe { Queue::new(stream) }
    }

    /// The kernels for filters, made at first use.
    fn selection(
        &mut self,
        stream: &Arc<CudaStream>,
    ) -> Result<&mut (DeviceFilters, CudaSlice<RowFilters>), CudaError> {
        let (tokens, most) = (self.fused.tokens(), self.most_filtered());
        match &mut self.filters {
            Some(filters) => Ok(filters),
            none => {
                let failed = CudaError::driver("allocate room for filters");
                let selection = DeviceFilters::new(tokens, most, &self.device)?;
                let room = stream.alloc_zeros(most).map_err(&failed)?;
                Ok(none.insert((selection, room)))
            }
        }
    }

    /// The maximum number of draws with filters in a launch of ranks.
    ///
    /// One block per draw waits for other ranks, and the GPU must hold all waiting blocks: two per multiprocessor. This
    /// limit assumes one rank per GPU. If ranks share a GPU, waiting blocks can displace the blocks that they wait for,
    /// until the time limit.
    pub(crate) fn max_sharded_draws(&self) -> usize {
        self.most_filtered().min(2 * self.device.multiprocessors() as usize)
    }

    /// Whether ranks can filter from lists, and top-p alone from stored logits, for hidden states of the weight's type.
    /// Top-p alone needs a shard that begins at a multiple of 4.
    pub(crate) fn sharded_sources(&self) -> (bool, bool) {
        let DeviceMatrix { dtype, cols, .. } = self.head.weight;
        let hidden = DeviceMatrix { address: DeviceAddress::NULL, dtype, rows: 1, cols, row_stride: self.row_stride };
        let lists = self.fused.lists(&hidden);
        (lists, lists && self.head.first_token.is_multiple_of(4))
    }

    /// Loads kernels and allocates memory for [`UploadedHead::draw_filtered_with`].
    pub(crate) fn prepare_sharded(&mut self, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        self.selection(stream)?;
        let Some((selection, _)) = &mut self.filters else { return Err(NOT_PREPARED) };
        selection.prepare_sharded(&mut self.fused)?;
        self.is_prepared_for_ranks = true;
        Ok(())
    }

    /// Draws as [`UploadedHead::draw_filtered`] does, over the shards of all ranks. [`UploadedHead::sharded_sources`]
    /// must include `from`. From logits, all rows have top-p alone or no filters.
    pub(crate) fn draw_filtered_with(
        &mut self,
        staging: &mut Staging,
        (filters, from): (&[RowFilters], FilterSource),
        input: &Matrix<'_>,
        draws: &mut Vec<Draw>,
        stream: &Arc<CudaStream>,
        (exchange, params): (&mut CudaExchange, &[RowParams<'_>]),
    ) -> Result<(), CudaError> {
        let (hidden, rows) = self.copy(staging, input, stream)?;
        let rows = self.filtered_rows(rows, filters, stream)?;
        let Some((peers, mark)) = exchange.peers() else {
            return Err(CudaError::NotTogether { reason: "filters need the exchange by peers" });
        };
        let Some((selection, _)) = &mut self.filters else { return Err(NOT_PREPARED) };
        let (queue, fused, kinds) = (UploadedHead::queue(stream), &mut self.fused, staging.kinds());
        let mark = || mark.of(params);
        let peers = (peers, mark);
        match from {
            FilterSource::Lists => selection.enqueue_listed_ranks(queue, fused, &hidden, rows, peers),
            FilterSource::Logits => selection.enqueue_by_mass_ranks(queue, fused, &hidden, (rows, kinds), peers),
        }?;
        self.copy_draws(hidden.rows, draws, stream)?;
        exchange.check(draws)
    }

    /// Stores and summarizes the logits of the staged rows, at most [`UploadedHead::most`], and waits.
    ///
    /// `draws` receives one draw per row, with the row's first invalid logit. Returns the inputs of the logits, for a
    /// canonical plan. Canonical plans use the error bounds of the portable kernel.
    pub(crate) fn store(
        &mut self,
        staging: &mut Staging,
        input: &Matrix<'_>,
        is_canonical: bool,
        stored: &mut StoredRows,
        draws: &mut Vec<Draw>,
        stream: &Arc<CudaStream>,
    ) -> Result<CanonicalInputs, CudaError> {
        let (hidden, rows) = self.copy(staging, input, stream)?;
        let (queue, to) = (UploadedHead::queue(stream), stored.place(0, stream));
        let rows_and_draws = (rows, DeviceAddress::of(&self.draws, stream));
        let is_transformed = if is_canonical {
            self.fused.enqueue_storing(queue, &hidden, rows_and_draws, to.logits, to.stride as usize)?;
            true
        } else {
            self.fused.enqueue_storing_fast(queue, &hidden, rows_and_draws, staging.kinds(), to)?
        };
        let rows_to_apply = if is_transformed { DeviceAddress::NULL } else { rows };
        stored.summarize(&SummaryInput { rows: rows_to_apply, ..SummaryInput::default() }, stream)?;
        self.copy_draws(hidden.rows, draws, stream)?;
        Ok(CanonicalInputs { head: self.head, hidden, rows })
    }

    /// Allocates room for this many bytes of inputs.
    fn reserve(&mut self, size: usize, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        if size > self.inputs.len() {
            let failed = CudaError::driver("allocate for the inputs of a call");
            self.inputs = stream.alloc_zeros(size.next_power_of_two()).map_err(&failed)?;
        }
        Ok(())
    }

    /// Allocates room for the inputs of calls with this many bytes of lists and masks.
    pub(crate) fn reserve_lists(&mut self, bytes: usize, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        self.reserve(self.staged.len() + bytes, stream)
    }

    /// Copies the staged inputs to the GPU. Returns the hidden states and the address of the rows.
    fn copy(
        &mut self,
        staging: &mut Staging,
        input: &Matrix<'_>,
        stream: &Arc<CudaStream>,
    ) -> Result<(DeviceMatrix, DeviceAddress<Row>), CudaError> {
        staging.take_hidden_in(self.row_stride * input.dtype().size());
        self.reserve(staging.len(), stream)?;
        let count = staging.rows();
        let queue = UploadedHead::queue(stream);
        results::poison(DeviceAddress::of(&self.draws, stream), count, queue)?;
        let base = DeviceAddress::of(&self.inputs, stream);
        let (rows, size) = (base.add(staging.rows_at()).cast(), staging.lists_at());
        staging.finish_rows(input, base, &mut self.staged.bytes()?[..size]);
        self.staged.copy_up(base, size, queue)?;
        staging.lists().copy_up(base.add(size), queue)?;
        let (dtype, cols, row_stride) = (input.dtype(), input.cols(), self.row_stride);
        let hidden = DeviceMatrix { address: base, dtype, rows: count, cols, row_stride };
        Ok((hidden, rows))
    }

    /// Waits, and appends the first `count` draws of a launch.
    fn copy_draws(&mut self, count: usize, draws: &mut Vec<Draw>, stream: &Arc<CudaStream>) -> Result<(), CudaError> {
        let from = draws.len();
        draws.resize(from + count, Draw::default());
        let copied = stream.memcpy_dtoh(&self.draws.slice(..count), &mut draws[from..]);
        copied.map_err(CudaError::driver("copy the draws"))?;
        stream.synchronize().map_err(CudaError::driver("run the kernels"))?;
        results::written(&draws[from..])?;
        self.fused.settle();
        self.filters.iter_mut().for_each(|(selection, _)| selection.settle());
        self.groups.iter_mut().for_each(DeviceGroups::settle);
        Ok(())
    }
}

/// Copies a weight to the GPU, in rows of `row_stride` elements.
fn upload(weight: &Matrix<'_>, row_stride: usize, stream: &Arc<CudaStream>) -> Result<CudaSlice<u8>, CudaError> {
    let failed = CudaError::driver("copy the weight to the GPU");
    let bytes = row_stride * weight.dtype().size();
    let mut to = stream.alloc_zeros::<u8>(weight.rows() * bytes).map_err(&failed)?;
    if weight.row_stride() == row_stride && weight.cols() == row_stride {
        stream.memcpy_htod(weight.bytes(), &mut to).map_err(&failed)?;
        return Ok(to);
    }
    let rows_of_part = (PART / bytes).max(1);
    let mut part = Vec::with_capacity(rows_of_part.min(weight.rows()) * bytes);
    for first in (0..weight.rows()).step_by(rows_of_part) {
        let last = (first + rows_of_part).min(weight.rows());
        part.clear();
        for row in first..last {
            part.extend_from_slice(weight.row_bytes(row));
            part.resize((row + 1 - first) * bytes, 0);
        }
        stream.memcpy_htod(&part, &mut to.slice_mut(first * bytes..last * bytes)).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
    }
    Ok(to)
}
