//! Where the logits of a tile come from.

use crate::dot::pack::Packed;
use crate::dot::{Dot, DotScratch, TILE};
use core::ops::Range;
use flash_sampling_core::matrix::widen;
use flash_sampling_core::{Head, Matrix};

/// Where logits come from.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// The matmul with a head.
    Head { head: &'a Head<'a>, dot: Dot, hidden: &'a Packed },
    /// Logits that exist, `[rows, vocab]`; `rows`: these rows alone, in this order.
    Logits { logits: Matrix<'a>, rows: Option<&'a [usize]> },
}

impl Source<'_> {
    /// How many tokens a row has.
    pub(crate) fn tokens(&self) -> u32 {
        match self {
            Source::Head { head, .. } => head.tokens().len() as u32,
            Source::Logits { logits, .. } => logits.cols() as u32,
        }
    }

    /// Writes the raw logits of `tokens` (at most [`TILE`]) to `out[r * TILE ..]`, for all rows.
    pub(super) fn fill(&self, tokens: Range<u32>, out: &mut [f32], scratch: &mut DotScratch) {
        match self {
            Source::Head { head, dot, hidden } => {
                let rows = head.weight_row(tokens.start)..head.weight_row(tokens.end);
                dot.tile(&head.weight().row_range(rows), hidden, out, scratch);
            }
            Source::Logits { logits, rows } => {
                let size = logits.dtype().size();
                let bytes = tokens.start as usize * size..tokens.end as usize * size;
                for at in 0..rows.map_or(logits.rows(), <[usize]>::len) {
                    let r = rows.map_or(at, |rows| rows[at]);
                    let out = &mut out[at * TILE..][..tokens.len()];
                    widen(&logits.row_bytes(r)[bytes.clone()], logits.dtype(), out);
                }
            }
        }
    }
}
