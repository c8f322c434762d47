//! The kernels over existing logits, and the memory of their launches.

use crate::abi::{self, DeviceAddress, Draw, Row, RowFilters, TokenColumns};
use crate::device::{Device, DeviceDraws, DeviceMatrix, DeviceStandalone, MAX_ROWS, Queue, Scratch};
use crate::error::CudaError;
use crate::first_use::get_or_make;
use crate::sampler::{DrawItem, Staging};
use crate::selection::{DeviceLogprobs, ExistingFilters, FilterKinds, FilteredRows, rows_within};
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::backend::Adjustments;
use flash_sampling_core::{DType, Plan};
use std::sync::Arc;

/// The maximum number of draws of a launch.
pub(super) const MAX_DRAWS: usize = 4096;

/// The kernels over existing logits, and memory for the inputs and draws of a launch.
#[derive(Debug)]
pub(super) struct LogitKernels {
    vocab_size: u32,
    device: Arc<Device>,
    /// The draws without filters from bf16, f16 and f32 logits. The first logits of a type load its kernel.
    samplers: [Option<DeviceStandalone>; 3],
    /// The maximum number of draws of a launch with filters.
    max_filtered: usize,
    /// The kernels for filters, and memory for the filters of a launch; made at first use.
    filters: Option<(ExistingFilters, Scratch)>,
    /// The kernels for log-probabilities and kept tokens of calls that do not wait; made at first use.
    pub(super) logprobs: Option<DeviceLogprobs>,
    /// The encoded rows of a launch.
    inputs: CudaSlice<u8>,
    /// The row of the logits that each draw of a launch reads.
    sources: CudaSlice<u32>,
    pub(super) draws: CudaSlice<Draw>,
    pub(super) staging: Staging,
    pub(super) adjustments: Adjustments,
    /// `sources` and the filters of a launch in host memory, before they are copied to the GPU.
    sources_here: Vec<u32>,
    filters_here: Vec<RowFilters>,
}

/// The maximum number of draws of a launch with filters.
fn max_filtered(vocab_size: u32, plan: &Plan) -> usize {
    let draws = plan.max_rows.saturating_mul(plan.max_draws as usize);
    draws.min(MAX_ROWS).min(rows_within(vocab_size as usize))
}

impl LogitKernels {
    pub(super) fn new(
        vocab_size: u32,
        plan: &Plan,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let f32s = DeviceStandalone::new(0..vocab_size, DType::F32, MAX_DRAWS, device)?;
        let allocate = CudaError::driver("allocate room for logits");
        let kernels = LogitKernels {
            vocab_size,
            device: device.clone(),
            samplers: [None, None, Some(f32s)],
            max_filtered: max_filtered(vocab_size, plan),
            filters: None,
            logprobs: None,
            inputs: stream.alloc_zeros(MAX_DRAWS * size_of::<Row>() + 16).map_err(&allocate)?,
            sources: stream.alloc_zeros(MAX_DRAWS).map_err(&allocate)?,
            draws: stream.alloc_zeros(MAX_DRAWS).map_err(&allocate)?,
            staging: Staging::of(0..vocab_size, vocab_size),
            adjustments: Adjustments::default(),
            sources_here: Vec::new(),
            filters_here: Vec::new(),
        };
        stream.synchronize().map_err(allocate)?;
        Ok(kernels)
    }

    /// Changes the plan's number of rows, and drops kernels and memory that depend on it. No launch may be in progress.
    pub(super) fn replan(&mut self, plan: &Plan) {
        (self.filters, self.logprobs) = (None, None);
        self.max_filtered = max_filtered(self.vocab_size, plan);
    }

    pub(super) fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    pub(super) fn max_filtered(&self) -> usize {
        self.max_filtered
    }

    /// The kernel for logits of a type, loaded at first use.
    pub(super) fn sampler(&mut self, dtype: DType) -> Result<&mut DeviceStandalone, CudaError> {
        get_or_make(&mut self.samplers[abi::element(dtype) as usize], || {
            DeviceStandalone::new(0..self.vocab_size, dtype, MAX_DRAWS, &self.device)
        })
    }

    /// The kernels for filters, made at first use.
    pub(super) fn filters(&mut self) -> Result<&mut (ExistingFilters, Scratch), CudaError> {
        let most = self.max_filtered;
        get_or_make(&mut self.filters, || {
            let room = Scratch::new(most * size_of::<RowFilters>(), &[], &self.device)?;
            Ok((ExistingFilters::new(self.vocab_size, most, &self.device)?, room))
        })
    }

    /// Loads the kernels and allocates the memory for log-probabilities and kept tokens, if a call has them.
    pub(super) fn prepare_logprobs(&mut self, out: &TokenColumns) -> Result<(), CudaError> {
        if out.needs_logits() && self.logprobs.is_none() {
            self.logprobs = Some(DeviceLogprobs::new(self.max_filtered, self.vocab_size as usize, &self.device)?);
        }
        Ok(())
    }

    /// Enqueues draws without filters. Draw `i` reads row `sources[i]` of the logits; without `sources`, row `i`.
    pub(super) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        (logits, sources): (&DeviceMatrix, Option<DeviceAddress<u32>>),
        (rows, draws): (DeviceAddress<Row>, DeviceAddress<Draw>),
        count: usize,
    ) -> Result<(), CudaError> {
        self.sampler(logits.dtype)?.enqueue(queue, logits, &DeviceDraws { count, rows, sources, draws })
    }

    /// Copies the staged rows and their `sources` to the GPU, and returns the addresses of both.
    pub(super) fn copy_rows(
        &mut self,
        sources: impl Iterator<Item = usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<(DeviceAddress<Row>, DeviceAddress<u32>), CudaError> {
        let rows = self.staging.copy_to(&mut self.inputs, None, stream)?.cast();
        let failed = CudaError::driver("copy the rows of a call");
        self.sources_here.clear();
        self.sources_here.extend(sources.map(|row| row as u32));
        let mut sources = self.sources.slice_mut(..self.sources_here.len());
        stream.memcpy_htod(&self.sources_here, &mut sources).map_err(&failed)?;
        Ok((rows, DeviceAddress::of(&self.sources, stream)))
    }

    /// Copies the filters of draws to the GPU, and enqueues the kernels that replace the draws without filters by draws
    /// with filters.
    pub(super) fn enqueue_filters(
        &mut self,
        queue: Queue<'_>,
        (logits, sources): (&DeviceMatrix, DeviceAddress<u32>),
        (rows, draws): (DeviceAddress<Row>, DeviceAddress<Draw>),
        items: &[DrawItem],
    ) -> Result<(), CudaError> {
        let features = self.staging.features();
        let mut filters_here = core::mem::take(&mut self.filters_here);
        filters_here.clear();
        filters_here.extend(items.iter().map(|item| item.filters));
        let (filters, room) = self.filters()?;
        let filters_at = room.begin_use();
        queue.copy_up(&filters_here, filters_at)?;
        let rows = FilteredRows::new(rows, filters_at, draws);
        let kinds = FilterKinds::of(&filters_here).with_rows(features);
        let enqueued =
            filters.enqueue(queue, (logits, Some(sources)), rows, items.len(), (kinds, false, false)).map(drop);
        self.filters_here = filters_here;
        enqueued
    }

    /// Marks the memory as idle after all launches have run; see [`Scratch::mark_idle`].
    pub(super) fn mark_idle(&mut self) {
        self.samplers.iter_mut().flatten().for_each(DeviceStandalone::mark_idle);
        self.filters.iter_mut().for_each(|(filters, room)| {
            filters.mark_idle();
            room.mark_idle();
        });
    }
}
