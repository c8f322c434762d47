//! Products of a shadow in plain Rust.

use super::digits::{Digits, GROUP};
use crate::dot::TILE;
use flash_sampling_core::Shadow;
use flash_sampling_core::backend::code_stride;

/// Writes to `out[r * TILE + i]` the integer product of row `i` of `shadow` and row `r` of `hidden`, as a float.
#[inline(always)]
fn products(shadow: &Shadow<'_>, hidden: &Digits, out: &mut [f32]) {
    const LANES: usize = 16;
    for (i, codes) in shadow.codes().chunks_exact(code_stride(shadow.cols())).enumerate() {
        for r in 0..hidden.rows.len() {
            let (mut high, mut low) = ([0i32; LANES], [0i32; LANES]);
            for (codes, group) in codes.as_chunks::<GROUP>().0.iter().zip(hidden.groups(r)) {
                // Two loops, because the compiler makes vectors of the inner loop.
                for first in (0..GROUP).step_by(LANES) {
                    for k in 0..LANES {
                        let code = i32::from(codes[first + k]);
                        high[k] += code * i32::from(group[first + k] as i8);
                        low[k] += code * i32::from(group[GROUP + first + k] as i8);
                    }
                }
            }
            let [high, low] = [high, low].map(|sums| sums.iter().sum::<i32>() as f32);
            out[r * TILE + i] = 256.0 * high + low;
        }
    }
}

/// [`products`] for any processor.
pub(super) fn portable(shadow: &Shadow<'_>, hidden: &Digits, out: &mut [f32]) {
    products(shadow, hidden, out);
}

/// # Safety
/// NEON is available.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
pub(super) unsafe fn neon(shadow: &Shadow<'_>, hidden: &Digits, out: &mut [f32]) {
    products(shadow, hidden, out);
}
