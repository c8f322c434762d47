//! Sampling over tensors on a GPU: calls that wait for their results, and calls that do not.
#![allow(unsafe_code)]

use crate::device_call::DeviceCall;
use crate::error::{failed, invalid, of_enqueue};
use crate::group::Group;
use crate::head::{Floats, HeadParts};
use crate::scales::WeightScales;
use crate::tensor::{Layout, Place, Tensor};
use flash_sampling::cuda::abi::{RowColumns, TokenColumns};
use flash_sampling::cuda::cudarc::driver::{CudaSlice, CudaStream, result, sys};
use flash_sampling::cuda::{
    ColumnCall, CudaError, Device, DeviceAddress, DeviceHead, DeviceHidden, DeviceMatrix, DeviceSampler, DeviceScales,
    DeviceShadow, ShadowMemory,
};
use flash_sampling::{
    CudaRank, CudaRankOptions, Description, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, make_shadow,
};
use pyo3::prelude::*;
use std::sync::Arc;

/// A sampler over inputs in memory of a GPU.
pub(crate) struct OnDevice {
    /// The sampler reads the memory of the head. Rust drops fields in the order of their declaration, so the sampler is
    /// dropped before this memory.
    sampler: OneOrRank,
    #[expect(dead_code, reason = "owns memory that the sampler reads")]
    memory: HeadMemory,
    device: Arc<Device>,
    /// The CUDA context that is current when this value is dropped. The drop of this field makes the context current
    /// again, after the drop of the sampler.
    context: Option<ThreadContext>,
    place: Place,
    has_lists: bool,
    #[expect(dead_code, reason = "owns tensors that the sampler reads")]
    head: Option<Arc<HeadParts>>,
}

/// Device memory that this package allocates for a head: a copy of the scales, and the shadow.
#[derive(Default)]
struct HeadMemory {
    scales: Option<CudaSlice<f32>>,
    shadow: Option<ShadowMemory>,
}

/// A sampler of one GPU with all tokens, or a rank of several GPUs that share the vocabulary.
enum OneOrRank {
    One(DeviceSampler),
    Rank(Box<CudaRank<'static, Group>>),
}

impl OneOrRank {
    /// Allocates memory for up to `max_adjusted` adjusted tokens in a row of [`OnDevice::enqueue`]; `None` allocates no
    /// memory. With a group, all ranks must call this function.
    fn prepare_lists(&mut self, max_adjusted: Option<usize>) -> PyResult<()> {
        let Some(most) = max_adjusted else { return Ok(()) };
        let (columns, out) = (RowColumns::default(), TokenColumns::default());
        match self {
            OneOrRank::One(sampler) => sampler.prepare_enqueue(&columns, &out, most).map_err(|error| failed(&error)),
            OneOrRank::Rank(sampler) => {
                sampler.prepare_enqueue(&columns, &out, most).map_err(|error| of_enqueue(&error))
            }
        }
    }
}

impl Drop for OnDevice {
    fn drop(&mut self) {
        self.context = ThreadContext::present();
    }
}

/// A guard that restores a thread's current CUDA context on drop, because torch reads its current device from this
/// context.
struct ThreadContext(usize);

impl ThreadContext {
    /// Reads the context of this thread. The driver must be loaded.
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
    /// Plans a sampler of existing logits on a GPU, with up to `max_adjusted` adjusted tokens in a row of
    /// [`OnDevice::enqueue`]. With `None`, `enqueue` takes no lists of tokens.
    ///
    /// # Errors
    /// The errors of the GPU and of the plan.
    pub(crate) fn for_logits(
        vocab_size: usize,
        (plan, max_adjusted): (Plan, Option<usize>),
        gpu: usize,
    ) -> PyResult<OnDevice> {
        Device::count().map_err(|error| failed(&error))?; // loads the driver
        let _context = ThreadContext::present();
        let device = Device::new(gpu).map_err(|error| failed(&error))?;
        let sampler = DeviceSampler::for_logits(vocab_size, plan, &device).map_err(|error| failed(&error))?;
        let (place, has_lists) = (Place::Cuda(gpu as i32), max_adjusted.is_some());
        let mut sampler = OneOrRank::One(sampler);
        sampler.prepare_lists(max_adjusted)?;
        Ok(OnDevice { sampler, memory: HeadMemory::default(), device, context: None, place, has_lists, head: None })
    }

