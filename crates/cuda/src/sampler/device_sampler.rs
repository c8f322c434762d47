//! The sampler for engines whose weight and hidden states, or logits, are in device memory, with the parameters and
//! results of the core crate; also the hidden states of the ranks of such an engine.
#![allow(unsafe_code)]

use crate::abi::{RowColumns, TokenColumns};
use crate::device::{Device, DeviceHead, DeviceMatrix, Queue, wait};
use crate::error::CudaError;
use crate::sampler::head_sampler::DeviceCall;
use crate::sampler::{CudaTiled, HeadSampler, LogitSampler};
use cudarc::driver::{CudaEvent, CudaStream};
use flash_sampling_core::{Capabilities, Description, Plan, RowParams, SampleError, Samples};
use std::sync::Arc;

/// A sampler whose inputs are in device memory: hidden states and a weight, or existing logits. Its parameters and
/// results are those of [`PerturbedArgmax`](flash_sampling_core::PerturbedArgmax).
///
/// The sampler reads hidden states, weight and logits in place. It is exact pathwise. From hidden states, it has the
/// draws of [`CudaTiled`]; from logits, the draws of [`CudaStandalone`](crate::CudaStandalone). A call waits for its
/// results, except [`DeviceSampler::enqueue`], whose parameters and results are in device memory.
///
/// # Hidden states and a weight
/// A call launches on the caller's stream: one launch per 256 rows, and again for each further draw of a row. The call
/// then waits once for the results. The GPU decides min-p, top-k and top-p ([`DeviceFilters`](crate::DeviceFilters)).
/// On Hopper it uses lists of the largest logits if a row's filters are [listed](crate::abi::RowFilters::is_listed);
/// otherwise it uses stored logits. A second launch draws the few rows that their lists do not decide. The first call
/// with filters allocates the memory for lists or logits, and the first call of each kind loads kernels.
///
/// Rows with log-probabilities, draws without replacement, or filters beyond min-p, top-k and top-p use stored logits,
/// as in [`CudaTiled`].
///
/// For the shard of a rank, convert it into a [`CudaTiled`], which exchanges draws with other GPUs.
///
/// # Logits
/// The logits `[rows, vocab]` may have any element type, row stride and address. Every call reads the logits once for
/// the draws. Kernels then filter float32 logits in place. Filters of 16-bit logits need a float32 copy of the rows
/// with filters; calls of `enqueue` with log-probabilities or kept tokens copy all rows. The first call that copies
/// rows allocates up to 256 MiB. A call that waits launches on a stream of the sampler, after the work on the caller's
/// stream.
#[derive(Debug)]
pub struct DeviceSampler {
    source: Source,
}

/// The source of the logits.
#[derive(Debug)]
enum Source {
    Head(Box<HeadSampler<'static>>, DeviceHead),
    Logits(Box<LogitSampler>),
}

impl DeviceSampler {
    /// Plans a head of a vocabulary of `vocab_size` tokens: compiles and loads the kernels. The weight is not copied. A
    /// head without rows is a shard without tokens.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: [`Plan::canonical`], which needs the weight on the host.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Head`]: also if `vocab_size` is smaller than the end of the head's tokens.
    /// * Those of [`DeviceTiled::new`](crate::DeviceTiled::new).
    ///
    /// # Safety
    /// The head's weight and bias are device memory of this device, of the stated sizes, while this value or a sampler
    /// made from it is used; nothing writes to them during a call.
    pub unsafe fn new(head: DeviceHead, vocab_size: u32, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        let can = Capabilities { canonical: false, ..CudaTiled::CAPABILITIES };
        let sampler = HeadSampler::in_place(head, vocab_size, plan, can, device)?;
        Ok(DeviceSampler { source: Source::Head(Box::new(sampler), head) })
    }

    /// Plans a sampler of existing logits of `vocab_size` columns.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: [`Plan::canonical`], since the sampler does not compute the logits.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Layout`], [`CudaError::TooLarge`]: `vocab_size` is zero or above 2^31.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn for_logits(vocab_size: usize, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        let sampler = LogitSampler::new(vocab_size, plan, device)?;
        Ok(DeviceSampler { source: Source::Logits(Box::new(sampler)) })
    }

    /// What the sampler supports, the size of its head or of the logits, and its plan.
    pub fn description(&self) -> &Description {
        match &self.source {
            Source::Head(sampler, _) => &sampler.description,
            Source::Logits(sampler) => sampler.description(),
        }
    }

    /// The number of rows, of all complete calls, that the head's shadow did not decide, so that the draw read the
    /// weight, too: see [`DeviceTiled::fallback_rows`](crate::DeviceTiled::fallback_rows). It serves calls that do not
    /// wait; for a call that waits, [`Samples::fallback_rows`] has the number. A change of the plan may begin a new count.
    pub fn fallback_rows(&self) -> u32 {
        match &self.source {
            Source::Head(sampler, _) => sampler.fallback_rows(),
            Source::Logits(_) => 0,
        }
    }

