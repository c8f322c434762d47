//! The norms of the rows of a quantised weight, computed once.

use crate::options::Threads;
use flash_sampling_core::Matrix;
use flash_sampling_core::backend::canonical::norm;
use rayon::prelude::*;

/// Returns upper bounds of the norm of each row, and of the norm of its [magnitudes](Matrix::row_magnitudes).
pub(super) fn of_blocks(weight: &Matrix<'_>, threads: &Threads) -> [Vec<f32>; 2] {
    let norms = |row: &mut Vec<f32>, r: usize| {
        row.resize(weight.cols(), 0.0);
        weight.row_magnitudes(r, row);
        let magnitude = rounded_up(row);
        weight.row_to_f32(r, row);
        // The second term covers the float32 roundings of the weight.
        (rounded_up(row) + 1e-6 * magnitude, magnitude)
    };
    let (norms, magnitudes) = match threads {
        Threads::One => {
            let mut row = Vec::new();
            (0..weight.rows()).map(|r| norms(&mut row, r)).unzip()
        }
        _ => threads.install(|| (0..weight.rows()).into_par_iter().map_init(Vec::new, norms).unzip()),
    };
    [norms, magnitudes]
}

/// The norm of a row, rounded up.
fn rounded_up(row: &[f32]) -> f32 {
    // The factor covers the float64 roundings of the sum of squares.
    let norm = ((norm(row) * (1.0 + 1e-6)) as f32).next_up();
    if norm.is_nan() { f32::INFINITY } else { norm }
}
