//! Factories of the CUDA backend.

use super::gpu_memory::Copied;
use super::{GROUP, described};
use flash_sampling_conformance::factory::FromLogits;
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Description, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, StreamError,
};
use flash_sampling_cuda::cudarc::driver::CudaStream;
use flash_sampling_cuda::{
    CudaError, CudaGrouped, CudaOnline, CudaStandalone, CudaStreamed, CudaTiled, Device, KernelChoice,
};
use std::sync::Arc;

/// The bytes of a block of a streamed weight. Heads of the suite have one block to some dozens.
const BLOCK: usize = 1 << 18;

/// The kernels of the tiled variant.
pub(crate) const CHOICES: [KernelChoice; 3] =
    [KernelChoice::Fastest, KernelChoice::Portable, KernelChoice::PortableUnaligned];

/// A variant of the CUDA backend on the first GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gpu {
    Tiled(KernelChoice),
    /// Over a weight and hidden states in device memory.
    Shared,
    /// With groups of the given size.
    Grouped(u32),
    /// With groups of the given size.
    Online(u32),
    /// Over a weight that is read block by block.
    StreamedTiled,
    StreamedOnline,
    /// Over existing logits.
    Standalone,
    /// Over existing logits in device memory.
    SharedLogits,
}

impl Gpu {
    pub(crate) const TILED: Gpu = Gpu::Tiled(KernelChoice::Fastest);

    /// Returns the GPU of a test of this variant. Without one, the test counts as one skipped test.
    pub(crate) fn device(self) -> Option<Arc<Device>> {
        runs(&self.name(), self.unavailable(), 1).then(|| Device::new(0).unwrap())
    }

    /// Returns the GPU of a test, as [`Gpu::device`], and a stream there.
    pub(crate) fn with_stream(self) -> Option<(Arc<Device>, Arc<CudaStream>)> {
        self.device().map(|device| (device.clone(), device.context().new_stream().unwrap()))
    }

    fn variant(self) -> &'static str {
        match self {
            Gpu::Tiled(KernelChoice::Fastest) => "tiled",
            Gpu::Tiled(KernelChoice::Portable) => "tiled/portable",
            Gpu::Tiled(KernelChoice::PortableUnaligned) => "tiled/unaligned",
            Gpu::Shared => "shared",
            Gpu::Grouped(_) => "grouped",
            Gpu::Online(_) => "online",
            Gpu::StreamedTiled => "streamed-tiled",
            Gpu::StreamedOnline => "streamed-online",
            Gpu::Standalone => "standalone",
            Gpu::SharedLogits => "shared-logits",
        }
    }

    fn sampler<'w>(self, head: Head<'w>, plan: Plan, device: &Arc<Device>) -> Result<Built<'w>, CudaError> {
        Ok(match self {
            Gpu::Shared => Box::new(Copied::new(head, plan)?),
            Gpu::Tiled(choice) => Box::new(CudaTiled::with_kernels(head, plan, device, choice)?),
            Gpu::Grouped(group) => Box::new(CudaGrouped::new(head, plan, group, device)?),
            Gpu::Online(group) => Box::new(CudaOnline::new(head, plan, group, device)?),
            Gpu::StreamedTiled => {
                Box::new(InMemory::new(head, CudaStreamed::tiled(described(&head), plan, BLOCK, device)?))
            }
            Gpu::StreamedOnline => {
                Box::new(InMemory::new(head, CudaStreamed::online(described(&head), plan, GROUP, BLOCK, device)?))
            }
            Gpu::Standalone => {
                let sampler = CudaStandalone::new(head.vocab_size() as usize, plan, device)?;
                Box::new(FromLogits::new(head, sampler))
            }
            Gpu::SharedLogits => {
                let sampler = Copied::for_logits(head.vocab_size() as usize, plan, device)?;
                Box::new(FromLogits::new(head, sampler))
            }
        })
    }
}

type Built<'w> = Box<dyn PerturbedArgmax + 'w>;

impl SamplerFactory for Gpu {
    fn name(&self) -> String {
        format!("cuda/{}", self.variant())
    }

    fn unavailable(&self) -> Option<String> {
        Device::new(0).err().map(|error| error.to_string())
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(match *self {
            Gpu::Grouped(group) => ReferenceVariant::Grouped(group),
            Gpu::Online(group) => ReferenceVariant::Online(group),
            Gpu::StreamedOnline => ReferenceVariant::Online(GROUP),
            _ => ReferenceVariant::Tiled,
        })
    }

    fn pace(&self) -> usize {
        8
    }

    // A streamed weight begins at the vocabulary's first token.
    fn takes_shards(&self) -> bool {
        !matches!(self, Gpu::StreamedTiled | Gpu::StreamedOnline)
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Built<'w>, BuildError> {
        let sampler = Device::new(0).and_then(|device| self.sampler(head, plan, &device));
        sampler.map_err(|error| BuildError(error.to_string()))
    }
}

/// A streamed sampler over a weight in host memory.
struct InMemory<'w> {
    bytes: Vec<u8>,
    stream: CudaStreamed<'w>,
}

impl<'w> InMemory<'w> {
    fn new(head: Head<'w>, stream: CudaStreamed<'w>) -> Self {
        let weight = head.weight();
        let bytes = (0..weight.rows()).flat_map(|row| weight.row_bytes(row)).copied().collect();
        InMemory { bytes, stream }
    }
}

impl PerturbedArgmax for InMemory<'_> {
    fn description(&self) -> Description {
        self.stream.description().clone()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        self.stream.sample(&mut self.bytes.as_slice(), input, rows, out).map_err(|error| match error {
            StreamError::Call(error) => error,
            error => SampleError::Backend { backend: "cuda", source: Box::new(error) },
        })
    }
}