    /// The head, or `None` for a sampler of logits.
    pub fn head(&self) -> Option<&DeviceHead> {
        match &self.source {
            Source::Head(_, head) => Some(head),
            Source::Logits(_) => None,
        }
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        match &self.source {
            Source::Head(sampler, _) => &sampler.device,
            Source::Logits(sampler) => sampler.device(),
        }
    }

    /// Draws for the rows of `input` after all prior work on `stream`, and waits.
    ///
    /// `input` is hidden states `[rows, hidden]` or logits `[rows, vocab]`, and `rows` has one [`RowParams`] for each
    /// row.
    ///
    /// # Errors
    /// * Those of [`PerturbedArgmax::sample`](flash_sampling_core::PerturbedArgmax::sample). An error of a single row
    ///   is that row's result in `out`.
    /// * [`SampleError::Backend`] with a [`CudaError`]: also if the layout of the input is unsupported.
    ///
    /// # Safety
    /// * `input` is device memory of this device, of the stated size. During the call, only work that was enqueued on
    ///   `stream` before the call writes to it.
    /// * `stream` is a stream of this device and captures nothing.
    pub unsafe fn sample(
        &mut self,
        stream: &CudaStream,
        input: &DeviceMatrix,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        // A thread may have no current context.
        let bound = self.device().context().bind_to_thread();
        bound.map_err(CudaError::driver("use the GPU on this thread"))?;
        let sampled = match &mut self.source {
            Source::Head(sampler, _) => {
                // SAFETY: *Memory*: the contract of `new` covers weight and bias, the contract of this function the
                // hidden states; the sampler owns the rest, sized before each launch. *Order*: launches follow each
                // other, and the sampler's own stream joins `stream`; the code below waits for both. *Rows*: `Staging`
                // makes rows from checked parameters; checked greedy rows have no filters; `RowFilters::of` bounds
                // top-k.
                let queue = unsafe { Queue::new(stream) };
                sampler.sample_on(DeviceCall { hidden: *input, queue, is_ready: false }, rows, out)
            }
            Source::Logits(sampler) => sampler.sample_on(stream, input, rows, out),
        };
        // Launches before an error, and prior work on the stream of a call without launches, use the caller's memory.
        let waited = wait(stream.context(), || stream.synchronize());
        if sampled.is_err() || !waited {
            match &self.source {
                Source::Head(sampler, _) => sampler.wait(),
                Source::Logits(sampler) => sampler.wait(),
            }
        }
        sampled
    }

    /// Loads kernels and allocates memory for [`DeviceSampler::enqueue`], so that a graph can capture such calls.
    ///
    /// `columns` and `out` state which arrays later calls have: only whether an array is null matters.
    /// `max_adjusted` is the maximum number of distinct adjusted tokens of a row: biased, banned, banned as stop tokens,
    /// and penalised. Each adjusted token takes 20 bytes for every row. Calls with filters, log-probabilities or kept tokens store or
    /// copy the logits of up to 256 rows. Over existing logits, later calls may have logits of any element type.
    ///
    /// A larger `max_adjusted` than before replaces memory, so graphs that captured earlier calls must not run again.
    ///
    /// # Errors
    /// [`CudaError::Layout`]: the head has no rows. [`CudaError::TooLarge`], [`CudaError::Driver`],
    /// [`CudaError::Compile`].
    pub fn prepare_enqueue(
        &mut self,
        columns: &RowColumns,
        out: &TokenColumns,
        max_adjusted: usize,
    ) -> Result<(), CudaError> {
        match &mut self.source {
            Source::Head(sampler, _) => sampler.prepare_columns((columns, out), max_adjusted),
            Source::Logits(sampler) => sampler.prepare_columns((columns, out), max_adjusted),
        }
    }

