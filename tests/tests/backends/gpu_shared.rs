//! The factory of the sampler whose weight and hidden states are the caller's device memory.

use super::boxed;
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{Capabilities, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_cuda::{CudaError, CudaTiled, Device, DeviceHead, DeviceMatrix, DeviceSampler};
use std::sync::Arc;

/// A head copied to the first GPU, and a sampler that reads it there.
pub(crate) struct Copied {
    pub(crate) sampler: DeviceSampler,
    pub(crate) stream: Arc<CudaStream>,
    _head: (CudaSlice<u8>, Option<CudaSlice<f32>>),
}

/// A matrix row after row in device memory, and the memory.
pub(crate) fn copied(matrix: Matrix<'_>, stream: &Arc<CudaStream>) -> (CudaSlice<u8>, DeviceMatrix) {
    let (rows, cols, dtype) = (matrix.rows(), matrix.cols(), matrix.dtype());
    let mut bytes: Vec<u8> = (0..rows).flat_map(|row| matrix.row_bytes(row).iter().copied()).collect();
    bytes.resize(bytes.len().max(16), 0);
    let memory = stream.clone_htod(&bytes).unwrap();
    let address = DeviceAddress::of(&memory, stream);
    (memory, DeviceMatrix { address, dtype, rows, cols, row_stride: cols })
}

impl Copied {
    pub(crate) fn new(head: Head<'_>, plan: Plan) -> Result<Self, CudaError> {
        let device = Device::new(0)?;
        // As an engine has them, in a context of its own over the same GPU.
        let stream = flash_sampling_cuda::cudarc::driver::CudaContext::new(0).unwrap().per_thread_stream();
        let tokens = head.tokens();
        let rows = head.weight_row(tokens.start)..head.weight_row(tokens.start) + tokens.len();
        let (memory, weight) = copied(head.weight().row_range(rows.clone()), &stream);
        let bias = head.bias().map(|bias| stream.clone_htod(&bias[rows]).unwrap());
        stream.synchronize().unwrap();
        let on_device = DeviceHead {
            weight,
            first_token: tokens.start,
            bias: bias.as_ref().map(|bias| DeviceAddress::of(bias, &stream)),
            soft_cap: head.soft_cap(),
            scale: head.scale(),
        };
        // SAFETY: weight and bias are of these sizes, nothing writes to them, and they are dropped after the sampler.
        let sampler = unsafe { DeviceSampler::new(on_device, head.vocab_size(), plan, &device) }?;
        Ok(Copied { sampler, stream, _head: (memory, bias) })
    }
}

impl PerturbedArgmax for Copied {
    fn capabilities(&self) -> Capabilities {
        self.sampler.capabilities()
    }

    fn shape(&self) -> Shape {
        self.sampler.shape()
    }

    fn plan(&self) -> Plan {
        self.sampler.plan()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        let (_memory, hidden) = copied(input, &self.stream);
        // SAFETY: the hidden states were enqueued on the same stream and live until the call, which waits, returns.
        unsafe { self.sampler.sample(&self.stream, &hidden, rows, out) }
    }
}

/// The sampler over device memory, by way of copies of what the suite has in host memory.
pub(crate) struct Shared;

impl SamplerFactory for Shared {
    fn name(&self) -> String {
        "cuda/shared".into()
    }

    fn unavailable(&self) -> Option<String> {
        Device::new(0).err().map(|error| error.to_string())
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(ReferenceVariant::Tiled)
    }

    fn pace(&self) -> usize {
        8
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        match (head.tokens().is_empty(), Device::new(0)) {
            // There is nothing to point to.
            (true, Ok(device)) => boxed(CudaTiled::new(head, plan, &device)),
            _ => boxed(Copied::new(head, plan)),
        }
    }
}
