//! The tiled variant over device memory with core's parameters and results: for an engine whose weight and hidden states
//! are on the GPU already.
#![allow(unsafe_code)]

mod launch;
mod stored_rows;

use crate::abi::{Draw, Row, RowFilters};
use crate::device::filtered::DeviceFilters;
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::device::scratch::{Scratch, wait};
use crate::device::stored_rows::StoredRows;
use crate::device::tiled::DeviceTiled;
use crate::error::CudaError;
use crate::host::check_plan;
use crate::host::results::{note_tries, push_row};
use crate::host::staging::Staging;
use crate::host::stored_results::{StoredRequest, StoredResults};
use crate::host::tiled::CudaTiled;
use core::ops::Range;
use cudarc::driver::CudaStream;
use flash_sampling_core::{Adjustments, Capabilities, HeadError, Plan, RowParams, SampleError, Samples, Shape, params};
use std::sync::Arc;

/// Draws for hidden states in device memory by a weight in device memory, neither of which is copied, with the parameters and
/// results of [`PerturbedArgmax`](flash_sampling_core::PerturbedArgmax). Exact pathwise; the draws are those of
/// [`CudaTiled`].
///
/// A call launches on the caller's stream, once for every 256 rows and again for every further draw of a row, and waits for the
/// results once. Min-p, top-k and top-p are decided on the GPU ([`DeviceFilters`]): on Hopper from lists of the largest
/// logits where the filters of all rows of a launch are [listed](RowFilters::is_listed), else from stored logits; the few
/// rows whose list does not tell are launched once more. The first call with filters allocates the room for either, and the
/// first of each kind loads kernels. Rows that ask for log-probabilities, for lists without replacement, or for filters
/// beyond min-p, top-k and top-p, are then drawn from stored logits, as [`CudaTiled`] draws them. For calls that wait for
/// nothing there is [`DeviceTiled`].
#[derive(Debug)]
pub struct DeviceSampler {
    fused: DeviceTiled,
    head: DeviceHead,
    shape: Shape,
    plan: Plan,
    device: Arc<Device>,
    /// Rows of a launch.
    most: usize,
    staging: Staging,
    adjustments: Adjustments,
    /// What is staged, and the draws of a call.
    inputs: Scratch,
    draws: Scratch,
    /// Of each row of the call; and the rows of each launch, with the most draws of a row of them.
    ways: Vec<RowRoute>,
    parts: Vec<(Range<usize>, u32)>,
    results: Vec<Draw>,
    of_row: Vec<Draw>,
    /// Of each launch, whether lists decided its filters; of each row, how many times it was launched, where it was.
    listed: Vec<bool>,
    tried: Vec<u32>,
    filters: Vec<RowFilters>,
    selection: Option<(DeviceFilters, Scratch)>,
    /// For the rows that ask, with a stream of their own, made when the first of them comes.
    stored: Option<(StoredRows, Arc<CudaStream>)>,
    answers: StoredResults,
    asked: Vec<StoredRequest>,
}

/// How a row is drawn.
#[derive(Clone, Copy, Debug)]
enum RowRoute {
    /// Not at all: its parameters are wrong.
    Refused,
    /// By the fused kernel; filters, where it has any, on the GPU.
    Launched(RowFilters),
    /// From stored logits.
    Asked,
}

impl RowRoute {
    fn of(row: &params::Row<'_>) -> RowRoute {
        if row.kept || row.without_replacement || row.logprobs.is_some() {
            return RowRoute::Asked;
        }
        match row.filters.as_ref().map(RowFilters::of) {
            None => RowRoute::Launched(RowFilters::OFF),
            Some(Some(filters)) => RowRoute::Launched(filters),
            Some(None) => RowRoute::Asked,
        }
    }
}

impl DeviceSampler {
    /// Plans for a head of a vocabulary of `vocab_size` tokens, compiles and loads the kernels. The weight is read where it
    /// lies.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: [`Plan::canonical`], which needs the weight on the host.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Head`] also where `vocab_size` is smaller than the head's last token.
    /// * Those of [`DeviceTiled::new`].
    ///
    /// # Safety
    /// The head's weight and bias are device memory of this device, of the stated sizes, and stay so as long as this value
    /// is used; nothing writes to them during a call.
    pub unsafe fn new(head: DeviceHead, vocab_size: u32, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        check_plan(&plan, false)?;
        let most = plan.max_rows.min(MAX_ROWS);
        // SAFETY: this function's contract; the value is dropped with this one, which waits at the end of each call.
        let fused = unsafe { DeviceTiled::new(head, most, device) }?;
        let tokens = fused.tokens();
        if vocab_size < tokens.end {
            let (vocab_start, vocab_end) = (tokens.start as usize, tokens.end as usize);
            return Err(HeadError::Vocab { vocab_size: vocab_size as usize, vocab_start, vocab_end }.into());
        }
        let shape = Shape { tokens, vocab_size, input: head.weight.cols };
        Ok(DeviceSampler {
            fused,
            head,
            plan,
            most,
            staging: Staging::of(shape.tokens.clone(), vocab_size),
            shape,
            adjustments: Adjustments::default(),
            inputs: Scratch::new(most * size_of::<Row>() + 16, &[], device)?,
            draws: Scratch::new(most * size_of::<Draw>(), &[], device)?,
            ways: Vec::new(),
            parts: Vec::new(),
            results: Vec::new(),
            of_row: Vec::new(),
            listed: Vec::new(),
            tried: Vec::new(),
            filters: Vec::new(),
            selection: None,
            stored: None,
            answers: StoredResults::default(),
            asked: Vec::new(),
            device: device.clone(),
        })
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        Capabilities { canonical: false, ..CudaTiled::CAPABILITIES }
    }

