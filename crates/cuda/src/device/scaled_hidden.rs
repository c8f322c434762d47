//! The launch that copies hidden states to f16, before the Hopper kernel with a weight in fp8 or int8. See
//! scaled_hidden.cuh.

use crate::abi::{DeviceAddress, ScaledHidden};
use crate::compile::KernelSource;
use crate::device::{Device, DeviceMatrix, Grid, Kernel, Queue, Scratch, entries, fused_hopper};
use crate::error::CudaError;
use flash_sampling_core::DType;
use std::sync::Arc;

/// The kernel of the copies, for Hopper only.
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
    /// The rows in f16, then the same rows in bf16. The declared type is f16: loads do not depend on the 16-bit type.
    pub(crate) matrix: DeviceMatrix,
    /// One factor for each row: a hidden state is the product of its f16 copy and the factor.
    pub(crate) factors: DeviceAddress<f32>,
    /// The index of the first row in bf16.
    pub(crate) bf16_row: u32,
}

impl HiddenScaler {
    /// Plans copies of up to `max_rows` rows of `cols` elements. The rows that fill the last box of a batch also count.
    pub(crate) fn new(max_rows: usize, cols: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        let kernel = device.function(&SOURCE, &SOURCE.instance(), &entries::SCALE_HIDDEN)?;
        let scratch =
            Scratch::new(copies_offset(max_rows) + 2 * max_rows * stride(cols) * size_of::<u16>(), &[], device)?;
        Ok(HiddenScaler { kernel, scratch, max_rows })
    }

    /// Records that every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.scratch.mark_idle();
    }

    /// Launches the copy of hidden states in bf16, whose rows are at multiples of 16 bytes. Of `copied_rows` rows, the
    /// rows beyond the hidden states become zeros.
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        hidden: &DeviceMatrix,
        copied_rows: u32,
    ) -> Result<HiddenCopies, CudaError> {
        assert!(copied_rows as usize <= self.max_rows, "the plan has memory for fewer rows");
        let scratch = self.scratch.begin_use::<u8>();
        let (copies, factors, stride) =
            (scratch.add(copies_offset(self.max_rows)), scratch.cast(), stride(hidden.cols));
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

/// The byte offset of the copies, which follow the factors.
fn copies_offset(max_rows: usize) -> usize {
    (max_rows * size_of::<f32>()).next_multiple_of(128)
}

/// The number of elements from one copied row to the next. The kernel permutes the elements of whole groups of 16.
fn stride(cols: usize) -> usize {
    cols.next_multiple_of(16)
}