    /// Enqueues a draw for each row of `input` on `stream`, and returns without waiting.
    ///
    /// `input` is hidden states `[rows, hidden]` or logits `[rows, vocab]`. The kernels read the parameters from
    /// `columns` when they run, and write the results to `out`. So a graph can capture the call, and replay it with
    /// other values. The draws are those of [`DeviceSampler::sample`]. Each kernel is launched once per 256 rows. The
    /// first call with an array that [`DeviceSampler::prepare_enqueue`] did not have loads kernels and allocates
    /// memory.
    ///
    /// `out` may also have arrays for log-probabilities, ranks and the most probable tokens, in the law of the draws
    /// and in the law of the model ([`LogprobColumns`](crate::abi::LogprobColumns)), and for the tokens that filters
    /// keep ([`KeptColumns`](crate::abi::KeptColumns)). A call with such arrays stores the logits of a head, and reads
    /// the stored logits for these results.
    ///
    /// A row without a draw has token -1, and its status is the reason; other rows do not change:
    /// * [`PARAMETERS`](crate::abi::status::PARAMETERS): a parameter is invalid, or the row has more adjusted tokens
    ///   than prepared.
    /// * Other constants of [`status`](crate::abi::status): a logit of the row is NaN or +inf, or none is finite.
    ///
    /// # Errors
    /// * [`CudaError::Layout`]: a misaligned address; biases without values; lists without their bounds; token ids
    ///   without log-probabilities; kept tokens without begin; a head without rows; an input of an unsupported layout.
    /// * [`CudaError::TooLarge`]: more rows than planned, or more most probable tokens than
    ///   [`TOP_N_MAX`](crate::abi::TOP_N_MAX).
    /// * [`CudaError::Driver`], [`CudaError::Compile`].
    ///
    /// # Safety
    /// * `input` and all arrays of `columns` and `out` are device memory of this device, until the kernels have run.
    ///   Each array has the elements that [`RowColumns`] and [`TokenColumns`] name. Each list lies within its tokens.
    ///   Only work before or after the call on `stream` writes to the memory that the kernels read.
    /// * Calls of this value follow each other: on one stream, or ordered by events.
    /// * Until the kernels have run, also in every launch of a graph that captured them, this value is neither dropped
    ///   nor converted, and [`DeviceSampler::prepare_enqueue`] plans no larger number of adjusted tokens. Each of these
    ///   frees memory of the kernels, and none happens while a stream of the context captures.
    pub unsafe fn enqueue(
        &mut self,
        stream: &CudaStream,
        input: &DeviceMatrix,
        columns: &RowColumns,
        out: &TokenColumns,
    ) -> Result<(), CudaError> {
        // SAFETY: *Memory*: the contracts of `new` and of this function; the sampler owns the rest, sized before each
        // launch. *Order*: all work is on one stream. *Rows*: the kernel encodes valid rows from any parameters.
        let queue = unsafe { Queue::new(stream) };
        match &mut self.source {
            Source::Head(sampler, _) => sampler.enqueue_columns(queue, input, (columns, out)),
            Source::Logits(sampler) => sampler.enqueue_columns(queue, input, (columns, out)),
        }
    }
}

impl TryFrom<DeviceSampler> for CudaTiled<'static> {
    type Error = CudaError;

    /// The same sampler, for hidden states in host memory and for multi-GPU ranks.
    ///
    /// # Errors
    /// [`CudaError::Layout`]: a sampler of logits has no weight.
    fn try_from(sampler: DeviceSampler) -> Result<Self, CudaError> {
        match sampler.source {
            Source::Head(sampler, _) => Ok(CudaTiled(*sampler)),
            Source::Logits(_) => Err(NO_WEIGHT),
        }
    }
}

const NO_WEIGHT: CudaError = CudaError::Layout { what: "weight", reason: "a sampler of logits has none" };

/// Hidden states `[rows, hidden]` in device memory, for calls that read them in place.
///
/// ```no_run
/// # fn step(stream: &flash_sampling_cuda::cudarc::driver::CudaStream, hidden: flash_sampling_cuda::DeviceMatrix) {
/// use flash_sampling_cuda::DeviceHidden;
///
/// // SAFETY: the model's last layer, enqueued on `stream`, writes `hidden`. The next step begins after this one.
/// let hidden = unsafe { DeviceHidden::new(stream, hidden) };
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeviceHidden {
    matrix: DeviceMatrix,
    device: usize,
    /// An event after the work that writes the hidden states.
    ready: Arc<CudaEvent>,
}

impl DeviceHidden {
    /// The hidden states after all prior work on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// * `hidden` is device memory of the stream's device, of the stated size, while this value or a clone exists, and
    ///   until all work on it has run. Calls keep no clone, and wait for their work.
    /// * In this time, only the work that was enqueued on `stream` before this call writes to the memory.
    pub unsafe fn new(stream: &CudaStream, hidden: DeviceMatrix) -> Result<Self, CudaError> {
        let ready = stream.record_event(None).map_err(CudaError::driver("record the hidden states"))?;
        Ok(DeviceHidden { matrix: hidden, device: stream.context().ordinal(), ready: Arc::new(ready) })
    }

    /// The hidden states.
    pub fn matrix(&self) -> DeviceMatrix {
        self.matrix
    }

    /// Orders the hidden states before later work on a stream.
    pub(crate) fn order_before(&self, stream: &CudaStream) -> Result<(), CudaError> {
        if stream.context().ordinal() != self.device {
            return Err(CudaError::Layout { what: "hidden states", reason: "they are on another GPU" });
        }
        stream.wait(&self.ready).map_err(CudaError::driver("wait for the hidden states"))
    }
}
