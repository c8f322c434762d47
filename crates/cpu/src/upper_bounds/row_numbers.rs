//! The numbers of the rows of a quantised weight, computed once.

use core::ops::Range;
use flash_sampling_core::Matrix;
use flash_sampling_core::backend::canonical::norm;
use flash_sampling_core::backend::shadow_row;
use rayon::prelude::*;

/// The scale, the error and the norm of each row of codes of a quantised weight; as for a shadow.
#[derive(Debug, Default)]
pub(super) struct RowNumbers {
    pub(super) scales: Vec<f32>,
    errors: Vec<f32>,
    norms: Vec<f32>,
}

impl RowNumbers {
    /// The numbers of the blocks of a quantised weight. The products contain the scales of the blocks, so the scale
    /// of a row is 1. The blocks are the weight, so the error is 0.
    pub(super) fn of_blocks(weight: &Matrix<'_>) -> Self {
        let norm = |row: &mut Vec<f32>, r: usize| {
            row.resize(weight.cols(), 0.0);
            weight.row_magnitudes(r, row);
            // The factor covers the float64 roundings of the sum of squares.
            let norm = ((norm(row) * (1.0 + 1e-6)) as f32).next_up();
            if norm.is_nan() { f32::INFINITY } else { norm }
        };
        let norms = (0..weight.rows()).into_par_iter().map_init(Vec::new, norm).collect();
        RowNumbers { scales: vec![1.0; weight.rows()], errors: vec![0.0; weight.rows()], norms }
    }

    /// The numbers of requantised rows. Weights are first rounded to float32 where necessary; `terms` covers this
    /// rounding.
    pub(super) fn of_requantised(weight: &Matrix<'_>) -> Self {
        let numbers = |(row, codes): &mut (Vec<f32>, Vec<i8>), r: usize| {
            row.resize(weight.cols(), 0.0);
            codes.resize(weight.cols(), 0);
            weight.row_to_f32(r, row);
            let [scale, error, norm] = shadow_row(row, codes);
            ((scale, error), norm)
        };
        let ((scales, errors), norms) = (0..weight.rows()).into_par_iter().map_init(Default::default, numbers).unzip();
        RowNumbers { scales, errors, norms }
    }

    pub(super) fn largest_norm(&self) -> f64 {
        largest_norm(&self.errors, &self.norms)
    }

    /// The scales, errors and norms of the rows `rows`.
    pub(super) fn rows(&self, rows: Range<usize>) -> [&[f32]; 3] {
        [&self.scales, &self.errors, &self.norms].map(|numbers| &numbers[rows.clone()])
    }
}

/// The largest sum of a row's error and norm.
pub(super) fn largest_norm(errors: &[f32], norms: &[f32]) -> f64 {
    let sizes = errors.iter().zip(norms).map(|(error, norm)| f64::from(*error) + f64::from(*norm));
    sizes.fold(0.0, f64::max)
}