    /// Plans a sampler of a head, after a wait for the work that writes weight, scales and bias. With a group, the head
    /// is this rank's shard, and all ranks must call this function. `max_adjusted` has the same meaning as in
    /// [`OnDevice::for_logits`]. With `has_shadow`, draws read an 8-bit copy of the weight (a shadow).
    ///
    /// # Errors
    /// The errors of the GPU, the head, the plan and the group.
    pub(crate) fn of_head(
        parts: Arc<HeadParts>,
        (plan, max_adjusted): (Plan, Option<usize>),
        has_shadow: bool,
        group: Option<Group>,
    ) -> PyResult<OnDevice> {
        let place = parts.weight.place;
        let Place::Cuda(id) = place else { return Err(invalid("head", "the head is not on a GPU")) };
        Device::count().map_err(|error| failed(&error))?; // loads the driver
        let _context = ThreadContext::present();
        let device = Device::new(usize::try_from(id).unwrap_or(0)).map_err(|error| failed(&error))?;
        let tokens = parts.vocab_size.saturating_sub(parts.first_token).min(parts.layout.rows);
        let as_u32 = |knob, value: usize| {
            u32::try_from(value).map_err(|_| invalid(knob, format!("{knob} is {value}, but must be below 2^32")))
        };
        let mut memory = HeadMemory::default();
        let scales = match &parts.scales {
            None => None,
            Some(WeightScales { values, block }) => {
                let address = match values {
                    Floats::Device(tensor) => DeviceAddress::new(tensor.address()),
                    Floats::Host(values) => {
                        let (copy, address) = copied(values, &device)?;
                        memory.scales = Some(copy);
                        address
                    }
                };
                Some(DeviceScales { address, block: *block, row_of_block: 0 })
            }
        };
        let bias = parts.bias.as_ref().and_then(Floats::on_device);
        let scale_tensor = parts.scales.as_ref().and_then(|scales| scales.values.on_device());
        for tensor in [Some(&parts.weight), bias, scale_tensor].into_iter().flatten() {
            stream(&device, tensor.stream).synchronize().map_err(|error| failed(&error))?;
        }
        let mut head = DeviceHead {
            weight: DeviceMatrix { rows: tokens, ..matrix(&parts.weight, &parts.layout) },
            scales,
            first_token: as_u32("first_token", parts.first_token)?,
            bias: bias.map(|tensor| DeviceAddress::new(tensor.address())),
            soft_cap: parts.soft_cap,
            scale: parts.scale,
            shadow: None,
        };
        if has_shadow && tokens > 0 {
            let refused = |error: CudaError| invalid("shadow", error.to_string());
            head.check_shadow_on(&device).map_err(refused)?;
            // SAFETY: the weight is a tensor of this device, which `Tensor` checked; the code above waited for it.
            let (made, codes) = unsafe { shadow_of(&head.weight, &device) }?;
            (head.shadow, memory.shadow) = (Some(made), Some(codes));
            head.check_shadow_on(&device).map_err(refused)?;
        }
        let vocab_size = as_u32("vocab_size", parts.vocab_size)?;
        // SAFETY: weight, scales and bias are tensors of this device. Copied scales and the shadow are memory of this
        // device. The result holds all of this memory, and drops the memory after the sampler. `Tensor`, `WeightScales`
        // and `Head` checked the shapes. By the package's documentation, no code writes to this memory during a call.
        let sampler = unsafe { DeviceSampler::new(head, vocab_size, plan, &device) };
        let sampler = sampler.map_err(|error| failed(&error))?;
        let mut sampler = match group {
            None => OneOrRank::One(sampler),
            Some(group) => {
                let options = CudaRankOptions { device: device.context().ordinal(), ..CudaRankOptions::default() };
                let rank = CudaRank::in_place(sampler, group, &options).map_err(|error| failed(&error))?;
                OneOrRank::Rank(Box::new(rank))
            }
        };
        sampler.prepare_lists(max_adjusted)?;
        let has_lists = max_adjusted.is_some();
        Ok(OnDevice { sampler, memory, device, context: None, place, has_lists, head: Some(parts) })
    }

