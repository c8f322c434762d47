//! Rows in the tensor cores' types, without rounding.

use flash_sampling_core::{DType, Matrix};
use half::{bf16, f16};

/// Appends row `row` of `matrix` to `out` as elements of `dtype` (bf16 or f16), filled up with zeros to `stride`
/// elements. `false` when a value would change, in which case `out` is of no use.
pub(crate) fn append_row(matrix: &Matrix<'_>, row: usize, dtype: DType, stride: usize, out: &mut Vec<u8>) -> bool {
    let end = out.len() + stride * dtype.size();
    let bytes = matrix.row_bytes(row);
    if matrix.dtype() == dtype {
        out.extend_from_slice(bytes);
    } else {
        let exact = |x: f32, y: f32| x == y || x.is_nan();
        let mut all = true;
        let mut put = |x: f32| {
            let (bits, back) = match dtype {
                DType::F16 => (f16::from_f32(x).to_bits(), f16::from_f32(x).to_f32()),
                _ => (bf16::from_f32(x).to_bits(), bf16::from_f32(x).to_f32()),
            };
            all &= exact(x, back);
            out.extend_from_slice(&bits.to_ne_bytes());
        };
        match matrix.dtype() {
            DType::F32 => bytes.as_chunks::<4>().0.iter().for_each(|b| put(f32::from_ne_bytes(*b))),
            DType::F16 => bytes.as_chunks::<2>().0.iter().for_each(|b| put(f16::from_ne_bytes(*b).to_f32())),
            DType::BF16 => bytes.as_chunks::<2>().0.iter().for_each(|b| put(bf16::from_ne_bytes(*b).to_f32())),
        }
        if !all {
            return false;
        }
    }
    out.resize(end, 0);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_values_pass_and_others_do_not() {
        let data = [1.0f32, -0.375, f32::INFINITY, 0.0, 1.0 + 1.0 / 1024.0, 1e30];
        let matrix = Matrix::new(&data, 2, 3).unwrap();
        let mut out = Vec::new();
        assert!(append_row(&matrix, 0, DType::BF16, 8, &mut out));
        assert_eq!(out.len(), 16);
        assert_eq!(out[2..4], bf16::from_f32(-0.375).to_ne_bytes());
        assert!(out[6..].iter().all(|&b| b == 0));
        assert!(!append_row(&matrix, 1, DType::BF16, 8, &mut Vec::new()));
        assert!(!append_row(&matrix, 1, DType::F16, 8, &mut Vec::new()));
    }
}
