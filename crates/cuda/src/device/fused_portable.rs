//! The fused kernels for all GPUs of compute capability 8.0 or later: their instances and their launch.

use crate::abi::{self, Call, Candidates, LogitStore, Matrices, Summaries};
use crate::compile::{Instance, KernelSource, kernels};
use crate::device::{Device, DeviceHead, Entry, Grid, Kernel, MAX_ROWS, Queue, entries, launch_words};
use crate::error::CudaError;
use core::fmt::Display;
use cudarc::driver::CudaModule;
use flash_sampling_core::DType;
use std::sync::Arc;

/// On tensor cores: one instance per number of columns and operand type.
pub(crate) static TENSOR: KernelSource = KernelSource {
    file: "fused_portable.cu",
    serves: kernels::any,
    instances: || {
        let candidates = Portable::up_to(MAX_SHADOW_ROWS, Products::Shadow, Epilogue::Candidates);
        let draws = all([
            Products::Tensor(DType::BF16),
            Products::Tensor(DType::F16),
            Products::TensorScaled(DType::F8_E4M3),
            Products::TensorScaled(DType::I8),
        ]);
        draws.into_iter().chain(candidates.map(Portable::instance)).collect()
    },
};

/// The maximum number of rows of a launch that reads a shadow. With 64 rows, a draw takes 0.86 of the time without a
/// shadow, on an H200. With more rows, the products limit the time, and a shadow makes them no faster: 8-bit products
/// take half the time, but a row has two rows of digits.
pub(crate) const MAX_SHADOW_ROWS: usize = 64;

/// Without tensor cores, for float32, for pairs of different types, and for quantised weights.
///
/// This kernel has no performance target yet.
pub(crate) static PLAIN: KernelSource = KernelSource {
    file: "fused_plain.cu",
    serves: kernels::any,
    instances: || all([Products::Plain, Products::Quantised]),
};

fn all<const N: usize>(products: [Products; N]) -> Vec<Instance> {
    let of_products = |products| [Epilogue::Draw, Epilogue::Summary].map(|e| Portable::up_to(MAX_ROWS, products, e));
    products.into_iter().flat_map(of_products).flatten().map(Portable::instance).collect()
}

/// The products of an instance. Without a shadow, they depend only on the head and on the type of the hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Products {
    /// On tensor cores, with both factors of this type: bf16 or f16.
    Tensor(DType),
    /// On tensor cores, with a weight of this type, fp8 or int8, and hidden states in bf16. The scale of a weight row
    /// multiplies its sums.
    TensorScaled(DType),
    /// On tensor cores, with the codes of a shadow and the digits of hidden states. Gives upper bounds of dot products.
    Shadow,
    /// Without tensor cores, in float32.
    Plain,
    /// As [`Products::Plain`], with weights that are decoded to float32.
    Quantised,
}

impl Products {
    /// The products of a head with hidden states of this type.
    pub(crate) fn of(head: &DeviceHead, hidden: DType) -> Products {
        let weight = head.weight.dtype;
        match weight {
            DType::BF16 | DType::F16 if weight == hidden => Products::Tensor(weight),
            _ if hidden == DType::BF16 && head.can_scale_sums() => Products::TensorScaled(weight),
            _ if weight.is_float() => Products::Plain,
            _ => Products::Quantised,
        }
    }

    /// The products with hidden states of the type that a plan expects: the weight's type, or bf16.
    pub(crate) fn planned(head: &DeviceHead) -> Products {
        Products::of(head, head.hidden_dtype())
    }

    fn is_tensor(self) -> bool {
        matches!(self, Products::Tensor(_) | Products::TensorScaled(_) | Products::Shadow)
    }
}

/// The results that an instance computes from the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// Draws, and optionally stored logits. The argument is [`LogitStore`](crate::abi::LogitStore).
    Draw,
    /// Lists of the tokens that can win, for [`Products::Shadow`]. The argument is
    /// [`Candidates`](crate::abi::Candidates).
    Candidates,
    /// Log-masses and samples of groups. The argument is [`Summaries`](crate::abi::Summaries).
    Summary,
}

