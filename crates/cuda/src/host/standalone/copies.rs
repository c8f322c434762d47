//! What the sampler over existing logits copies to the GPU, and what it reads of a row's errors.

use super::CudaStandalone;
use crate::device::matrix::DeviceMatrix;
use crate::error::CudaError;
use cudarc::driver::DevicePtr;
use flash_sampling_core::{Matrix, RowError};

impl CudaStandalone {
    /// Copies the logits up, rows one after the other.
    pub(super) fn copy_logits(&mut self, input: &Matrix<'_>) -> Result<DeviceMatrix, CudaError> {
        let failed = CudaError::driver("copy logits to the GPU");
        let bytes = input.rows() * input.cols() * input.dtype().size();
        if bytes > self.logits.len() {
            self.logits = self.stream.alloc_zeros(bytes).map_err(&failed)?;
        }
        let from = if input.row_stride() == input.cols() {
            input.bytes()
        } else {
            self.gathered.clear();
            (0..input.rows()).for_each(|row| self.gathered.extend_from_slice(input.row_bytes(row)));
            &self.gathered
        };
        if bytes > 0 {
            self.stream.memcpy_htod(&from[..bytes], &mut self.logits.slice_mut(..bytes)).map_err(&failed)?;
        }
        let address = self.logits.device_ptr(&self.stream).0;
        Ok(DeviceMatrix {
            address,
            dtype: input.dtype(),
            rows: input.rows(),
            cols: input.cols(),
            row_stride: input.cols(),
        })
    }

    /// Copies the staged rows up, and which rows of logits they are; their addresses.
    pub(super) fn copy_rows(&mut self, sources: impl Iterator<Item = usize>) -> Result<(u64, u64), CudaError> {
        let failed = CudaError::driver("copy the rows of a call");
        if self.staging.len() > self.inputs.len() {
            self.inputs = self.stream.alloc_zeros(self.staging.len().next_power_of_two()).map_err(&failed)?;
        }
        let base = self.inputs.device_ptr(&self.stream).0;
        let rows = base + self.staging.rows_at() as u64;
        self.stream.memcpy_htod(self.staging.finish(base), &mut self.inputs).map_err(&failed)?;
        self.sources_here.clear();
        self.sources_here.extend(sources.map(|row| row as u32));
        let mut there = self.sources.slice_mut(..self.sources_here.len());
        self.stream.memcpy_htod(&self.sources_here, &mut there).map_err(&failed)?;
        Ok((rows, self.sources.device_ptr(&self.stream).0))
    }
}

/// What the kernels note of a row's first invalid logit; all ones: there is none.
pub(super) fn outcome(key: u64) -> Result<(), RowError> {
    let token = (key >> 1) as u32;
    match key {
        u64::MAX => Ok(()),
        _ if key & 1 == 1 => Err(RowError::PositiveInfinity { token }),
        _ => Err(RowError::NaN { token }),
    }
}
