//! Finds the tokens of a tile that can reach a cutoff, one by one.

use crate::scan::granules::{RoundKeys, WordsAhead};
use crate::scan::mass_cutoff::RowBounds;
use crate::scan::perturb::{Keep, Perturbed};
use crate::simd::{SPAN, Vector};
use flash_sampling_core::backend::{Candidate, Row, Winner};

/// Offers the tokens of a tile that can reach a draw's cutoff, perturbed or greedy. `ahead` has words of this draw.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
pub(super) unsafe fn draw_tile<V: Vector>(
    (row, keys): (&Row<'_>, &RoundKeys),
    draw: u32,
    first: u32,
    spans: &[[f32; SPAN]],
    (top, tops): (f32, &[f32]),
    ahead: Option<&mut WordsAhead>,
    keep: &mut impl Keep,
) {
    if !row.greedy {
        let tile = Perturbed { noise: &row.noise, keys, draw, first, spans, tops, floor: f32::NEG_INFINITY };
        // SAFETY: by this function's contract.
        unsafe { tile.offer_to::<V, _>(ahead, keep) };
    } else if top >= keep.cut() {
        let cut = keep.cut();
        let offer = |c| {
            keep.offer(c);
            keep.cut()
        };
        // SAFETY: by this function's contract.
        unsafe { rank::<V>(first, spans, tops, cut, offer) };
    }
}

/// Offers the logits that reach `cut` as their own scores. `tops` has the largest logit of each span.
///
/// # Safety
/// The instruction set of `V` is available.
#[inline(always)]
pub(super) unsafe fn rank<V: Vector>(
    first: u32,
    spans: &[[f32; SPAN]],
    tops: &[f32],
    mut cut: f32,
    mut offer: impl FnMut(Candidate) -> f32,
) {
    for ((span, &top), first) in spans.iter().zip(tops).zip((first..).step_by(SPAN)) {
        if top < cut {
            continue;
        }
        // SAFETY: by this function's contract. The minimum cutoff is above -inf.
        let mut hits = unsafe { V::at_least(span, [cut.max(f32::MIN); 4]) };
        while hits != 0 {
            let i = hits.trailing_zeros();
            hits &= hits - 1;
            let logit = span[i as usize];
            if logit >= cut {
                cut = offer(Candidate { winner: Winner::new(logit, first + i), logit });
            }
        }
    }
}

/// The winner of a draw, and the best score of all workers, which prunes tokens with a lower score.
pub(super) struct KeepWinner<'a> {
    winner: &'a mut Candidate,
    known: Option<&'a RowBounds>,
    cut: f32,
}

impl<'a> KeepWinner<'a> {
    #[inline(always)]
    pub(super) fn new(winner: &'a mut Candidate, known: Option<&'a RowBounds>) -> Self {
        let cut = winner.winner.score.max(known.map_or(f32::NEG_INFINITY, |known| known.best().0));
        KeepWinner { winner, known, cut }
    }
}

impl Keep for KeepWinner<'_> {
    #[inline(always)]
    fn cut(&self) -> f32 {
        self.cut
    }

    #[inline(always)]
    fn offer(&mut self, candidate: Candidate) {
        *self.winner = self.winner.merge(candidate);
        if candidate.winner.score > self.cut {
            self.cut = candidate.winner.score;
            self.known.inspect(|known| known.raise_best_score(candidate.winner.score));
        }
    }
}