impl Epilogue {
    fn name(self) -> &'static str {
        match self {
            Epilogue::Draw => "DrawEpilogue",
            Epilogue::Candidates => "CandidatesEpilogue",
            Epilogue::Summary => "SummaryEpilogue",
        }
    }

    /// Tokens of a granule, the unit of work that blocks share.
    fn granule(self) -> u32 {
        match self {
            Epilogue::Draw | Epilogue::Candidates => 16,
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
    products: Products,
    epilogue: Epilogue,
}

const COLUMNS: [u32; 6] = [8, 16, 32, 64, 128, 256];
const PLAIN_COLUMNS: [u32; 2] = [8, 64];

impl Portable {
    /// The instances for calls of up to `rows` rows, smallest first.
    pub(crate) fn up_to(rows: usize, products: Products, epilogue: Epilogue) -> impl Iterator<Item = Portable> {
        let columns: &[u32] = if products.is_tensor() { &COLUMNS } else { &PLAIN_COLUMNS };
        let largest = columns.iter().position(|&c| c as usize >= rows).unwrap_or(columns.len() - 1);
        columns[..=largest].iter().map(move |&columns| Portable { columns, products, epilogue })
    }

    /// The instance for a call of `rows` rows, at most [`MAX_ROWS`].
    pub(crate) fn for_rows(rows: usize, products: Products, epilogue: Epilogue) -> Portable {
        Portable::up_to(rows, products, epilogue).last().expect("there is a smallest instance")
    }

    fn instance(self) -> Instance {
        let epilogue = self.epilogue.name();
        let tensor = |operand: DType| {
            let operand = abi::element_name(operand);
            let defines: [(_, &dyn Display); 3] =
                [("COLUMNS", &self.columns), ("OPERAND", &operand), ("EPILOGUE", &epilogue)];
            match self.products {
                Products::TensorScaled(weight) => {
                    let weight: &dyn Display = &abi::element_name(weight);
                    let instance = Instance::new(&[&defines[..], &[("WEIGHT", weight)]].concat());
                    // For 8.0 and 10.0, the instance of 256 rows spills registers. It has no performance target yet.
                    if self.columns == 256 { instance.cold() } else { instance }
                }
                _ => Instance::new(&defines),
            }
        };
        match self.products {
            Products::Tensor(operand) => tensor(operand),
            Products::TensorScaled(_) => tensor(DType::BF16),
            Products::Shadow => {
                let defines: [(_, &dyn Display); 4] =
                    [("COLUMNS", &self.columns), ("OPERAND", &"S8"), ("EPILOGUE", &epilogue), ("ALIGNED", &1)];
                Instance::new(&defines)
            }
            Products::Plain | Products::Quantised => {
                let is_quantised = self.products == Products::Quantised;
                let defines: [(_, &dyn Display); 3] =
                    [("COLUMNS", &self.columns), ("QUANTISED", &is_quantised), ("EPILOGUE", &epilogue)];
                Instance::new(&defines).cold()
            }
        }
    }

    pub(crate) fn load(self, device: &Device) -> Result<LoadedPortable, CudaError> {
        let source = if self.products.is_tensor() { &TENSOR } else { &PLAIN };
        let module = device.module(source, &self.instance())?;
        let [shared_bytes, threads, blocks] = launch_words(&module, "fused_launch", device)?;
        let kernels = match self.epilogue {
            Epilogue::Draw => {
                let entries = [&entries::FUSED_DRAW, &entries::FUSED_DRAW_UNALIGNED];
                PortableKernels::Draw(self.both(&module, entries, shared_bytes)?)
            }
            Epilogue::Candidates => {
                let kernel = Kernel::load(&module, &entries::FUSED_CANDIDATES)?;
                PortableKernels::Candidates(kernel.with_shared(shared_bytes)?)
            }
            Epilogue::Summary => {
                let entries = [&entries::FUSED_SUMMARY, &entries::FUSED_SUMMARY_UNALIGNED];
                PortableKernels::Summary(self.both(&module, entries, shared_bytes)?)
            }
        };
        let blocks = blocks.clamp(1, MAX_BLOCKS as u32) * device.multiprocessors();
        Ok(LoadedPortable { portable: self, kernels, shared_bytes, threads, blocks })
    }

    /// Returns the kernels for aligned and for unaligned factors. Without tensor cores, both are the same kernel.
    fn both<E>(
        self,
        module: &Arc<CudaModule>,
        [aligned, unaligned]: [&Entry<(Call, Matrices, E)>; 2],
        shared_bytes: u32,
    ) -> Result<Both<E>, CudaError> {
        let unaligned = if self.products.is_tensor() { unaligned } else { aligned };
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
    Candidates(Kernel<(Call, Matrices, Candidates)>),
    Summary(Both<Summaries>),
}

/// The output of an instance besides the draws.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PortableOutput {
    /// Logits, or nothing, for [`Epilogue::Draw`].
    Draw(LogitStore),
    /// The lists of candidates, for [`Epilogue::Candidates`].
    Candidates(Candidates),
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
    /// Returns the loaded kernel of an instance. Loads the kernel at its first use.
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
        // No asynchronous copy reads a weight of 8-bit elements, so only the hidden states must be aligned.
        let has_scales = matches!(self.portable.products, Products::TensorScaled(_));
        let is_aligned = (has_scales || matrices.weight_unit == 16) && matrices.hidden_unit == 16;
        let grid = Grid { shared_bytes: self.shared_bytes, ..Grid::of(blocks, self.threads) };
        match (&self.kernels, output) {
            (PortableKernels::Draw(both), PortableOutput::Draw(to)) => {
                let kernel = if is_aligned { &both.aligned } else { &both.unaligned };
                queue.launch(kernel, grid, (call, matrices, to))
            }
            (PortableKernels::Candidates(kernel), PortableOutput::Candidates(to)) => {
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
    use crate::abi::DeviceAddress;
    use crate::device::{DeviceMatrix, DeviceScales};

    #[test]
    fn instances_cover_a_plan() {
        let columns =
            |rows, products| Portable::up_to(rows, products, Epilogue::Draw).map(|p| p.columns).collect::<Vec<_>>();
        assert_eq!(columns(1, Products::Tensor(DType::BF16)), [8]);
        assert_eq!(columns(17, Products::TensorScaled(DType::I8)), [8, 16, 32]);
        assert_eq!(columns(256, Products::Quantised), [8, 64]);
        for rows in 1..=MAX_ROWS {
            let tensor = Portable::for_rows(rows, Products::Tensor(DType::BF16), Epilogue::Summary);
            assert!(tensor.columns as usize >= rows && (tensor.columns == 8 || tensor.columns as usize / 2 < rows));
        }
    }

    #[test]
    fn types_and_scales_decide_the_products() {
        let address = DeviceAddress::new(4096);
        let head = |dtype, block: Option<[usize; 2]>| DeviceHead {
            scales: block.map(|block| DeviceScales { address: address.cast(), block, row_of_block: 0 }),
            ..DeviceHead::of(DeviceMatrix { address, dtype, rows: 512, cols: 256, row_stride: 256 })
        };
        let products = |dtype, block, hidden| Products::of(&head(dtype, block), hidden);
        assert_eq!(products(DType::BF16, None, DType::BF16), Products::Tensor(DType::BF16));
        assert_eq!(products(DType::BF16, None, DType::F16), Products::Plain);
        assert_eq!(products(DType::F32, None, DType::F32), Products::Plain);
        assert_eq!(products(DType::Q8_0, None, DType::BF16), Products::Quantised);
        for (block, is_tensor) in
            [(None, true), (Some([1, 256]), true), (Some([512, 9999]), true), (Some([128; 2]), false)]
        {
            for dtype in [DType::F8_E4M3, DType::I8] {
                let want = if is_tensor { Products::TensorScaled(dtype) } else { Products::Quantised };
                assert_eq!(products(dtype, block, DType::BF16), want, "{block:?}");
                assert_eq!(products(dtype, block, DType::F32), Products::Quantised);
                assert_eq!(Products::planned(&head(dtype, block)), want);
            }
        }
    }
}
