//! The fused kernels for all GPUs of compute capability 8.0 or later: their instances and their launch.

use crate::abi::{self, Call, LogitStore, Matrices, Summaries};
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::entries;
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::launch::{Entry, Grid, Kernel, Queue};
use crate::device::launch_config::launch_words;
use crate::error::CudaError;
use cudarc::driver::CudaModule;
use flash_sampling_core::DType;
use std::sync::Arc;

/// On tensor cores: one instance per number of columns and operand type.
pub(crate) static TENSOR: KernelSource = KernelSource {
    file: "fused_portable.cu",
    serves: kernels::any,
    instances: || all([Some(DType::BF16), Some(DType::F16)]),
};

/// Without tensor cores, for float32, for pairs of different types, and for quantised weights.
///
/// This kernel has no performance target yet.
pub(crate) static PLAIN: KernelSource =
    KernelSource { file: "fused_plain.cu", serves: kernels::any, instances: || all([None]) };

fn all<const N: usize>(operands: [Option<DType>; N]) -> Vec<Instance> {
    let of_operand = |operand| [Epilogue::Draw, Epilogue::Summary].map(|e| Portable::up_to(MAX_ROWS, operand, e));
    operands.into_iter().flat_map(of_operand).flatten().map(Portable::instance).collect()
}

/// The results that an instance computes from the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// Draws, and optionally stored logits. The argument is [`LogitStore`](crate::abi::LogitStore).
    Draw,
    /// Log-masses and samples of groups. The argument is [`Summaries`](crate::abi::Summaries).
    Summary,
}

impl Epilogue {
    fn name(self) -> &'static str {
        match self {
            Epilogue::Draw => "DrawEpilogue",
            Epilogue::Summary => "SummaryEpilogue",
        }
    }

    /// Tokens of a granule, the unit of work that blocks share.
    fn granule(self) -> u32 {
        match self {
            Epilogue::Draw => 16,
            Epilogue::Summary => 64,
        }
    }
}

/// The maximum number of blocks per multiprocessor, for all instances.
pub(crate) const MAX_BLOCKS: usize = 2;

/// One instance of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Portable {
    /// The maximum number of rows; the plain kernel takes more rows, this many at a time.
    columns: u32,
    /// The type of both factors; `None` = any types, without tensor cores.
    operand: Option<DType>,
    epilogue: Epilogue,
}

const COLUMNS: [u32; 6] = [8, 16, 32, 64, 128, 256];
const PLAIN_COLUMNS: [u32; 2] = [8, 64];

impl Portable {
    /// The tensor-core operand type for these types; `None` without tensor cores.
    pub(crate) fn operand(weight: DType, hidden: DType) -> Option<DType> {
        (weight == hidden && matches!(weight, DType::BF16 | DType::F16)).then_some(weight)
    }

    /// The instances for calls of up to `rows` rows, smallest first.
    pub(crate) fn up_to(rows: usize, operand: Option<DType>, epilogue: Epilogue) -> impl Iterator<Item = Portable> {
        let columns: &[u32] = if operand.is_some() { &COLUMNS } else { &PLAIN_COLUMNS };
        let largest = columns.iter().position(|&c| c as usize >= rows).unwrap_or(columns.len() - 1);
        columns[..=largest].iter().map(move |&columns| Portable { columns, operand, epilogue })
    }

    /// The instance for a call of `rows` rows, at most [`MAX_ROWS`].
    pub(crate) fn for_rows(rows: usize, operand: Option<DType>, epilogue: Epilogue) -> Portable {
        Portable::up_to(rows, operand, epilogue).last().expect("there is a smallest instance")
    }

    fn instance(self) -> Instance {
        let epilogue = self.epilogue.name();
        match self.operand {
            Some(dtype) => Instance::new(&[
                ("COLUMNS", &self.columns),
                ("OPERAND", &abi::element_name(dtype)),
                ("EPILOGUE", &epilogue),
            ]),
            None => Instance::new(&[("COLUMNS", &self.columns), ("EPILOGUE", &epilogue)]).cold(),
        }
    }

    pub(crate) fn load(self, device: &Device) -> Result<LoadedPortable, CudaError> {
        let source = if self.operand.is_some() { &TENSOR } else { &PLAIN };
        let module = device.module(source, &self.instance())?;
        let [shared_bytes, threads, blocks] = launch_words(&module, "fused_launch", device)?;
        let kernels = match self.epilogue {
            Epilogue::Draw => {
                let entries = [&entries::FUSED_DRAW, &entries::FUSED_DRAW_UNALIGNED];
                PortableKernels::Draw(self.both(&module, entries, shared_bytes)?)
            }
            Epilogue::Summary => {
                let entries = [&entries::FUSED_SUMMARY, &entries::FUSED_SUMMARY_UNALIGNED];
                PortableKernels::Summary(self.both(&module, entries, shared_bytes)?)
            }
        };
        let blocks = blocks.clamp(1, MAX_BLOCKS as u32) * device.multiprocessors();
        Ok(LoadedPortable { portable: self, kernels, shared_bytes, threads, blocks })
    }

