//! The tiled variant over device memory with core's parameters and results: for an engine whose weight and hidden states
//! are on the GPU already; and the hidden states of such an engine's ranks.
#![allow(unsafe_code)]

use crate::device::gpu::Device;
use crate::device::head::DeviceHead;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::device::scratch::wait;
use crate::error::CudaError;
use crate::sampler::head_sampler::{DeviceCall, HeadSampler};
use crate::sampler::tiled::CudaTiled;
use cudarc::driver::{CudaEvent, CudaStream};
use flash_sampling_core::{Capabilities, Plan, RowParams, SampleError, Samples, Shape};
use std::sync::Arc;

/// Draws for hidden states in device memory by a weight in device memory, neither of which is copied, with the parameters and
/// results of [`PerturbedArgmax`](flash_sampling_core::PerturbedArgmax). Exact pathwise; the draws are those of
/// [`CudaTiled`].
///
/// A call launches on the caller's stream, once for every 256 rows and again for every further draw of a row, and waits for the
/// results once. The GPU decides min-p, top-k and top-p ([`DeviceFilters`](crate::DeviceFilters)): on Hopper from lists of the largest logits where
/// the filters of a row are [listed](crate::abi::RowFilters::is_listed), else from stored logits; the few rows whose list does not
/// decide are launched once more. The first call with filters allocates the memory for either, and the first of each kind
/// loads kernels. Rows with log-probabilities, draws without replacement, or filters beyond min-p, top-k and top-p are drawn
/// from stored logits, as [`CudaTiled`] draws them. For calls that wait for nothing there is
/// [`DeviceTiled`](crate::DeviceTiled).
///
/// As the shard of a rank, it becomes a [`CudaTiled`], which exchanges draws with other GPUs.
#[derive(Debug)]
pub struct DeviceSampler {
    sampler: HeadSampler<'static>,
    head: DeviceHead,
}

impl DeviceSampler {
    /// Plans for a head of a vocabulary of `vocab_size` tokens, compiles and loads the kernels. The weight is read where it
    /// lies. A head without rows is a shard without tokens.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: [`Plan::canonical`], which needs the weight on the host.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Head`] also where `vocab_size` is smaller than the head's last token.
    /// * Those of [`DeviceTiled::new`](crate::DeviceTiled::new).
    ///
    /// # Safety
    /// The head's weight and bias are device memory of this device, of the stated sizes, and stay so as long as this value,
    /// or a sampler made of it, is used; nothing writes to them during a call.
    pub unsafe fn new(head: DeviceHead, vocab_size: u32, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        let can = Capabilities { canonical: false, ..CudaTiled::CAPABILITIES };
        Ok(DeviceSampler { sampler: HeadSampler::in_place(head, vocab_size, plan, can, device)?, head })
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        self.sampler.can
    }

    /// The size of its head.
    pub fn shape(&self) -> Shape {
        self.sampler.shape.clone()
    }

    /// What it was planned for.
    pub fn plan(&self) -> Plan {
        self.sampler.plan
    }

    /// Its head.
    pub fn head(&self) -> &DeviceHead {
        &self.head
    }

    /// Its GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.sampler.device
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
        // A thread may have no current context.
        let bound = self.device().context().bind_to_thread();
        bound.map_err(CudaError::driver("use the GPU on this thread"))?;
        // SAFETY: *Memory*: weight and bias by the contract of `new`, hidden states by that of this function; the rest is
        // the sampler's, sized before each launch. *Order*: one launch follows the other, and the sampler's own stream
        // joins `stream`; both are waited for below. *Rows*: `Staging` makes them of checked parameters; checked greedy
        // rows have no filters; `RowFilters::of` bounds top-k.
        let queue = unsafe { Queue::new(stream) };
        let sampled = self.sampler.sample_on(DeviceCall { hidden: *hidden, queue, is_ready: false }, rows, out);
        // What was launched before an error, and what was enqueued on the stream for a call without launches, reads or
        // writes the caller's memory.
        let waited = wait(stream.context(), || stream.synchronize());
        if sampled.is_err() || !waited {
            self.sampler.wait();
        }
        sampled
    }
}

impl From<DeviceSampler> for CudaTiled<'static> {
    /// The same sampler, for hidden states in host memory and for ranks.
    fn from(sampler: DeviceSampler) -> Self {
        CudaTiled(sampler.sampler)
    }
}

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
    /// The GPU's number.
    device: usize,
    /// The work before the first read.
    ready: Arc<CudaEvent>,
}

impl DeviceHidden {
    /// The hidden states after all work that was enqueued on `stream`.
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
