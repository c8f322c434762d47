//! The matmul of the samplers alone, for the layers of a model.

use crate::dot::pack::Packed;
use crate::dot::{Dot, DotScratch, TILE};
use crate::error::CpuError;
use crate::isa::Isa;
use flash_sampling_core::{HeadError, Matrix};
use rayon::prelude::*;

/// Weight rows that a thread takes at a time.
const PART: usize = 64;
/// With fewer multiply-adds, the caller's thread works alone, because waking other threads would not pay off.
const ALONE: usize = 1 << 17;

/// Multiplies hidden states by a weight: `out [rows, outputs] = hidden [rows, cols] x weight [outputs, cols]^T`.
///
/// The inputs are any pair of bf16, f16 and f32, and sums and result are float32. Runs on rayon's current threads.
/// `isa: None` takes the fastest instruction set.
///
/// A row of the result has the same bits whatever the other rows, their number, and the number of threads. So a model
/// whose layers use this function generates the same text for a sequence in every batch.
///
/// # Errors
/// [`CpuError::IsaUnavailable`]; [`CpuError::Head`] for different numbers of columns, or not `rows * outputs` elements
/// in `out`.
pub fn matmul(hidden: &Matrix<'_>, weight: &Matrix<'_>, isa: Option<Isa>, out: &mut [f32]) -> Result<(), CpuError> {
    let (rows, outputs, cols) = (hidden.rows(), weight.rows(), weight.cols());
    let isa = isa.unwrap_or_else(|| Isa::best_for(weight.dtype(), hidden.dtype()));
    if !isa.is_available() {
        return Err(CpuError::IsaUnavailable { isa, available: Isa::available() });
    }
    if hidden.cols() != cols {
        let (row_stride, reason) = (hidden.row_stride(), "it has not the weight's columns");
        return Err(HeadError::Shape { rows, cols: hidden.cols(), row_stride, reason }.into());
    }
    if out.len() != rows * outputs {
        let (needed, found) = (4 * rows * outputs, size_of_val(out));
        return Err(HeadError::Length { rows, cols: outputs, row_stride: outputs, needed, found }.into());
    }
    let dot = Dot::new(isa, weight.dtype(), hidden.dtype());
    // As many rows at a time as the scratch of a thread should hold.
    for (first, out) in (0..rows).step_by(TILE).zip(out.chunks_mut((TILE * outputs).max(1))) {
        let hidden = hidden.row_range(first..rows.min(first + TILE));
        let mut packed = Packed::new(hidden.rows(), cols);
        packed.pack(dot.layout(), &hidden);
        let scratch = || Dot::scratch(isa, weight.dtype(), hidden.rows());
        let part = |at: usize, tile: &mut [f32], scratch: &mut DotScratch| {
            dot.tile(&weight.row_range(at..outputs.min(at + PART)), packed.all(), tile, scratch);
        };
        let alone = hidden.rows() * outputs * cols < ALONE || rayon::current_num_threads() == 1;
        if hidden.rows() == 1 {
            // The tile of a single row is a part of the result.
            let part = |scratch: &mut DotScratch, (at, out): (usize, &mut [f32])| part(at * PART, out, scratch);
            if alone {
                let mut scratch = scratch();
                out.chunks_mut(PART).enumerate().for_each(|item| part(&mut scratch, item));
            } else {
                out.par_chunks_mut(PART).enumerate().for_each_init(scratch, part);
            }
            continue;
        }
        let part = |at: usize| {
            let mut tile = vec![0.0; hidden.rows() * TILE];
            part(at, &mut tile, &mut scratch());
            (at, tile)
        };
        let write = |(at, tile): (usize, Vec<f32>), out: &mut [f32]| {
            for (row, tile) in out.chunks_exact_mut(outputs).zip(tile.chunks_exact(TILE)) {
                let row = &mut row[at..outputs.min(at + PART)];
                row.copy_from_slice(&tile[..row.len()]);
            }
        };
        let starts = (0..outputs).step_by(PART);
        if alone {
            starts.for_each(|at| write(part(at), out));
        } else {
            let parts: Vec<_> = starts.collect::<Vec<_>>().into_par_iter().map(part).collect();
            parts.into_iter().for_each(|tile| write(tile, out));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::backend::canonical::{canonical_dot, dot_error_bound, norm};
    use half::bf16;

    fn values(count: usize, salt: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + salt * 104_729) % 1009) as f32 / 504.5 - 1.0).collect()
    }

    #[test]
    fn it_is_the_product_to_rounding_for_every_instruction_set() {
        let (rows, outputs, cols) = (3, 150, 70);
        let hidden = values(rows * cols, 1);
        let weight: Vec<bf16> = values(outputs * cols, 2).into_iter().map(bf16::from_f32).collect();
        let wide: Vec<f32> = weight.iter().map(|w| w.to_f32()).collect();
        for isa in Isa::available() {
            let mut out = vec![f32::NAN; rows * outputs];
            let (h, w) = (Matrix::new(&hidden, rows, cols).unwrap(), Matrix::new(&weight, outputs, cols).unwrap());
            matmul(&h, &w, Some(isa), &mut out).unwrap();
            for (at, found) in out.iter().enumerate() {
                let a = &hidden[at / outputs * cols..][..cols];
                let b = &wide[at % outputs * cols..][..cols];
                let error = (f64::from(*found) - canonical_dot(a, b)).abs();
                assert!(error <= dot_error_bound(cols, norm(a), norm(b)), "{isa} at {at}");
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_many() {
        let (rows, outputs, cols) = (TILE + 9, 300, 64);
        let (hidden, weight) = (values(rows * cols, 1), values(outputs * cols, 2));
        let (h, w) = (Matrix::new(&hidden, rows, cols).unwrap(), Matrix::new(&weight, outputs, cols).unwrap());
        let mut all = vec![0.0; rows * outputs];
        matmul(&h, &w, None, &mut all).unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        for row in [0, 7, TILE - 1, TILE, rows - 1] {
            let mut one = vec![0.0; outputs];
            pool.install(|| matmul(&h.row_range(row..row + 1), &w, None, &mut one)).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&one), bits(&all[row * outputs..][..outputs]), "row {row}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_errors() {
        let data = [0.0f32; 12];
        let (a, b) = (Matrix::new(&data, 3, 4).unwrap(), Matrix::new(&data, 4, 3).unwrap());
        assert!(matches!(matmul(&a, &b, None, &mut [0.0; 12]), Err(CpuError::Head(HeadError::Shape { .. }))));
        assert!(matches!(matmul(&a, &a, None, &mut [0.0; 8]), Err(CpuError::Head(HeadError::Length { .. }))));
        assert!(matmul(&a.row_range(0..0), &a, None, &mut []).is_ok());
        assert!(matmul(&a, &a.row_range(0..0), None, &mut []).is_ok());
    }
}