    pub(crate) fn description(&self) -> Description {
        match &self.sampler {
            OneOrRank::One(sampler) => sampler.description().clone(),
            OneOrRank::Rank(sampler) => sampler.description(),
        }
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// Draws after all earlier work on the tensor's stream, and waits for the results.
    ///
    /// # Errors
    /// The outer result is an error if the tensor is not a matrix on this GPU. The inner result has the sampler's
    /// errors.
    pub(crate) fn sample(
        &mut self,
        input: &Tensor,
        what: &'static str,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> PyResult<Result<(), SampleError>> {
        let layout = input.layout(what)?;
        self.check_place(input, what)?;
        let _context = ThreadContext::present();
        let (stream, matrix) = (stream(&self.device, input.stream), matrix(input, &layout));
        // SAFETY: the tensor is memory of this device, which `input` holds during the call. The library of the tensor
        // orders the work that writes the tensor before later work on this stream. The stream is the caller's current
        // stream of this device, and lives during the call. If the stream is capturing a graph, the driver refuses to
        // wait. A call of a rank waits for its work, and does not use the hidden states after the call.
        let sampled = unsafe {
            match &mut self.sampler {
                OneOrRank::One(sampler) => sampler.sample(&stream, &matrix, rows, out),
                OneOrRank::Rank(sampler) => {
                    let hidden = DeviceHidden::new(&stream, matrix).map_err(|error| failed(&error))?;
                    sampler.sample_device(&hidden, rows, out)
                }
            }
        };
        Ok(sampled)
    }

    /// Enqueues draws on the tensor's stream, and returns without waiting.
    ///
    /// # Errors
    /// The input is not a matrix on this GPU, the call has lists of tokens without `max_adjusted`, or the GPU fails.
    pub(crate) fn enqueue(&mut self, input: &Tensor, what: &'static str, call: &DeviceCall) -> PyResult<()> {
        let layout = input.layout(what)?;
        self.check_place(input, what)?;
        if let Some(tokens) = call.listed.filter(|_| !self.has_lists) {
            let text = format!("{tokens} needs Sampler(max_adjusted=...), which is None");
            return Err(invalid("max_adjusted", text));
        }
        let _context = ThreadContext::present();
        let (stream, matrix) = (stream(&self.device, input.stream), matrix(input, &layout));
        // SAFETY: the input and `call` are tensors of this device, which `borrow` checked. By the package's
        // documentation, the lists of tokens are within their tensors. The tensors' libraries keep the memory for work
        // that is enqueued on this stream before the tensors are freed. By the package's documentation, the caller
        // orders calls of this value on several streams, and this value outlives graphs. The stream lives during the
        // call, as in `sample`. The drop of this value waits for the GPU.
        unsafe {
            match &mut self.sampler {
                OneOrRank::One(sampler) => {
                    sampler.enqueue(&stream, &matrix, &call.columns, &call.out).map_err(|error| failed(&error))
                }
                OneOrRank::Rank(sampler) => {
                    let call = ColumnCall::new(&stream, matrix, call.columns, call.out);
                    sampler.enqueue(&call).map_err(|error| of_enqueue(&error))
                }
            }
        }
    }

    fn check_place(&self, input: &Tensor, what: &'static str) -> PyResult<()> {
        match input.place == self.place {
            true => Ok(()),
            false => Err(invalid(what, format!("{what} is on {}, but must be on {}", input.place, self.place))),
        }
    }
}

/// Makes the shadow (an 8-bit copy) of a weight: copies the weight to the host, and the shadow to the device.
///
/// # Safety
/// The weight is device memory of this device, and no work that writes to it is pending.
unsafe fn shadow_of(weight: &DeviceMatrix, device: &Device) -> PyResult<(DeviceShadow, ShadowMemory)> {
    let DeviceMatrix { address, dtype, rows, cols, row_stride } = *weight;
    let elements = if rows == 0 { 0 } else { (rows - 1) * row_stride + cols };
    let mut bytes = vec![0u8; elements * dtype.block_bytes()];
    let context = device.context();
    context.bind_to_thread().map_err(|error| failed(&error))?;
    if !bytes.is_empty() {
        // SAFETY: the caller promises that the weight is memory of this device, so the memory has these bytes.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, address.get()) }.map_err(|error| failed(&error))?;
    }
    let on_host = Matrix::from_bytes(&bytes, dtype, rows, cols, row_stride).map_err(|error| failed(&error))?;
    let buffer = make_shadow(&on_host).map_err(|error| invalid("shadow", error.to_string()))?;
    drop(bytes);
    let stream = context.new_stream().map_err(|error| failed(&error))?;
    let uploaded = DeviceShadow::upload(&buffer.shadow(), &stream).map_err(|error| failed(&error))?;
    stream.synchronize().map_err(|error| failed(&error))?;
    Ok(uploaded)
}

/// Copies floats to a GPU, and waits for the copy.
fn copied(values: &[f32], device: &Device) -> PyResult<(CudaSlice<f32>, DeviceAddress<f32>)> {
    let stream = device.context().new_stream().map_err(|error| failed(&error))?;
    let copy = stream.clone_htod(values).map_err(|error| failed(&error))?;
    stream.synchronize().map_err(|error| failed(&error))?;
    let address = DeviceAddress::of(&copy, &stream);
    Ok((copy, address))
}

fn matrix(tensor: &Tensor, layout: &Layout) -> DeviceMatrix {
    let Layout { dtype, rows, cols, row_stride } = *layout;
    DeviceMatrix { address: DeviceAddress::new(tensor.address()), dtype, rows, cols, row_stride }
}

/// Wraps the caller's stream, which has this address.
fn stream(device: &Device, address: u64) -> Arc<CudaStream> {
    // SAFETY: the address is the address of torch's or CuPy's current stream of this device, or 0 for the default
    // stream. The wrapper is dropped before the call returns to the caller, and only the stream orders work.
    unsafe { device.context().wrap_borrowed_stream(address as _) }
}
