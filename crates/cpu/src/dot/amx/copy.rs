//! A block of weight rows, copied into whole tiles.

use super::{BLOCK, Line};
use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm512_loadu_si512, _mm512_storeu_si512};
use flash_sampling_core::Matrix;

/// How many cache lines of a weight row the prefetch runs ahead.
const AHEAD: usize = 16;

/// Copies the steps `from .. from + steps` of up to [`BLOCK`] weight rows, those from `first` on, into tiles: a run of
/// `steps` tiles for each 16 rows. Missing rows and elements are zero.
///
/// # Safety
/// AVX-512 F is available.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn copy_block(weight: &Matrix<'_>, first: usize, from: usize, steps: usize, tiles: &mut [Line]) {
    let count = (weight.rows() - first).min(BLOCK);
    let stride = weight.row_stride() * 2;
    let whole = (weight.cols() * 2 / 64).saturating_sub(from).min(steps);
    assert!(tiles.len() >= BLOCK * steps);
    if count < BLOCK || whole < steps {
        tiles[..BLOCK * steps].fill(Line::ZERO);
    }
    let rest = weight.cols() * 2 - (from + whole) * 64;
    for group in 0..count.div_ceil(16) {
        let rows = (count - group * 16).min(16);
        // SAFETY: the rows are rows of the weight, and whole lines of them; a tile's line is inside `tiles`, by the
        // assertion; a prefetch of any address is harmless.
        unsafe {
            let source = weight.bytes().as_ptr().add((first + group * 16) * stride + from * 64);
            let target: *mut u8 = tiles.as_mut_ptr().add(group * steps * 16).cast();
            for step in 0..whole {
                for row in 0..rows {
                    let at = source.add(row * stride + step * 64);
                    let ahead = if step + AHEAD < whole {
                        at.wrapping_add(AHEAD * 64)
                    } else {
                        at.wrapping_add(16 * stride).wrapping_sub((whole - AHEAD.min(whole)) * 64)
                    };
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                    _mm512_storeu_si512(target.add((step * 16 + row) * 64).cast(), _mm512_loadu_si512(at.cast()));
                }
            }
            if whole < steps {
                for row in 0..rows {
                    let at = source.add(row * stride + whole * 64);
                    core::ptr::copy_nonoverlapping(at, target.add((whole * 16 + row) * 64), rest);
                }
            }
        }
    }
}
