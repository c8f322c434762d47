//! The algorithm of all vector kernels, written once.
//!
//! Plain version, for a tile of the weight and all rows of hidden states:
//! ```text
//! for each hidden row r, for each weight row i:
//!     out[r, i] = sum over k of weight[i, k] * hidden[r, k]
//! ```
//! Deviations, and why each keeps the result:
//! 1. The sum runs in steps of `STEP` elements into one vector accumulator per output, and the lanes are added at the
//!    end in a fixed order. This order depends only on the instruction set, not on the number of rows, the tile or the
//!    register block. So a row has the same bits in every batch.
//! 2. `MR x NR` outputs are computed at the same time, so that each loaded vector is used several times. Sums stay
//!    separate.
//! 3. The weight is divided into blocks that stay in the second-level cache while all hidden rows pass over them. So
//!    the whole batch reads the weight from memory once.
//! 4. During the products of a block, the next block is prefetched, spread evenly over the work, so that memory and
//!    arithmetic overlap at every batch size. A prefetch changes no value and may reach beyond the weight.
//! 5. The elements of a weight row beyond the last whole step are copied next to zeros. So are hidden states.

use super::TILE;
use super::pack::PackedRows;
use flash_sampling_core::Matrix;

/// The operations of an instruction set, without any loop.
///
/// # Safety
/// The instruction set is available for every function, and pointers have `STEP` readable elements. The functions are
/// `inline(always)` without `target_feature`, so that they inline into an entry point with the target feature.
pub(crate) trait Lanes {
    /// Partial sums of one output.
    type Sums: Copy;
    /// `STEP` weights.
    type Weights: Copy;
    /// `STEP` hidden elements.
    type PackedInput: Copy;
    /// Elements per step.
    const STEP: usize;
    /// Bytes per step of the weight.
    const WEIGHT_BYTES: usize;
    /// Bytes per step of packed hidden states.
    const HIDDEN_BYTES: usize;

    unsafe fn zero() -> Self::Sums;
    unsafe fn weights(at: *const u8) -> Self::Weights;
    unsafe fn hidden(at: *const u8) -> Self::PackedInput;
    unsafe fn multiply_add(sums: Self::Sums, w: Self::Weights, h: Self::PackedInput) -> Self::Sums;
    unsafe fn total(sums: Self::Sums) -> f32;
    /// Prefetches the cache line at `at`, which need not be readable.
    unsafe fn prefetch(at: *const u8);
}

/// Weight rows that stay in the second-level cache while the batch passes over them.
const BLOCK: usize = 32;
/// Largest `WEIGHT_BYTES` of any instruction set.
const TAIL_BYTES: usize = 128;

/// The inputs and outputs of one register block.
struct Block {
    weight: *const u8,
    weight_stride: usize,
    hidden: *const u8,
    hidden_stride: usize,
    cols: usize,
    out: *mut f32,
    /// The first of `AHEAD` weight rows to prefetch.
    ahead: *const u8,
}

/// Computes one register block: `MR` weight rows by `NR` hidden rows.
///
/// # Safety
/// The instruction set of `L` is available; `block` points to `MR` weight rows of `cols` elements, `NR` packed hidden
/// rows, and `NR` output rows of [`TILE`] floats with `MR` of them left.
#[inline(always)]
unsafe fn register_block<L: Lanes, const MR: usize, const NR: usize, const AHEAD: usize>(block: &Block) {
    // SAFETY: by this function's contract; steps stay below `cols`, and the tail is copied before it is read.
    unsafe {
        let mut sums = [[L::zero(); NR]; MR];
        let steps = block.cols / L::STEP;
        let w: [*const u8; MR] = core::array::from_fn(|m| block.weight.add(m * block.weight_stride));
        let h: [*const u8; NR] = core::array::from_fn(|n| block.hidden.add(n * block.hidden_stride));
        for step in 0..steps {
            for a in 0..AHEAD {
                L::prefetch(block.ahead.wrapping_add(a * block.weight_stride + step * L::WEIGHT_BYTES));
            }
            let weights: [L::Weights; MR] = core::array::from_fn(|m| L::weights(w[m].add(step * L::WEIGHT_BYTES)));
            for n in 0..NR {
                let hidden = L::hidden(h[n].add(step * L::HIDDEN_BYTES));
                for m in 0..MR {
                    sums[m][n] = L::multiply_add(sums[m][n], weights[m], hidden);
                }
            }
        }
        let left = block.cols % L::STEP * (L::WEIGHT_BYTES / L::STEP);
        if left > 0 {
            let mut tail = [[0u8; TAIL_BYTES]; MR];
            for m in 0..MR {
                core::ptr::copy_nonoverlapping(w[m].add(steps * L::WEIGHT_BYTES), tail[m].as_mut_ptr(), left);
            }
            for n in 0..NR {
                let hidden = L::hidden(h[n].add(steps * L::HIDDEN_BYTES));
                for m in 0..MR {
                    sums[m][n] = L::multiply_add(sums[m][n], L::weights(tail[m].as_ptr()), hidden);
                }
            }
        }
        for (m, sums) in sums.into_iter().enumerate() {
            for (n, sums) in sums.into_iter().enumerate() {
                *block.out.add(n * TILE + m) = L::total(sums);
            }
        }
    }
}

