//! The norms of the rows of a quantised weight, computed once.

use flash_sampling_core::Matrix;
use flash_sampling_core::backend::canonical::norm;
use rayon::prelude::*;

/// Returns an upper bound of the norm of each row.
///
/// A shadow also stores an error of each row. Codes and scales of blocks define the weight exactly, so this error is 0.
pub(super) fn of_blocks(weight: &Matrix<'_>) -> Vec<f32> {
    let norm = |row: &mut Vec<f32>, r: usize| {
        row.resize(weight.cols(), 0.0);
        weight.row_magnitudes(r, row);
        // The factor covers the float64 roundings of the sum of squares.
        let norm = ((norm(row) * (1.0 + 1e-6)) as f32).next_up();
        if norm.is_nan() { f32::INFINITY } else { norm }
    };
    (0..weight.rows()).into_par_iter().map_init(Vec::new, norm).collect()
}
