//! The logits of single tokens, where a tile has upper bounds.

use super::Planned;
use crate::dot::pack::Packed;
use crate::dot::{Dot, DotScratch, TILE};
use crate::scan::perturb::Keep;
use core::ops::Range;
use flash_sampling_core::Head;
use flash_sampling_core::backend::{Candidate, RowTransform};

/// Computes the transformed logits of single tokens of a row, with the bits of a pass without bounds.
pub(super) struct ExactLogits<'a, 'b> {
    pub(super) head: &'a Head<'b>,
    pub(super) dot: &'a Dot,
    pub(super) hidden: &'a Packed,
    pub(super) planned: &'a Planned<'b>,
    pub(super) scratch: &'a mut DotScratch,
    pub(super) out: &'a mut Vec<f32>,
    /// Whether a logit was not finite, so that the row needs a pass without bounds.
    pub(super) fails: bool,
}

impl ExactLogits<'_, '_> {
    #[cold]
    #[inline(never)]
    pub(super) fn logit(&mut self, token: u32) -> f32 {
        let row = self.head.weight_row(token);
        let (hidden, at) = self.hidden.around(self.planned.at);
        self.out.resize(hidden.rows() * TILE, 0.0);
        self.dot.tile(&self.head.weight().row_range(row..row + 1), hidden, self.out, self.scratch);
        let mut logit = [self.out[at * TILE]];
        self.head.transform(token, &mut logit);
        let adjustments = self.planned.adjustments.near(token..token + 1);
        RowTransform { adjustments, ..self.planned.row.transform }.apply(token, &mut logit);
        self.fails |= !logit[0].is_finite();
        logit[0]
    }
}

/// A collector of candidates whose logits in the tile are upper bounds.
pub(super) struct Exactly<'a, 'b, 'c, K>(pub(super) &'a mut K, pub(super) &'a mut ExactLogits<'b, 'c>);

impl<K: Keep> Keep for Exactly<'_, '_, '_, K> {
    #[inline(always)]
    fn cut(&self) -> f32 {
        self.0.cut()
    }

    #[inline(always)]
    fn cut_in(&self, spans: Range<usize>) -> f32 {
        self.0.cut_in(spans)
    }

    #[inline(always)]
    fn logit(&mut self, token: u32, _bound: f32) -> f32 {
        self.1.logit(token)
    }

    #[inline(always)]
    fn offer(&mut self, candidate: Candidate) {
        self.0.offer(candidate);
    }

    #[inline(always)]
    fn offer_first(&mut self, candidate: Candidate, spans: Range<usize>) -> f32 {
        self.0.offer_first(candidate, spans)
    }
}