    /// The size of its head.
    pub fn shape(&self) -> Shape {
        self.shape.clone()
    }

    /// What it was planned for.
    pub fn plan(&self) -> Plan {
        self.plan
    }

    /// Draws for `hidden [rows, hidden]` with one [`RowParams`] a row, after all that was enqueued on `stream`, and waits.
    ///
    /// # Errors
    /// * Those of [`PerturbedArgmax::sample`](flash_sampling_core::PerturbedArgmax::sample); what concerns one row only is
    ///   that row's error in `out`.
    /// * [`SampleError::Backend`] with a [`CudaError`] also for hidden states whose layout cannot be read.
    ///
    /// # Safety
    /// * `hidden` is device memory of this device, of the stated size, and nothing writes to it during the call, but for
    ///   what was enqueued on `stream` before.
    /// * `stream` is of this device, and captures nothing.
    pub unsafe fn sample(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        if hidden.cols != self.shape.input {
            return Err(SampleError::Hidden { found: hidden.cols, expected: self.shape.input });
        }
        if hidden.rows != rows.len() {
            return Err(SampleError::RowCount { rows: hidden.rows, params: rows.len() });
        }
        if rows.len() > self.plan.max_rows {
            return Err(SampleError::TooManyRows { rows: rows.len(), max_rows: self.plan.max_rows });
        }
        self.sort(rows);
        // SAFETY: this function's contract.
        let drawn = unsafe { self.launch_and_wait(stream, hidden, rows) };
        let failed = |error| SampleError::Backend { backend: "cuda", source: Box::new(error) };
        drawn.map_err(failed)?;
        self.emit(rows, out);
        // SAFETY: this function's contract; `launch_and_wait` has waited for the hidden states.
        let noted = unsafe { self.note_raw(hidden, rows, out) };
        noted.map_err(|error| {
            self.wait_own();
            out.clear();
            failed(error)
        })
    }

    /// # Safety
    /// As [`DeviceSampler::sample`].
    unsafe fn launch_and_wait(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
    ) -> Result<(), CudaError> {
        // A thread may have no current context.
        self.device.context().bind_to_thread().map_err(CudaError::driver("use the GPU on this thread"))?;
        // SAFETY: the caller's contract.
        let drawn = unsafe { self.draw(stream, hidden, rows).and_then(|()| self.ask(hidden, rows)) };
        if drawn.is_err() {
            // What was launched before the error reads the caller's memory.
            wait(stream.context(), || stream.synchronize());
            self.wait_own();
        }
        drawn
    }

    /// Waits for the stream of the rows that ask, after an error.
    fn wait_own(&self) {
        if let Some((_, own)) = &self.stored {
            wait(own.context(), || own.synchronize());
        }
    }

    /// Says of each row how it is drawn, and which rows are launched together.
    fn sort(&mut self, rows: &[RowParams<'_>]) {
        let (can, vocab_size) = (self.capabilities(), self.shape.vocab_size);
        self.adjustments.collect_within(rows, self.shape.tokens.clone());
        self.ways.clear();
        self.tried.clear();
        self.parts.clear();
        for from in (0..rows.len()).step_by(self.most) {
            let part = from..(from + self.most).min(rows.len());
            let mut draws = 0;
            for params in &rows[part.clone()] {
                let way = match params.check(&[], &can, &self.plan, vocab_size) {
                    Err(_) => RowRoute::Refused,
                    Ok(row) => RowRoute::of(&row),
                };
                let is_launched = matches!(way, RowRoute::Launched(_));
                if is_launched {
                    draws = draws.max(params.draws);
                }
                self.tried.push(is_launched.into());
                self.ways.push(way);
            }
            self.parts.push((part, draws));
        }
    }

    /// Says what the rows came to.
    fn emit(&mut self, rows: &[RowParams<'_>], out: &mut Samples) {
        let (can, vocab_size) = (self.capabilities(), self.shape.vocab_size);
        let (mut asked, mut launched) = (0, 0);
        for (part, draws) in &self.parts {
            for r in part.clone() {
                let row = match rows[r].check(&[], &can, &self.plan, vocab_size) {
                    Ok(row) => row,
                    Err(error) => {
                        out.push_error(error);
                        continue;
                    }
                };
                let outcome = match self.ways[r] {
                    RowRoute::Asked => {
                        asked += 1;
                        self.answers.emit(asked - 1, &row, vocab_size, out)
                    }
                    _ => {
                        self.of_row.clear();
                        let at = |number: u32| launched + number as usize * part.len() + (r - part.start);
                        self.of_row.extend((0..row.draws).map(|number| self.results[at(number)]));
                        push_row(&mut self.of_row.as_slice(), &row, None, &[], out)
                    }
                };
                match outcome {
                    Err(error) => out.push_error(error),
                    Ok(()) => note_tries(self.tried[r], matches!(self.ways[r], RowRoute::Asked), out),
                }
            }
            launched += part.len() * *draws as usize;
        }
    }
}
