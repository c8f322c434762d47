//! Matrices in device memory, and the scales of weights.

use crate::abi::{self, DeviceAddress, Matrices, WeightScales};
use crate::error::CudaError;
use core::ops::Range;
use flash_sampling_core::DType;

/// A row-major matrix `[rows, cols]` in device memory.
///
/// Every layout is supported. The fast kernels need bf16 or f16, or a weight in fp8 or int8 with one scale for each
/// row. They also need addresses and row strides that are multiples of 16 bytes. Weights may have any type, also blocks;
/// other matrices are floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMatrix {
    /// Device address; a multiple of the element's size, and of 2 if a block has f16 scales.
    pub address: DeviceAddress<u8>,
    /// Element type.
    pub dtype: DType,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
}

/// The scales of a weight of 8-bit elements in device memory: one float32 for each block of rows and columns.
///
/// The values are row-major, `[row blocks, column blocks]`. The last blocks of rows and columns may be smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceScales {
    /// Device address of the block with the weight's first element; a multiple of 4.
    pub address: DeviceAddress<f32>,
    /// Rows and columns of a block.
    pub block: [usize; 2],
    /// The weight's first row in its block of rows.
    pub row_of_block: usize,
}

impl DeviceScales {
    /// The kernels' form, for a weight of `cols` columns.
    pub(crate) fn of_width(&self, cols: usize) -> WeightScales {
        // A weight has fewer rows and columns than 2^32, so larger blocks are one block.
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let [block_rows, block_cols] = self.block;
        WeightScales {
            values: self.address,
            block_rows: number(block_rows),
            block_cols: number(block_cols),
            row_blocks: number(cols.div_ceil(block_cols)),
            first_row: number(self.row_of_block),
        }
    }
}

impl DeviceMatrix {
    /// Checks that kernels can read the matrix of floats.
    pub(crate) fn check(&self, what: &'static str) -> Result<(), CudaError> {
        if !self.dtype.is_float() {
            return Err(CudaError::Layout { what, reason: "its elements are not bf16, f16 or f32" });
        }
        self.check_layout(what)
    }

    /// Checks that kernels can read the matrix as a weight.
    pub(crate) fn check_weight(&self) -> Result<(), CudaError> {
        self.check_layout("weight")
    }

    fn check_layout(&self, what: &'static str) -> Result<(), CudaError> {
        let block = self.dtype.block_elements();
        let reason = match () {
            () if self.cols == 0 => "it has no columns",
            () if self.row_stride < self.cols => "the stride is smaller than a row",
            () if !self.cols.is_multiple_of(block) || !self.row_stride.is_multiple_of(block) => {
                "a row is not whole blocks of its type"
            }
            () if !self.address.get().is_multiple_of(self.alignment()) => "its address lies within an element",
            () => return Ok(()),
        };
        Err(CudaError::Layout { what, reason })
    }

    /// The divisor of valid addresses: the size of a float, or of the f16 scales of a block.
    fn alignment(&self) -> u64 {
        let bytes = self.dtype.block_bytes();
        if self.dtype.is_float() { bytes as u64 } else { 1 << bytes.trailing_zeros().min(1) }
    }

    /// Some neighbouring rows.
    pub(crate) fn rows(&self, which: Range<usize>) -> DeviceMatrix {
        let address = self.address.add(which.start * self.stride_bytes() as usize);
        DeviceMatrix { address, rows: which.len(), ..*self }
    }

    /// Bytes from one row to the next.
    pub(crate) fn stride_bytes(&self) -> u64 {
        (self.row_stride / self.dtype.block_elements() * self.dtype.block_bytes()) as u64
    }

    /// The largest power of two, up to 16, that divides the address of every row.
    pub(crate) fn unit(&self) -> u32 {
        1 << (self.address.get() | self.stride_bytes()).trailing_zeros().min(4)
    }

    pub(crate) fn is_16_bit_float(&self) -> bool {
        matches!(self.dtype, DType::BF16 | DType::F16)
    }

    /// Whether the copy engine or asynchronous copies can read the matrix for the tensor cores.
    pub(crate) fn is_aligned(&self) -> bool {
        self.is_16_bit_float() && self.unit() == 16
    }
}

impl Matrices {
    /// Both factors; `largest_unit` is the maximum bytes per read, at most 16.
    pub(crate) fn of(
        weight: &DeviceMatrix,
        scales: WeightScales,
        hidden: &DeviceMatrix,
        largest_unit: u32,
    ) -> Matrices {
        Matrices {
            scales,
            weight: weight.address,
            hidden: hidden.address,
            weight_stride: weight.stride_bytes(),
            hidden_stride: hidden.stride_bytes(),
            weight_type: abi::element(weight.dtype),
            hidden_type: abi::element(hidden.dtype),
            weight_unit: weight.unit().min(largest_unit),
            hidden_unit: hidden.unit().min(largest_unit),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_distinguished() {
        let matrix =
            DeviceMatrix { address: DeviceAddress::new(4096), dtype: DType::BF16, rows: 3, cols: 9, row_stride: 16 };
        assert!(matrix.check("weight").is_ok() && matrix.is_aligned());
        let units = [(4096, 12, 8), (4096, 10, 4), (4096, 9, 2), (4098, 16, 2), (4104, 16, 8), (0, 64, 16)];
        for (address, row_stride, unit) in units {
            assert_eq!(
                DeviceMatrix { address: DeviceAddress::new(address), row_stride, ..matrix }.unit(),
                unit,
                "{address} {row_stride}"
            );
        }
        assert!(!DeviceMatrix { dtype: DType::F32, ..matrix }.is_aligned());
        let blocks = DeviceMatrix { dtype: DType::Q6_K, rows: 3, cols: 256, row_stride: 512, ..matrix };
        assert!(blocks.check_weight().is_ok() && !blocks.is_aligned());
        assert_eq!((blocks.stride_bytes(), blocks.rows(2..3).address.get()), (420, 4096 + 840));
        assert!(
            DeviceMatrix { address: DeviceAddress::new(4099), dtype: DType::MXFP4, ..blocks }.check_weight().is_ok()
        );
        for wrong in [
            DeviceMatrix { cols: 128, ..blocks },
            DeviceMatrix { row_stride: 384, ..blocks },
            DeviceMatrix { address: DeviceAddress::new(4099), ..blocks },
        ] {
            assert!(matches!(wrong.check_weight(), Err(CudaError::Layout { what: "weight", .. })), "{wrong:?}");
        }
        assert!(matches!(blocks.check("hidden states"), Err(CudaError::Layout { what: "hidden states", .. })));
        for wrong in [
            DeviceMatrix { cols: 0, ..matrix },
            DeviceMatrix { row_stride: 8, ..matrix },
            DeviceMatrix { address: DeviceAddress::new(4097), ..matrix },
            DeviceMatrix { address: DeviceAddress::new(4098), dtype: DType::F32, ..matrix },
        ] {
            assert!(matches!(wrong.check("weight"), Err(CudaError::Layout { what: "weight", .. })), "{wrong:?}");
        }
    }
}
