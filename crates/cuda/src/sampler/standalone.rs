//! The standalone sampler over logits in host memory (paper Alg. I.1).

use crate::abi::DeviceAddress;
use crate::device::{Device, DeviceMatrix};
use crate::error::CudaError;
use crate::sampler::LogitSampler;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::backend::check_call;
use flash_sampling_core::{Description, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use std::sync::Arc;

/// A sampler over existing logits in host memory, `[rows, vocab]` in bf16, f16 or f32, on a GPU (paper Alg. I.1).
///
/// It is exact pathwise, with the same draws as [`CudaTiled`](crate::CudaTiled) on the same logits.
///
/// A call copies the logits to the GPU, draws, copies the draws to the host, and waits. Copies take most of the time.
/// For logits on the GPU, see [`DeviceSampler::for_logits`](crate::DeviceSampler::for_logits). GPU memory grows to the
/// largest call.
#[derive(Debug)]
pub struct CudaStandalone {
    sampler: LogitSampler,
    copied: CopiedLogits,
}

impl CudaStandalone {
    /// Plans a sampler for logits of `vocab_size` columns.
    ///
    /// # Errors
    /// * [`CudaError::Unsupported`]: [`Plan::canonical`], since the sampler does not compute the logits.
    /// * [`CudaError::EmptyPlan`]: the plan has no rows or no draws.
    /// * [`CudaError::Layout`], [`CudaError::TooLarge`]: `vocab_size` is zero or above 2^31.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(vocab_size: usize, plan: Plan, device: &Arc<Device>) -> Result<Self, CudaError> {
        let sampler = LogitSampler::new(vocab_size, plan, device)?;
        let memory = sampler.stream().alloc_zeros(16).map_err(CudaError::driver("allocate room for logits"))?;
        Ok(CudaStandalone { sampler, copied: CopiedLogits { memory, gathered: Vec::new() } })
    }
}

impl PerturbedArgmax for CudaStandalone {
    fn description(&self) -> Description {
        self.sampler.description().clone()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let of = self.sampler.description();
        check_call(&input, rows, &of.shape, &of.plan)?;
        let logits = self.copied.copy(&input, self.sampler.stream())?;
        self.sampler.sample(logits, input, rows, out)
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        Ok(self.sampler.replan(max_rows)?)
    }
}

/// Logits that were copied to the GPU.
#[derive(Debug)]
struct CopiedLogits {
    memory: CudaSlice<u8>,
    /// Rows that are not contiguous in the input, gathered for the copy.
    gathered: Vec<u8>,
}

impl CopiedLogits {
    /// Copies logits to the GPU, without gaps between rows.
    fn copy(&mut self, input: &Matrix<'_>, stream: &Arc<CudaStream>) -> Result<DeviceMatrix, CudaError> {
        let failed = CudaError::driver("copy logits to the GPU");
        let (dtype, rows, cols) = (input.dtype(), input.rows(), input.cols());
        let bytes = rows * cols * dtype.block_bytes();
        if bytes > self.memory.len() {
            self.memory = stream.alloc_zeros(bytes).map_err(&failed)?;
        }
        let from = if input.row_stride() == cols {
            input.bytes()
        } else {
            self.gathered.clear();
            (0..rows).for_each(|row| self.gathered.extend_from_slice(input.row_bytes(row)));
            &self.gathered
        };
        if bytes > 0 {
            stream.memcpy_htod(&from[..bytes], &mut self.memory.slice_mut(..bytes)).map_err(&failed)?;
        }
        let address = DeviceAddress::of(&self.memory, stream);
        Ok(DeviceMatrix { address, dtype, rows, cols, row_stride: cols })
    }
}
