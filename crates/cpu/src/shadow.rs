//! Makes the shadow and the digest of a weight on all threads.

use flash_sampling_core::backend::digest;
use flash_sampling_core::{HeadError, Matrix, ShadowBuffer};
use rayon::prelude::*;

/// Makes the shadow of a weight `[rows, cols]` on rayon's current threads. After every part, calls `done` with the
/// number of rows in the part.
///
/// # Errors
/// [`HeadError::ShadowType`] if the weight's elements are not bf16, f16 or f32.
pub fn make_shadow(weight: &Matrix<'_>, done: impl Fn(usize) + Sync) -> Result<ShadowBuffer, HeadError> {
    ShadowBuffer::new_in_parts(weight, |parts| {
        parts.par_bridge().for_each(|part| {
            let rows = part.count();
            part.fill();
            done(rows);
        });
    })
}

/// [`digest::of_matrix`] on rayon's current threads.
pub fn digest_of_matrix(matrix: &Matrix<'_>) -> u64 {
    let rows = (0..matrix.rows()).into_par_iter().map(|row| digest::of_bytes(matrix.row_bytes(row)));
    digest::of_words(rows.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn threads_make_the_shadow_of_one_thread() {
        let weight: Vec<f32> = (0..1000 * 33).map(|i| (i as f32 * 0.7).sin()).collect();
        let weight = Matrix::new(&weight, 1000, 33).unwrap();
        let rows = AtomicUsize::new(0);
        let count = |count| {
            rows.fetch_add(count, Ordering::Relaxed);
        };
        let made = make_shadow(&weight, count).unwrap();
        assert_eq!(made, ShadowBuffer::new(&weight).unwrap());
        assert_eq!(rows.into_inner(), 1000);
        assert_eq!(digest_of_matrix(&weight), digest::of_matrix(&weight));
    }
}
