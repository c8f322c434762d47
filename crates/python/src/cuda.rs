//! Sampling over tensors on a GPU. A call waits for its results.
#![allow(unsafe_code)]

use crate::error::{failed, invalid};
use crate::head::{Bias, HeadParts};
use crate::tensor::{Layout, Place, Tensor};
use flash_sampling::cuda::cudarc::driver::{CudaStream, result, sys};
use flash_sampling::cuda::{Device, DeviceAddress, DeviceHead, DeviceMatrix, DeviceSampler};
use flash_sampling::{Capabilities, Plan, RowParams, SampleError, Samples};
use pyo3::prelude::*;
use std::sync::Arc;

/// A sampler over a head in memory of a GPU.
pub(crate) struct OnDevice {
    /// Dropped before the memory of `parts`, which it reads.
    sampler: DeviceSampler,
    /// Set by the drop, and dropped after the sampler.
    context: Option<ThreadContext>,
    parts: Arc<HeadParts>,
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        self.context = ThreadContext::present();
    }
}

/// The address of a thread's current context, which the drop makes current again. torch takes its current device from it.
struct ThreadContext(usize);

impl ThreadContext {
    /// The context of this thread; the driver is loaded.
    fn present() -> Option<ThreadContext> {
        let context = result::ctx::get_current().ok()?;
        Some(ThreadContext(context.map_or(0, |context| context as usize)))
    }
}

impl Drop for ThreadContext {
    fn drop(&mut self) {
        // SAFETY: the context was current on this thread at the start of a call, or there was none.
        let _ = unsafe { result::ctx::set_current(self.0 as sys::CUcontext) };
    }
}

impl OnDevice {
    /// Waits for the work that makes weight and bias, and plans the sampler.
    ///
    /// # Errors
    /// Those of the GPU, the head and the plan.
    pub(crate) fn new(parts: Arc<HeadParts>, plan: Plan) -> PyResult<OnDevice> {
        let Place::Cuda(id) = parts.weight.place() else { return Err(invalid("head", "the head is not on a GPU")) };
        Device::count().map_err(|error| failed(&error))?; // loads the driver
        let _context = ThreadContext::present();
        let device = Device::new(usize::try_from(id).unwrap_or(0)).map_err(|error| failed(&error))?;
        let tokens = parts.vocab_size.saturating_sub(parts.first_token).min(parts.layout.rows);
        let as_u32 = |knob, value: usize| {
            u32::try_from(value).map_err(|_| invalid(knob, format!("{knob} is {value}, but must be below 2^32")))
        };
        let mut streams = vec![parts.weight.stream()];
        let bias = match &parts.bias {
            Bias::Device(bias) => {
                streams.push(bias.stream());
                Some(DeviceAddress::new(bias.address()))
            }
            Bias::None | Bias::Host(_) => None,
        };
        for at in streams {
            stream(&device, at).synchronize().map_err(|error| failed(&error))?;
        }
        let head = DeviceHead {
            weight: DeviceMatrix { rows: tokens, ..matrix(&parts.weight, &parts.layout) },
            first_token: as_u32("first_token", parts.first_token)?,
            bias,
            soft_cap: parts.soft_cap,
            scale: parts.scale,
        };
        let vocab_size = as_u32("vocab_size", parts.vocab_size)?;
        // SAFETY: weight and bias are tensors of this device, which `parts` holds and drops after the sampler. `Tensor`
        // checked their shapes. By the package's documentation, nothing writes to them during a call.
        let sampler = unsafe { DeviceSampler::new(head, vocab_size, plan, &device) };
        Ok(OnDevice { sampler: sampler.map_err(|error| failed(&error))?, context: None, parts })
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.sampler.capabilities()
    }

    pub(crate) fn plan(&self) -> Plan {
        self.sampler.plan()
    }

    pub(crate) fn vocab_size(&self) -> u32 {
        self.sampler.shape().vocab_size
    }

    /// Draws after all prior work on the tensor's stream, and waits.
    ///
    /// # Errors
    /// Outer: the tensor is no matrix on this GPU. Inner: those of the sampler.
    pub(crate) fn sample(
        &mut self,
        hidden: &Tensor,
        what: &'static str,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> PyResult<Result<(), SampleError>> {
        let layout = hidden.layout(what)?;
        if hidden.place() != self.parts.weight.place() {
            return Err(invalid(what, format!("{what} is on {}, but the head is not", hidden.place())));
        }
        let _context = ThreadContext::present();
        let stream = stream(self.sampler.device(), hidden.stream());
        // SAFETY: the tensor is memory of this device, which `hidden` holds during the call. Its producer ordered the work
        // that writes it before later work on this stream. The stream is its caller's current stream, of this device,
        // and lives during the call; the driver refuses to wait for a stream that captures.
        Ok(unsafe { self.sampler.sample(&stream, &matrix(hidden, &layout), rows, out) })
    }
}

fn matrix(tensor: &Tensor, layout: &Layout) -> DeviceMatrix {
    let Layout { dtype, rows, cols, row_stride } = *layout;
    DeviceMatrix { address: DeviceAddress::new(tensor.address()), dtype, rows, cols, row_stride }
}

/// A stream of the caller, by its address.
fn stream(device: &Device, address: u64) -> Arc<CudaStream> {
    // SAFETY: the address is that of torch's or CuPy's current stream of this device, or 0, the default stream. The
    // wrapper is dropped before the call returns to the caller, and work is ordered by the stream alone.
    unsafe { device.context().wrap_borrowed_stream(address as _) }
}