    /// The kernels for aligned and for unaligned factors. Without tensor cores, they are the same kernel.
    fn both<E>(
        self,
        module: &Arc<CudaModule>,
        [aligned, unaligned]: [&Entry<(Call, Matrices, E)>; 2],
        shared_bytes: u32,
    ) -> Result<Both<E>, CudaError> {
        let unaligned = if self.operand.is_some() { unaligned } else { aligned };
        let load = |entry| Kernel::load(module, entry)?.with_shared(shared_bytes);
        Ok(Both { aligned: load(aligned)?, unaligned: load(unaligned)? })
    }
}

/// A kernel, and its version for factors that asynchronous copies cannot read.
#[derive(Debug)]
struct Both<E> {
    aligned: Kernel<(Call, Matrices, E)>,
    unaligned: Kernel<(Call, Matrices, E)>,
}

/// The kernels of an instance, with the output type of its epilogue.
#[derive(Debug)]
enum PortableKernels {
    Draw(Both<LogitStore>),
    Summary(Both<Summaries>),
}

/// The output of an instance besides the draws.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PortableOutput {
    /// Logits, or nothing, for [`Epilogue::Draw`].
    Draw(LogitStore),
    /// Log-masses and samples of groups, for [`Epilogue::Summary`].
    Summary(Summaries),
}

#[derive(Debug)]
pub(crate) struct LoadedPortable {
    pub(crate) portable: Portable,
    kernels: PortableKernels,
    shared_bytes: u32,
    threads: u32,
    blocks: u32,
}

impl LoadedPortable {
    /// The loaded kernel of an instance; loads it if needed.
    pub(crate) fn of<'k>(
        loaded: &'k mut Vec<Arc<LoadedPortable>>,
        instance: Portable,
        device: &Device,
    ) -> Result<&'k LoadedPortable, CudaError> {
        let at = match loaded.iter().position(|kernel| kernel.portable == instance) {
            Some(at) => at,
            None => {
                loaded.push(device.portable(instance)?);
                loaded.len() - 1
            }
        };
        Ok(&loaded[at])
    }

    /// The number of blocks for `tokens` tokens: at most one per granule.
    pub(crate) fn blocks(&self, tokens: u32) -> u32 {
        self.blocks.min(tokens.div_ceil(self.portable.epilogue.granule()))
    }

    /// Launches the kernel with an output of this instance's epilogue.
    ///
    /// `blocks` is at least 1 and at most [`LoadedPortable::blocks`]. The instance supports the types of the factors.
    /// `call` has at least one row and one token, and at most as many rows as [`Portable::for_rows`] allows. The
    /// scratch is in the state that abi.cuh requires between launches.
    pub(crate) fn launch(
        &self,
        queue: Queue<'_>,
        call: Call,
        matrices: Matrices,
        output: PortableOutput,
        blocks: u32,
    ) -> Result<(), CudaError> {
        let is_aligned = matrices.weight_unit == 16 && matrices.hidden_unit == 16;
        let grid = Grid { shared_bytes: self.shared_bytes, ..Grid::of(blocks, self.threads) };
        match (&self.kernels, output) {
            (PortableKernels::Draw(both), PortableOutput::Draw(to)) => {
                let kernel = if is_aligned { &both.aligned } else { &both.unaligned };
                queue.launch(kernel, grid, (call, matrices, to))
            }
            (PortableKernels::Summary(both), PortableOutput::Summary(to)) => {
                let kernel = if is_aligned { &both.aligned } else { &both.unaligned };
                queue.launch(kernel, grid, (call, matrices, to))
            }
            _ => Err(CudaError::Corrupt { what: "a kernel with another epilogue" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_cover_a_plan() {
        let columns =
            |rows, operand| Portable::up_to(rows, operand, Epilogue::Draw).map(|p| p.columns).collect::<Vec<_>>();
        assert_eq!(columns(1, Some(DType::BF16)), [8]);
        assert_eq!(columns(17, Some(DType::F16)), [8, 16, 32]);
        assert_eq!(columns(256, None), [8, 64]);
        for rows in 1..=MAX_ROWS {
            let tensor = Portable::for_rows(rows, Some(DType::BF16), Epilogue::Summary);
            assert!(tensor.columns as usize >= rows && (tensor.columns == 8 || tensor.columns as usize / 2 < rows));
        }
        assert_eq!(Portable::operand(DType::BF16, DType::F16), None);
        assert_eq!(Portable::operand(DType::F32, DType::F32), None);
        assert_eq!(Portable::operand(DType::Q8_0, DType::Q8_0), None);
    }
}
