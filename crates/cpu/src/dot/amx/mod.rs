//! Dot products in AMX tiles of bf16 or of 8-bit integers, through stable inline assembly.
//!
//! The weight is the A operand, with 16 rows x 32 elements per tile. The hidden states are the B operand, packed once
//! per call. The sum of an output runs over hidden in ascending steps of 32, whatever the batch.
//!
//! Plain version, for a tile of the vocabulary:
//! ```text
//! for each 32 weight rows, for each 32 hidden rows, for each step: C += A x B in 2 x 2 tiles
//! ```
//! Deviations, and why each keeps the result:
//! 1. The work is divided into units of 32 weight rows by a chunk of steps. A unit's weights are copied into tiles,
//!    with zeros for missing rows or elements. The 16 KiB of a unit stay in the first-level cache while all hidden rows
//!    pass. Without the copy, the power-of-two distance of the rows would map a tile's lines to one set of the cache.
//! 2. The copy of the next unit is spread over the products of the current unit, as is a prefetch of a later unit into
//!    the second-level cache. So memory and the tile unit work at the same time.
//! 3. Between chunks, accumulators are stored in memory as float32, their own type, so no bit changes.
//! 4. If the batch is too large for the second-level cache, hidden is divided into slabs of chunks, and the vocabulary
//!    tile passes over one slab after another. A sum still takes its steps in ascending order.

mod copy;
mod multiply;
mod permission;
#[cfg(test)]
pub(crate) mod plain;
mod schedule;
mod transpose;

use super::pack::{Line, PackedRows};
use super::{DotScratch, TILE};
use copy::copy_unit;
use flash_sampling_core::Matrix;
pub(crate) use multiply::Config;
pub(crate) use permission::{has_integers, is_available};
use schedule::{CHUNK, Schedule};

/// Weight rows of a unit: two tiles.
const GROUP: usize = 32;
/// Groups of a vocabulary tile.
const GROUPS: usize = TILE / GROUP;
/// Bytes of a tile: 16 rows of 64.
const TILE_BYTES: usize = 1024;
/// The number of units between the copy and the prefetch.
const AHEAD: usize = 2;

/// The operations of a tile unit. [`tile_on`] is the loop around them.
///
/// # Safety
/// The unit is available for every function; [`Unit::multiply`] is called between `begin` and `end`, on one thread.
trait Unit {
    /// Configures the unit.
    unsafe fn begin();
    /// Releases the unit. No state remains afterwards.
    unsafe fn end();
    /// Computes `C += A x B` for a block, and its part of the next unit's copy: `share` rows (0, 4, 8, 16 or 32).
    ///
    /// # Safety
    /// The pointers of `block` are valid as [`Block`] states, and `steps` is not zero.
    unsafe fn multiply(block: &Block, share: usize);
    /// Writes `rows` columns of a C tile, `count` floats each, to `out`, [`TILE`] floats apart.
    ///
    /// # Safety
    /// `tile` points to a C tile, `out` to that many rows and floats; neither exceeds 16.
    unsafe fn turn(tile: *const f32, out: *mut f32, rows: usize, count: usize);
}

/// A register block of 2 x 2 tiles, and the copy that overlaps it.
struct Block {
    /// `steps` pairs of tiles, one after another.
    a: *const u8,
    /// Two runs of `steps` tiles.
    b: [*const u8; 2],
    /// Four tiles: (A0 B0), (A1 B0), (A0 B1), (A1 B1).
    c: *mut u8,
    steps: usize,
    /// The first of `share` weight rows, `stride` bytes apart, with `steps` readable lines each.
    source: *const u8,
    stride: usize,
    /// The destination of the first line. The next row is 64 bytes further, the next step two tiles. Writable per line.
    target: *mut u8,
    /// The first of `share` rows to prefetch; it need not be readable.
    ahead: *const u8,
}

/// The machine's tile unit for bf16.
struct Amx;

/// The machine's tile unit for pairs of bytes, in the places of bf16, and integer sums, in the places of float32.
struct AmxIntegers;

/// Creates the memory of [`tile`] for up to `rows` hidden rows.
pub(super) fn scratch(rows: usize) -> DotScratch {
    let sums = vec![Line::ZERO; rows.div_ceil(32) * GROUPS * 4 * TILE_BYTES / 64];
    DotScratch { sums, tiles: vec![Line::ZERO; 2 * CHUNK * GROUP], ..DotScratch::default() }
}

