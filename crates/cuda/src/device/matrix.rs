//! Matrices in device memory.

use crate::abi::{self, DeviceAddress, Matrices};
use crate::error::CudaError;
use core::ops::Range;
use flash_sampling_core::DType;

/// A row-major matrix `[rows, cols]` in device memory.
///
/// Every layout is supported. The fast kernels need bf16 or f16 at addresses that are multiples of 16 bytes, with row
/// strides that are multiples of 8 elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMatrix {
    /// Device address; a multiple of the element's size.
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

impl DeviceMatrix {
    /// Checks that kernels can read the matrix.
    pub(crate) fn check(&self, what: &'static str) -> Result<(), CudaError> {
        let reason = match () {
            () if !self.dtype.is_float() => "its elements are not bf16, f16 or f32",
            () if self.cols == 0 => "it has no columns",
            () if self.row_stride < self.cols => "the stride is smaller than a row",
            () if !self.address.get().is_multiple_of(self.dtype.block_bytes() as u64) => {
                "its address lies within an element"
            }
            () => return Ok(()),
        };
        Err(CudaError::Layout { what, reason })
    }

    /// Some neighbouring rows.
    pub(crate) fn rows(&self, which: Range<usize>) -> DeviceMatrix {
        let address = self.address.add(which.start * self.row_stride * self.dtype.block_bytes());
        DeviceMatrix { address, rows: which.len(), ..*self }
    }

    /// Bytes from one row to the next.
    pub(crate) fn stride_bytes(&self) -> u64 {
        (self.row_stride * self.dtype.block_bytes()) as u64
    }

    /// The largest power of two, up to 16, that divides the address of every row.
    pub(crate) fn unit(&self) -> u32 {
        1 << (self.address.get() | self.stride_bytes()).trailing_zeros().min(4)
    }

    /// Whether the copy engine or asynchronous copies can read the matrix for the tensor cores.
    pub(crate) fn is_aligned(&self) -> bool {
        self.dtype != DType::F32 && self.unit() == 16
    }
}

impl Matrices {
    /// Both factors; `largest_unit` is the maximum bytes per read, at most 16.
    pub(crate) fn of(weight: &DeviceMatrix, hidden: &DeviceMatrix, largest_unit: u32) -> Matrices {
        Matrices {
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
