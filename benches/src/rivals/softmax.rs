//! Softmax and inverse CDF over logits in device memory.

use crate::gpu::read::{driver, module};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg};
use flash_sampling::DType;
use flash_sampling::cuda::{Device, DeviceMatrix};
use flash_sampling_cli::error::CommandError;
use std::sync::Arc;

const THREADS: u32 = 256;
/// Tokens that a block reads per step.
const STEP: u32 = THREADS * 8;
/// From this number of rows on, there are enough blocks for parts of four steps.
const MANY_ROWS: usize = 16;

/// The argument of the kernels, as in softmax.cu.
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
const _: () = assert!(size_of::<Softmax>() == 56);
// SAFETY: plain numbers; softmax.cu has the same struct.
unsafe impl DeviceRepr for Softmax {}

/// Draws by softmax and inverse CDF: one read of the logits, in two launches. Float32 sums limit its accuracy to a few
/// units of 2^-24 of the total mass, not of each token's mass.
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
    /// Float32 logits, errors of the compiler and the driver.
    pub fn new(dtype: DType, max_rows: usize, device: &Device) -> Result<InverseCdf, CommandError> {
        if dtype == DType::F32 {
            return Err(CommandError::usage("the inverse CDF takes logits of bf16 or f16"));
        }
        let failed = driver("load a kernel");
        let define = if dtype == DType::F16 { "--define-macro=FS_TYPE=1" } else { "--define-macro=FS_TYPE=0" };
        let module = module(include_str!("softmax.cu"), &[define], device)?;
        let function = |name| module.load_function(name).map_err(&failed);
        let stream = device.context().new_stream().map_err(&failed)?;
        let parts = stream.alloc_zeros(max_rows.max(1) * THREADS as usize * 2).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let (parts_kernel, draw_kernel) = (function("softmax_parts")?, function("softmax_draw")?);
        Ok(InverseCdf { parts_kernel, draw_kernel, dtype, max_rows, parts })
    }

    /// Enqueues a draw of each row of `logits [rows, vocab]`; row `r` uses the uniform of seed `r` and `positions[r]`.
    ///
    /// `positions` is the device address of one u64 per row, `tokens` of memory for one u32 per row.
    ///
    /// # Errors
    /// Logits of another type, layout or size than planned, errors of the driver.
    ///
    /// # Safety
    /// All addresses are device memory of this device, of the stated sizes, until the work has run. Launches of one
    /// value are sequential.
    pub unsafe fn launch(
        &mut self,
        stream: &Arc<CudaStream>,
        logits: &DeviceMatrix,
        temperature: f32,
        positions: u64,
        tokens: u64,
    ) -> Result<(), CommandError> {
        let is_aligned = logits.address.get().is_multiple_of(16) && logits.row_stride.is_multiple_of(8);
        if logits.dtype != self.dtype || !is_aligned || logits.rows > self.max_rows || logits.cols > 1 << 30 {
            return Err(CommandError::usage("the inverse CDF was not planned for these logits"));
        }
        if logits.rows == 0 || logits.cols == 0 {
            return Ok(());
        }
        let (rows, vocab) = (logits.rows as u32, logits.cols as u32);
        let usual = if logits.rows < MANY_ROWS { STEP } else { 4 * STEP };
        let part = vocab.div_ceil(THREADS).next_multiple_of(STEP).max(usual);
        let softmax = Softmax {
            logits: logits.address.get(),
            positions,
            parts: self.parts.device_ptr(self.parts.stream()).0,
            tokens,
            stride: logits.row_stride as u64,
            vocab,
            part,
            part_count: vocab.div_ceil(part),
            scale: core::f32::consts::LOG2_E / temperature,
        };
        let grid = |x, y| LaunchConfig { grid_dim: (x, y, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let (parts, draw) = (grid(softmax.part_count, rows), grid(rows, 1));
        for (kernel, grid) in [(&self.parts_kernel, parts), (&self.draw_kernel, draw)] {
            // SAFETY: both kernels take a Softmax by value; there are at most 256 parts, for which `parts` has room;
            // the caller meets the rest.
            unsafe { stream.launch_builder(kernel).arg(&softmax).launch(grid) }.map_err(driver("launch a kernel"))?;
        }
        Ok(())
    }
}
