//! Copies of hidden states for the Hopper kernel with a weight in fp8 or int8: scaled_hidden.cuh has the reason.

use crate::abi::{DeviceAddress, ScaledHidden};
use crate::compile::KernelSource;
use crate::device::{Device, DeviceMatrix, Grid, Kernel, Queue, Scratch, entries, fused_hopper};
use crate::error::CudaError;
use flash_sampling_core::DType;
use std::sync::Arc;

/// The launch before the Hopper kernel.
pub(crate) static SOURCE: KernelSource = KernelSource::single("scaled_hidden.cu", fused_hopper::serves);

/// Threads of a block; each block copies a row.
const THREADS: u32 = 256;

/// The kernel and the memory of the copies.
#[derive(Debug)]
pub(crate) struct HiddenScaler {
    kernel: Kernel<(ScaledHidden,)>,
    /// Factors, then copies.
    scratch: Scratch,
    max_rows: usize,
}

/// The copies of the hidden states of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HiddenCopies {
    /// In f16, then in bf16.
    pub(crate) matrix: DeviceMatrix,
    pub(crate) factors: DeviceAddress<f32>,
    /// The first row of the matrix in bf16.
    pub(crate) bf16_row: u32,
}

impl HiddenScaler {
    /// Plans copies of up to `max_rows` rows of `cols` elements, a number that includes the rows that boxes add.
    pub(crate) fn new(max_rows: usize, cols: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        let kernel = device.function(&SOURCE, &SOURCE.instance(), &entries::SCALE_HIDDEN)?;
        let scratch = Scratch::new(places(max_rows) + 2 * max_rows * stride(cols) * size_of::<u16>(), &[], device)?;
        Ok(HiddenScaler { kernel, scratch, max_rows })
    }

    /// Records that every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.scratch.mark_idle();
    }

    /// Copies hidden states in bf16, at multiples of 16 bytes, and as many rows of zeros as boxes of `copied_rows` rows
    /// have beyond them.
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        copied_rows: u32,
    ) -> Result<HiddenCopies, CudaError> {
        assert!(copied_rows as usize <= self.max_rows, "the memory of the copies");
        let scratch = self.scratch.begin_use::<u8>();
        let (copies, factors, stride) = (scratch.add(places(self.max_rows)), scratch.cast(), stride(hidden.cols));
        let call = ScaledHidden {
            hidden: hidden.address,
            hidden_stride: hidden.stride_bytes(),
            copies: copies.cast(),
            factors,
            rows: hidden.rows as u32,
            copied_rows,
            width: hidden.cols as u32,
            stride: stride as u32,
        };
        queue.launch(&self.kernel, Grid::of(copied_rows, THREADS), (call,))?;
        let rows = 2 * copied_rows as usize;
        let matrix = DeviceMatrix { address: copies, dtype: DType::F16, rows, cols: stride, row_stride: stride };
        Ok(HiddenCopies { matrix, factors, bf16_row: copied_rows })
    }
}

/// The byte offset of the copies, behind the factors.
fn places(max_rows: usize) -> usize {
    (max_rows * size_of::<f32>()).next_multiple_of(128)
}

/// Elements from one copied row to the next. The kernel permutes groups of 16.
fn stride(cols: usize) -> usize {
    cols.next_multiple_of(16)
}