/// Multiplies a tile; see [`super::lanes::tile`]. `scratch` is that of [`scratch`] for at least this many rows.
///
/// # Safety
/// AMX-BF16 and AVX-512 F are available; `weight` holds bf16 and at most [`TILE`] rows; `hidden` is in AMX layout with the
/// same columns; `out` holds [`TILE`] floats per hidden row.
pub(super) unsafe fn tile(weight: &Matrix<'_>, hidden: PackedRows<'_>, out: &mut [f32], scratch: &mut DotScratch) {
    // SAFETY: by this function's contract.
    unsafe { tile_on::<Amx>(weight, hidden, out, scratch) }
}

/// Multiplies codes by digits. A pair of codes has the place of a bf16 of `codes`, and a pair of digits that of a hidden
/// state. Writes the bits of integer sums.
///
/// # Safety
/// As for [`tile`], with AMX-INT8 too.
pub(crate) unsafe fn integer_tile(
    codes: &Matrix<'_>,
    digits: PackedRows<'_>,
    out: &mut [f32],
    scratch: &mut DotScratch,
) {
    // SAFETY: by this function's contract.
    unsafe { tile_on::<AmxIntegers>(codes, digits, out, scratch) }
}

/// # Safety
/// As for [`tile`], with the unit of `U`.
unsafe fn tile_on<U: Unit>(weight: &Matrix<'_>, hidden: PackedRows<'_>, out: &mut [f32], scratch: &mut DotScratch) {
    if weight.rows() == 0 || hidden.rows() == 0 {
        return; // An empty shard has a tile, too.
    }
    let panels = hidden.rows().div_ceil(16);
    let pairs = panels.div_ceil(2);
    // The next unit's rows, divided among the pairs. The assembly exists for these numbers.
    let share = match pairs {
        1 => 32,
        2..4 => 16,
        4..8 => 8,
        _ => 4,
    };
    let schedule = Schedule::new(weight, panels);
    let needed = pairs * GROUPS * 4 * TILE_BYTES / 64;
    scratch.sums[..needed].fill(Line::ZERO);
    assert!(scratch.tiles.len() >= 2 * CHUNK * GROUP && out.len() >= hidden.rows() * TILE);
    let sums: *mut u8 = scratch.sums.as_mut_ptr().cast();
    let (mut current, mut next) = scratch.tiles.split_at_mut(CHUNK * GROUP);
    let panel_bytes = 16 * hidden.row_bytes();
    copy_unit(weight, &schedule.unit(0), current);
    // SAFETY: sums, panels and copies are inside their memory: there are `needed` lines of sums; a unit's steps are
    // steps of the panels and fit into either half of the tiles; the lines of a complete unit are inside the weight.
    unsafe {
        U::begin();
        for i in 0..schedule.len() {
            let unit = schedule.unit(i);
            let following = (i + 1 < schedule.len()).then(|| schedule.unit(i + 1));
            let alongside = following.as_ref().is_some_and(|f| f.whole && f.steps == unit.steps);
            let (source, ahead) = (schedule.address(i + 1), schedule.address(i + 1 + AHEAD));
            for pair in 0..pairs {
                // An odd last panel is multiplied twice. The sums of its copy are never read.
                let panel = |p: usize| hidden.as_ptr().add(p.min(panels - 1) * panel_bytes + unit.from * TILE_BYTES);
                let row = pair * share;
                let block = Block {
                    a: current.as_ptr().cast(),
                    b: [panel(2 * pair), panel(2 * pair + 1)],
                    c: sums.add((pair * GROUPS + unit.group) * 4 * TILE_BYTES),
                    steps: unit.steps,
                    source: source.wrapping_add(row * schedule.stride()),
                    stride: schedule.stride(),
                    target: next.as_mut_ptr().cast::<u8>().wrapping_add(row * 64),
                    ahead: ahead.wrapping_add(row * schedule.stride()),
                };
                U::multiply(&block, if alongside && row < GROUP { share } else { 0 });
            }
            if let (Some(following), false) = (&following, alongside) {
                copy_unit(weight, following, next);
            }
            core::mem::swap(&mut current, &mut next);
        }
        U::end();
        for (panel, out) in out.chunks_mut(16 * TILE).enumerate().take(panels) {
            let rows = (hidden.rows() - panel * 16).min(16);
            for part in 0..weight.rows().div_ceil(16) {
                let at = (panel / 2 * GROUPS + part / 2) * 4 + panel % 2 * 2 + part % 2;
                let count = (weight.rows() - part * 16).min(16);
                U::turn(sums.add(at * TILE_BYTES).cast(), out[part * 16..].as_mut_ptr(), rows, count);
            }
        }
    }
}