/// Computes all rows of a tile. `MR` and `NR` are the register block of the instruction set. A single hidden row takes
/// `M1` weight rows at a time, which are enough streams for the memory.
///
/// # Safety
/// The instruction set of `L` is available, `weight` holds elements of `L`'s type and at most [`TILE`] rows, `hidden` is
/// packed for `L` with the same number of columns, and `out` holds [`TILE`] floats per hidden row.
#[inline(always)]
pub(crate) unsafe fn tile<L: Lanes, const MR: usize, const NR: usize, const M1: usize>(
    weight: &Matrix<'_>,
    hidden: PackedRows<'_>,
    out: &mut [f32],
) {
    const { assert!(NR <= 6 && L::WEIGHT_BYTES <= TAIL_BYTES) }
    let all = All { weight, hidden, out: out.as_mut_ptr() };
    let rows = hidden.rows();
    for start in (0..weight.rows()).step_by(BLOCK) {
        // SAFETY: the contract is this function's; the panels cover the hidden rows and no more.
        unsafe {
            if rows == 1 {
                all.panel::<L, M1, 1, M1>(start, 0, 0);
                continue;
            }
            let panels = rows.div_ceil(NR);
            let (mut r, mut share) = (0, 0);
            while rows - r >= NR {
                share += match panels {
                    1 => all.panel::<L, MR, NR, MR>(start, r, share),
                    2 | 3 => all.panel::<L, MR, NR, 2>(start, r, share),
                    _ => all.panel::<L, MR, NR, 1>(start, r, share),
                };
                r += NR;
            }
            match (rows - r, panels) {
                (5, 1) => all.panel::<L, MR, 5, MR>(start, r, share),
                (4, 1) => all.panel::<L, MR, 4, MR>(start, r, share),
                (3, 1) => all.panel::<L, MR, 3, MR>(start, r, share),
                (2, 1) => all.panel::<L, MR, 2, MR>(start, r, share),
                (5, _) => all.panel::<L, MR, 5, 2>(start, r, share),
                (4, _) => all.panel::<L, MR, 4, 2>(start, r, share),
                (3, _) => all.panel::<L, MR, 3, 2>(start, r, share),
                (2, _) => all.panel::<L, MR, 2, 2>(start, r, share),
                (1, _) => all.panel::<L, MR, 1, 2>(start, r, share),
                _ => 0,
            };
        }
    }
}

/// The operands of a tile.
struct All<'a, 'w> {
    weight: &'a Matrix<'w>,
    hidden: PackedRows<'a>,
    out: *mut f32,
}

impl All<'_, '_> {
    /// Multiplies the weight rows of the block at `start` by `NR` hidden rows, starting at `r`. Every register block
    /// prefetches `AHEAD` rows of the next block, starting at its row `share`, and this returns the number of these
    /// rows.
    ///
    /// # Safety
    /// As for [`tile`], and `r + NR` is at most the number of hidden rows.
    #[inline(always)]
    unsafe fn panel<L: Lanes, const MR: usize, const NR: usize, const AHEAD: usize>(
        &self,
        start: usize,
        r: usize,
        share: usize,
    ) -> usize {
        let end = (start + BLOCK).min(self.weight.rows());
        let mut i = start;
        // SAFETY: `i + MR <= end` in the first loop and `i < end` in the second.
        unsafe {
            while i + MR <= end {
                let share = share + (i - start) / MR * AHEAD;
                if share < BLOCK {
                    register_block::<L, MR, NR, AHEAD>(&self.block(i, r, start + BLOCK + share));
                } else {
                    register_block::<L, MR, NR, 0>(&self.block(i, r, 0));
                }
                i += MR;
            }
            while i < end {
                register_block::<L, 1, NR, 0>(&self.block(i, r, 0));
                i += 1;
            }
        }
        BLOCK / MR * AHEAD
    }

    /// # Safety
    /// `i` is a weight row and `r` a hidden row.
    #[inline(always)]
    unsafe fn block(&self, i: usize, r: usize, ahead: usize) -> Block {
        let weight_stride = self.weight.row_stride() * self.weight.dtype().block_bytes();
        let weight = self.weight.bytes().as_ptr();
        // SAFETY: by this function's contract, and `out` has room for both.
        unsafe {
            Block {
                weight: weight.add(i * weight_stride),
                weight_stride,
                hidden: self.hidden.as_ptr().add(r * self.hidden.row_bytes()),
                hidden_stride: self.hidden.row_bytes(),
                cols: self.weight.cols(),
                out: self.out.add(r * TILE + i),
                ahead: weight.wrapping_add(ahead * weight_stride),
            }
        }
    }
}
