//! Softmax and inverse CDF over logits in device memory.
#![allow(unsafe_code)]

use crate::abi::layout::layout;
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::device::matrix::DeviceMatrix;
use crate::error::CudaError;
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DevicePtr};
use flash_sampling_core::DType;

pub(crate) static SOURCE: KernelSource = KernelSource {
    file: "rivals/softmax.cu",
    serves: kernels::any,
    instances: || [DType::BF16, DType::F16].map(instance).into(),
};

fn instance(dtype: DType) -> Instance {
    Instance::new(&[("TYPE", &u32::from(dtype == DType::F16))]).cold()
}

const THREADS: u32 = 256;
/// Tokens that a block reads at once.
const STEP: u32 = THREADS * 8;
/// From this many rows on there are blocks enough for parts of four steps.
const MANY_ROWS: usize = 16;

/// The kernels' argument: the twin of the struct in softmax.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Softmax {
    logits: u64,
    positions: u64,
    parts: u64,
    tokens: u64,
    stride: u64,
    vocab: u32,
    part: u32,
    part_count: u32,
    scale: f32,
}
layout!(Softmax 56:
    logits 0, positions 8, parts 16, tokens 24, stride 32, vocab 40, part 44, part_count 48, scale 52
);

/// Draws by softmax and inverse CDF: one read of the logits, in two launches. Its float32 sums make it exact to a few
/// units of 2^-24 of the total mass, not of each token's.
#[derive(Debug)]
pub struct InverseCdf {
    parts_kernel: CudaFunction,
    draw_kernel: CudaFunction,
    dtype: DType,
    max_rows: usize,
    /// `[max_rows, 256, 2]`.
    parts: CudaSlice<f32>,
}

impl InverseCdf {
    /// Plans for logits of a type, bf16 or f16, and up to `max_rows` rows.
    ///
    /// # Errors
    /// [`CudaError::Layout`]: float32 logits. [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(dtype: DType, max_rows: usize, device: &Device) -> Result<InverseCdf, CudaError> {
        if dtype == DType::F32 {
            return Err(CudaError::Layout { what: "logits", reason: "they are neither bf16 nor f16" });
        }
        let failed = CudaError::driver("load a kernel");
        let module = device.module(&SOURCE, &instance(dtype))?;
        let function = |name| module.load_function(name).map_err(&failed);
        let stream = device.stream()?;
        let parts = stream.alloc_zeros(max_rows.max(1) * THREADS as usize * 2).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let (parts_kernel, draw_kernel) = (function("softmax_parts")?, function("softmax_draw")?);
        Ok(InverseCdf { parts_kernel, draw_kernel, dtype, max_rows, parts })
    }

    /// Enqueues a draw of each row of `logits [rows, vocab]`: row `r` takes the uniform of seed `r` and `positions[r]`.
    ///
    /// `positions` is the device address of one u64 a row, `tokens` of room for one u32 a row.
    ///
    /// # Errors
    /// [`CudaError::Layout`], [`CudaError::TooLarge`], [`CudaError::Driver`].
    ///
    /// # Safety
    /// All addresses are device memory of this device, of the stated sizes, until the work has run; launches of one
    /// value follow each other.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        logits: &DeviceMatrix,
        temperature: f32,
        positions: u64,
        tokens: u64,
    ) -> Result<(), CudaError> {
        let wrong = |reason| Err(CudaError::Layout { what: "logits", reason });
        if logits.dtype != self.dtype {
            return wrong("their type was not planned");
        }
        if !logits.address.is_multiple_of(16) || !logits.row_stride.is_multiple_of(8) {
            return wrong("rows do not begin at multiples of 16 bytes");
        }
        let limits = [("rows", logits.rows, self.max_rows), ("tokens", logits.cols, 1 << 30)];
        if let Some(&(what, found, limit)) = limits.iter().find(|(_, found, limit)| found > limit) {
            return Err(CudaError::TooLarge { what, found, limit });
        }
        if logits.rows == 0 || logits.cols == 0 {
            return Ok(());
        }
        let (rows, vocab) = (logits.rows as u32, logits.cols as u32);
        let usual = if logits.rows < MANY_ROWS { STEP } else { 4 * STEP };
        let part = vocab.div_ceil(THREADS).next_multiple_of(STEP).max(usual);
        let softmax = Softmax {
            logits: logits.address,
            positions,
            parts: self.parts.device_ptr(self.parts.stream()).0,
            tokens,
            stride: logits.row_stride as u64,
            vocab,
            part,
            part_count: vocab.div_ceil(part),
            scale: core::f32::consts::LOG2_E / temperature,
        };
        let arguments = || [argument(&softmax)];
        let parts = Grid { blocks: (softmax.part_count, rows), ..Grid::of(0, THREADS) };
        // SAFETY: both kernels take a Softmax by value, whose layout both sides assert; there are at most 256 parts, which
        // `parts` has room for; the rest is the caller's.
        unsafe {
            launch(&self.parts_kernel, stream, parts, arguments())?;
            launch(&self.draw_kernel, stream, Grid::of(rows, THREADS), arguments())
        }
    }
}
