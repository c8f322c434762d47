//! The sources of a tile's logits.

use super::LOGITS_TILE;
use crate::dot::pack::Packed;
use crate::dot::{Dot, DotScratch, TILE};
use crate::simd::SPAN;
use crate::upper_bounds::{Digits, UpperBounds};
use core::ops::Range;
use flash_sampling_core::backend::widen;
use flash_sampling_core::{Head, Matrix};

/// The source of logits.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// The matmul with a head. With `bounds`, a tile has upper bounds of the logits.
    Head { head: &'a Head<'a>, dot: Dot, hidden: &'a Packed, bounds: Option<(&'a UpperBounds, &'a Digits)> },
    /// Existing logits, `[rows, vocab]`. `rows` selects rows, in this order.
    Logits { logits: Matrix<'a>, rows: Option<&'a [usize]> },
}

impl<'a> Source<'a> {
    /// Returns the number of tokens of a row.
    pub(crate) fn tokens(&self) -> u32 {
        match self {
            Source::Head { head, .. } => head.tokens().len() as u32,
            Source::Logits { logits, .. } => logits.cols() as u32,
        }
    }

    /// Returns the number of tokens of a tile.
    pub(super) fn tile(&self) -> usize {
        match self {
            Source::Head { .. } => TILE,
            Source::Logits { .. } => LOGITS_TILE,
        }
    }

    /// Writes the raw logits of `tokens` (at most [`TILE`]) to `out[r * TILE ..]`, for all rows.
    pub(super) fn fill(&self, tokens: Range<u32>, out: &mut [f32], scratch: &mut DotScratch) {
        match self {
            Source::Head { head, dot, hidden, bounds } => {
                let rows = head.weight_row(tokens.start)..head.weight_row(tokens.end);
                match bounds {
                    Some((bounds, digits)) => bounds.tile(head, rows, digits, out, scratch),
                    None => dot.tile(&head.weight().row_range(rows), hidden.all(), out, scratch),
                }
            }
            Source::Logits { logits, rows } => {
                let count = rows.map_or(logits.rows(), <[usize]>::len);
                (0..count).for_each(|at| self.read(at, tokens.clone(), &mut out[at * TILE..]));
            }
        }
    }

    /// Turns the dot products of a head into raw logits, or their upper bounds into upper bounds.
    #[inline(always)]
    pub(super) fn transform(&self, first: u32, dots: &mut [f32]) {
        /// More than the errors of the float32 tanh of a logit and of its upper bound (`docs/exactness.md`).
        const TANH_RISE: f32 = 2e-6;
        let Source::Head { head, bounds, .. } = self else { return };
        head.transform(first, dots);
        if let (Some(_), Some(cap)) = (bounds, head.soft_cap()) {
            let rise = TANH_RISE * cap * head.scale();
            dots.iter_mut().for_each(|bound| *bound += rise);
        }
    }

    /// Whether tiles have upper bounds of the logits.
    #[inline(always)]
    pub(crate) fn has_bounds(&self) -> bool {
        matches!(self, Source::Head { bounds: Some(_), .. })
    }

    /// This source, with logits instead of upper bounds.
    pub(super) fn without_bounds(self) -> Self {
        match self {
            Source::Head { head, dot, hidden, .. } => Source::Head { head, dot, hidden, bounds: None },
            logits => logits,
        }
    }

    /// Returns the existing logits of `tokens` of row `at` without a copy, if they are whole spans of float32.
    #[inline(always)]
    pub(super) fn spans(&self, at: usize, tokens: Range<u32>) -> Option<&[[f32; SPAN]]> {
        let Source::Logits { logits, rows } = self else { return None };
        let is_whole = tokens.start.is_multiple_of(SPAN as u32) && tokens.len().is_multiple_of(SPAN);
        let row = logits.row_f32(rows.map_or(at, |rows| rows[at])).filter(|_| is_whole)?;
        Some(row[tokens.start as usize..tokens.end as usize].as_chunks::<SPAN>().0)
    }

    /// Writes the existing logits of `tokens` of row `at`. Does nothing for a head.
    pub(super) fn read(&self, at: usize, tokens: Range<u32>, out: &mut [f32]) {
        let Source::Logits { logits, rows } = self else { return };
        let size = logits.dtype().block_bytes();
        let bytes = tokens.start as usize * size..tokens.end as usize * size;
        let row = logits.row_bytes(rows.map_or(at, |rows| rows[at]));
        widen(&row[bytes], logits.dtype(), &mut out[..tokens.len()]);
    }
}
