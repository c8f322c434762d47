//! Dot products in AMX-BF16 tiles, through stable inline assembly.
//!
//! The weight is the A operand: 16 rows x 32 elements a tile, loaded as they lie in memory. The hidden states are the
//! B operand, packed once per call. An output's sum runs over hidden in ascending steps of 32, whatever the batch.
//!
//! Deviations from the plain triple loop, and why each keeps the answer:
//! 1. 64 weight rows at a time are copied into whole tiles, next to zeros where rows or elements are missing. The copy
//!    reads rows as streams, with prefetches, which the memory serves much faster than tile loads with a large stride.
//! 2. Up to 16 rows, 64 weight rows by 16 hidden rows are multiplied at a time (4 x 1 tiles); above, 32 by 32
//!    (2 x 2 tiles), which loads each tile for two products.
//! 3. Hidden is cut into slabs, so that a slab of the whole batch stays in the second-level cache for the vocabulary
//!    tile. Accumulators go to memory between slabs as float32, which is what they are, so no bit changes.

mod copy;
mod multiply;
mod permission;
mod transpose;

use super::pack::{Line, Packed};
use super::{DotScratch, TILE};
use copy::copy_block;
use flash_sampling_core::Matrix;
use multiply::{multiply_2x2, multiply_4x1};
pub(crate) use permission::is_available;
use transpose::transpose;

/// Weight rows that are copied at a time.
const BLOCK: usize = 64;
/// What a slab of the batch may take of the second-level cache, in bytes.
const SLAB_BYTES: usize = 1 << 19;
/// A batch up to this size needs no slabs, in bytes.
const WHOLE_BYTES: usize = 1 << 20;
/// Bytes of a tile: 16 rows of 64.
const TILE_BYTES: usize = 1024;

/// Reserves what [`tile`] needs for up to `rows` hidden rows.
pub(super) fn reserve(scratch: &mut DotScratch, rows: usize, cols: usize) {
    scratch.sums = vec![Line::ZERO; TILE / 16 * rows.div_ceil(32) * 2 * TILE_BYTES / 64];
    scratch.tiles = vec![Line::ZERO; BLOCK * cols.div_ceil(32)];
}

/// See [`super::lanes::tile`]; `scratch` was reserved by [`reserve`] for at least this many rows and columns.
///
/// # Safety
/// AMX-BF16 and AVX-512 F are available; `weight` holds bf16 and at most [`TILE`] rows; `hidden` is in AMX layout with the
/// same columns; `out` holds [`TILE`] floats a hidden row.
pub(super) unsafe fn tile(weight: &Matrix<'_>, hidden: &Packed, out: &mut [f32], scratch: &mut DotScratch) {
    let rows = hidden.rows();
    let all_steps = weight.cols().div_ceil(32);
    let panels = rows.div_ceil(16);
    let panel_bytes = 16 * hidden.row_bytes();
    let slab = match panels * panel_bytes {
        small if small <= WHOLE_BYTES => all_steps,
        _ => (SLAB_BYTES / (panels * TILE_BYTES)).max(8),
    };
    // Sums: panel by panel, TILE / 16 tiles each.
    let needed = panels.next_multiple_of(2) * (TILE / 16) * TILE_BYTES / 64;
    scratch.sums[..needed].fill(Line::ZERO);
    let sums: *mut u8 = scratch.sums.as_mut_ptr().cast();
    for from in (0..all_steps).step_by(slab) {
        let steps = slab.min(all_steps - from);
        for first in (0..weight.rows()).step_by(BLOCK) {
            // SAFETY: the block's tiles and the panels' tiles exist, and `needed` has room for the sums' tiles.
            unsafe {
                copy_block(weight, first, from, steps, &mut scratch.tiles);
                let a: *const u8 = scratch.tiles.as_ptr().cast();
                let run = steps * TILE_BYTES;
                let b_at = |panel: usize| hidden.as_ptr().add(panel * panel_bytes + from * TILE_BYTES);
                let c_at = |panel: usize, row: usize| sums.add((panel * (TILE / 16) + row / 16) * TILE_BYTES);
                if panels == 1 {
                    multiply_4x1(a, run, b_at(0), steps, c_at(0, first));
                    continue;
                }
                for panel in (0..panels).step_by(2) {
                    // An odd last panel is multiplied twice; the copy's sums are never read.
                    let b = [b_at(panel), b_at((panel + 1).min(panels - 1))];
                    for half in [0, 32] {
                        let c = [c_at(panel, first + half), c_at(panel + 1, first + half)];
                        multiply_2x2(a.add(half / 16 * run), run, b, steps, c);
                    }
                }
            }
        }
    }
    for (panel, out) in out.chunks_mut(16 * TILE).enumerate().take(panels) {
        let rows = (rows - panel * 16).min(16);
        for group in 0..weight.rows().div_ceil(16) {
            // SAFETY: the tile is inside the `needed` lines and was written above as float32; AVX-512 F is available.
            let columns = unsafe { transpose(sums.add((panel * (TILE / 16) + group) * TILE_BYTES).cast()) };
            let count = (weight.rows() - group * 16).min(16);
            for (out, column) in out.chunks_mut(TILE).zip(&columns).take(rows) {
                out[group * 16..][..count].copy_from_slice(&column[..count]);
            }
        }
    }
}
