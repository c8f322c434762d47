//! The fused kernels for every GPU from compute capability 8.0 on: their instances and their launch.
#![allow(unsafe_code)]

use crate::abi::{self, Call, Matrices};
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::device::launch_config::{allow_shared, launch_words};
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaStream};
use flash_sampling_core::DType;

/// On tensor cores: an instance for each number of columns and each operand type.
pub(crate) static TENSOR: KernelSource = KernelSource {
    file: "fused_portable.cu",
    serves: kernels::any,
    instances: || all([Some(DType::BF16), Some(DType::F16)]),
};

/// Without tensor cores, for float32 and for pairs of different types. Not hot, though such draws wait for it: it is the
/// way for types that no model's head should have, and no bound of its time is promised.
pub(crate) static PLAIN: KernelSource =
    KernelSource { file: "fused_plain.cu", serves: kernels::any, instances: || all([None]) };

fn all<const N: usize>(operands: [Option<DType>; N]) -> Vec<Instance> {
    let of_operand = |operand| [Epilogue::Draw, Epilogue::Summary].map(|e| Portable::up_to(MAX_ROWS, operand, e));
    operands.into_iter().flat_map(of_operand).flatten().map(Portable::instance).collect()
}

/// What is made of the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Epilogue {
    /// Draws, and stored logits where they are wanted. Its arguments are [`LogitStore`](crate::abi::LogitStore).
    Draw,
    /// Log-masses and samples of groups. Its arguments are [`Summaries`](crate::abi::Summaries).
    Summary,
}

impl Epilogue {
    fn name(self) -> &'static str {
        match self {
            Epilogue::Draw => "DrawEpilogue",
            Epilogue::Summary => "SummaryEpilogue",
        }
    }

    /// Tokens are shared out among blocks in granules of this many.
    fn granule(self) -> u32 {
        match self {
            Epilogue::Draw => 16,
            Epilogue::Summary => 64,
        }
    }
}

/// The most blocks on a multiprocessor, of any instance.
pub(crate) const MAX_BLOCKS: usize = 2;

/// One instance of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Portable {
    /// Rows of the batch that it takes; the plain kernel takes more, this many at a time.
    columns: u32,
    /// The type on both sides; `None` = any types, without tensor cores.
    operand: Option<DType>,
    epilogue: Epilogue,
}

const COLUMNS: [u32; 6] = [8, 16, 32, 64, 128, 256];
const PLAIN_COLUMNS: [u32; 2] = [8, 64];

impl Portable {
    /// What multiplies these types.
    pub(crate) fn operand(weight: DType, hidden: DType) -> Option<DType> {
        (weight == hidden && weight != DType::F32).then_some(weight)
    }

    /// The instances that calls of up to `rows` rows use, smallest first.
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

    /// Loads the kernel into a device.
    pub(crate) fn load(self, device: &Device) -> Result<LoadedPortable, CudaError> {
        let failed = CudaError::driver("load a kernel");
        let source = if self.operand.is_some() { &TENSOR } else { &PLAIN };
        let module = device.module(source, &self.instance())?;
        let function = module.load_function("fused").map_err(&failed)?;
        let unaligned = match self.operand {
            Some(_) => module.load_function("fused_unaligned").map_err(&failed)?,
            None => function.clone(),
        };
        let [shared_bytes, threads, blocks] = launch_words(&module, "fused_launch", device)?;
        allow_shared(&function, shared_bytes)?;
        allow_shared(&unaligned, shared_bytes)?;
        let blocks = blocks.clamp(1, MAX_BLOCKS as u32) * device.multiprocessors();
        Ok(LoadedPortable { portable: self, function, unaligned, shared_bytes, threads, blocks })
    }
}

/// A kernel in a device.
#[derive(Debug)]
pub(crate) struct LoadedPortable {
    pub(crate) portable: Portable,
    function: CudaFunction,
    /// The same for factors that asynchronous copies cannot read.
    unaligned: CudaFunction,
    shared_bytes: u32,
    threads: u32,
    /// The most blocks of a launch.
    blocks: u32,
}

impl LoadedPortable {
    /// Blocks of a launch over `tokens` tokens: at most one for each granule.
    pub(crate) fn blocks(&self, tokens: u32) -> u32 {
        self.blocks.min(tokens.div_ceil(self.portable.epilogue.granule()))
    }

    /// Launches it.
    ///
    /// # Safety
    /// * `A` is the type that [`Epilogue`] states for this instance; `blocks` is at least 1 and at most
    ///   [`LoadedPortable::blocks`].
    /// * Every pointer is device memory of this kernel's device, of the sizes that abi.cuh and matrices.cuh state for
    ///   [`MAX_BLOCKS`] blocks on each multiprocessor, and stays so until the stream has passed the launch.
    /// * The matrices' types are those that this instance multiplies, and their units divide addresses and strides.
    /// * `call.row_count` is at most [`MAX_ROWS`] and what [`Portable::for_rows`] says of this instance, and at least 1;
    ///   `call.tokens` is at least 1.
    /// * The scratch is as abi.cuh states between launches, and no other launch uses it at the same time.
    pub(crate) unsafe fn launch<A>(
        &self,
        stream: &CudaStream,
        call: &Call,
        matrices: &Matrices,
        of_epilogue: &A,
        blocks: u32,
    ) -> Result<(), CudaError> {
        let is_aligned = matrices.weight_unit == 16 && matrices.hidden_unit == 16;
        let function = if is_aligned { &self.function } else { &self.unaligned };
        let grid = Grid { shared_bytes: self.shared_bytes, ..Grid::of(blocks, self.threads) };
        let arguments = [argument(call), argument(matrices), argument(of_epilogue)];
        // SAFETY: the kernel takes a Call, Matrices and the epilogue's arguments by value, whose layouts abi asserts; the
        // rest is the caller's.
        unsafe { launch(function, stream, grid, arguments) }
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
    }
}
