//! The algorithm of all vector kernels, written once.
//!
//! Plain version, for a tile of the weight and all rows of hidden states:
//! ```text
//! for each hidden row r, for each weight row i:
//!     out[r, i] = sum over k of weight[i, k] * hidden[r, k]
//! ```
//! Deviations, and why each keeps the answer:
//! 1. The sum is taken in steps of `STEP` elements into one vector accumulator per output, whose lanes are added at the
//!    end in a fixed order. That order depends on the instruction set only: not on the number of rows, the tile or the
//!    register block. So a row has the same bits in every batch.
//! 2. `MR x NR` outputs are computed together, so that each loaded vector is used several times. They do not mix.
//! 3. The weight is cut into blocks that stay in the second-level cache while all hidden rows pass over them: the
//!    weight is read from memory once for the whole batch.
//! 4. What is left of a weight row beyond the last whole step is copied next to zeros; the packed hidden states are
//!    zero there too.

use super::TILE;
use super::pack::Packed;
use flash_sampling_core::Matrix;

/// The operations that an instruction set brings: all of them, and no loop.
///
/// # Safety
/// Every function may only be called where the instruction set is available, with pointers to `STEP` readable elements.
/// They are `inline(always)` and not marked with `target_feature` themselves, so that they inline into the entry point
/// that is.
pub(crate) trait Lanes {
    /// Partial sums of one output.
    type Sums: Copy;
    /// `STEP` weights.
    type Weights: Copy;
    /// `STEP` hidden elements.
    type Hidden: Copy;
    /// Elements of a step.
    const STEP: usize;
    /// Bytes of a step of the weight.
    const WEIGHT_BYTES: usize;
    /// Bytes of a step of packed hidden states.
    const HIDDEN_BYTES: usize;

    unsafe fn zero() -> Self::Sums;
    unsafe fn weights(at: *const u8) -> Self::Weights;
    unsafe fn hidden(at: *const u8) -> Self::Hidden;
    unsafe fn multiply_add(sums: Self::Sums, w: Self::Weights, h: Self::Hidden) -> Self::Sums;
    unsafe fn total(sums: Self::Sums) -> f32;
}

/// Weight rows that stay in the second-level cache while the batch passes over them.
const BLOCK: usize = 64;
/// Largest `WEIGHT_BYTES` of any instruction set.
const TAIL_BYTES: usize = 128;

/// Where one register block reads and writes.
struct Block {
    weight: *const u8,
    weight_stride: usize,
    hidden: *const u8,
    hidden_stride: usize,
    cols: usize,
    out: *mut f32,
}

/// One register block: `MR` weight rows by `NR` hidden rows.
///
/// # Safety
/// The instruction set of `L` is available; `block` points to `MR` weight rows of `cols` elements, `NR` packed hidden
/// rows, and `NR` output rows of [`TILE`] floats with `MR` of them left.
#[inline(always)]
unsafe fn register_block<L: Lanes, const MR: usize, const NR: usize>(block: &Block) {
    // SAFETY: by this function's contract; steps stay below `cols`, and the tail is copied before it is read.
    unsafe {
        let mut sums = [[L::zero(); NR]; MR];
        let steps = block.cols / L::STEP;
        let w: [*const u8; MR] = core::array::from_fn(|m| block.weight.add(m * block.weight_stride));
        let h: [*const u8; NR] = core::array::from_fn(|n| block.hidden.add(n * block.hidden_stride));
        for step in 0..steps {
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
        for n in 0..NR {
            for m in 0..MR {
                *block.out.add(n * TILE + m) = L::total(sums[m][n]);
            }
        }
    }
}

/// All rows of a tile. `MR` and `NR` are the register block of the instruction set; a single hidden row takes `M1`
/// weight rows at a time, which is enough streams for the memory.
///
/// # Safety
/// The instruction set of `L` is available, `weight` holds elements of `L`'s type and at most [`TILE`] rows, `hidden` is
/// packed for `L` with the same number of columns, and `out` holds [`TILE`] floats a hidden row.
#[inline(always)]
pub(crate) unsafe fn tile<L: Lanes, const MR: usize, const NR: usize, const M1: usize>(
    weight: &Matrix<'_>,
    hidden: &Packed,
    out: &mut [f32],
) {
    const { assert!(NR <= 6 && L::WEIGHT_BYTES <= TAIL_BYTES) }
    let weight_stride = weight.row_stride() * weight.dtype().size();
    let block_at = |i: usize, r: usize, out: *mut f32| Block {
        // SAFETY: `i` is a weight row, `r` a hidden row, and `out` has room for both.
        weight: unsafe { weight.bytes().as_ptr().add(i * weight_stride) },
        weight_stride,
        // SAFETY: as above.
        hidden: unsafe { hidden.as_ptr().add(r * hidden.row_bytes()) },
        hidden_stride: hidden.row_bytes(),
        cols: weight.cols(),
        // SAFETY: as above.
        out: unsafe { out.add(r * TILE + i) },
    };
    let out = out.as_mut_ptr();
    for start in (0..weight.rows()).step_by(BLOCK) {
        let end = (start + BLOCK).min(weight.rows());
        let mut r = 0;
        while r < hidden.rows() {
            let left = hidden.rows() - r;
            // SAFETY: the columns function's contract is this one's; `r + n <= hidden.rows()` in every arm.
            let n = unsafe {
                match left {
                    1 if hidden.rows() == 1 => columns::<L, M1, 1>(start, end, |i| block_at(i, r, out)),
                    n if n >= NR => columns::<L, MR, NR>(start, end, |i| block_at(i, r, out)),
                    5 => columns::<L, MR, 5>(start, end, |i| block_at(i, r, out)),
                    4 => columns::<L, MR, 4>(start, end, |i| block_at(i, r, out)),
                    3 => columns::<L, MR, 3>(start, end, |i| block_at(i, r, out)),
                    2 => columns::<L, MR, 2>(start, end, |i| block_at(i, r, out)),
                    _ => columns::<L, MR, 1>(start, end, |i| block_at(i, r, out)),
                }
            };
            r += n;
        }
    }
}

/// The weight rows `start..end` for one panel of `NR` hidden rows; returns `NR`.
#[inline(always)]
unsafe fn columns<L: Lanes, const MR: usize, const NR: usize>(
    start: usize,
    end: usize,
    block_at: impl Fn(usize) -> Block,
) -> usize {
    let mut i = start;
    // SAFETY: by the contract of `tile`; the blocks cover `start..end` and no more.
    unsafe {
        while i + MR <= end {
            register_block::<L, MR, NR>(&block_at(i));
            i += MR;
        }
        while i < end {
            register_block::<L, 1, NR>(&block_at(i));
            i += 1;
        }
    }
    NR
}
