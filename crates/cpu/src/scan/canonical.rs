//! The canonical option: decides near ties by dot products with the same bits on every machine.
//!
//! A pass collects the best candidate and all candidates within a slack of it
//! ([`ScoreBound`](flash_sampling_core::backend::ScoreBound)). Then each candidate is re-evaluated as in the
//! [reference](flash_sampling_core::reference).

use flash_sampling_core::backend::canonical::{canonical_logit, norm};
use flash_sampling_core::backend::{Candidate, Row, ScoreBound, TopList, Winner};
use flash_sampling_core::{Domain, Head, Matrix};

/// The error bounds of a head, computed once, and buffers.
#[derive(Debug)]
pub(crate) struct Canonical {
    error_bounds: ScoreBound,
    hidden: Vec<f32>,
    weight_row: Vec<f64>,
    list: TopList,
}

impl Canonical {
    pub(crate) fn new(head: &Head<'_>) -> Self {
        Canonical {
            error_bounds: ScoreBound::new(head),
            hidden: vec![0.0; head.hidden()],
            weight_row: vec![0.0; head.hidden()],
            list: TopList::default(),
        }
    }

    /// Returns the slack of a row with hidden state `r` of `input`.
    pub(crate) fn slack(&mut self, head: &Head<'_>, row: &Row<'_>, input: &Matrix<'_>, r: usize) -> f32 {
        input.row_to_f32(r, &mut self.hidden);
        self.error_bounds.row(head, row, norm(&self.hidden)).slack()
    }

    /// Sets the hidden state for [`Canonical::resolve`].
    pub(crate) fn load(&mut self, input: &Matrix<'_>, r: usize) {
        input.row_to_f32(r, &mut self.hidden);
    }

    fn candidate(&mut self, head: &Head<'_>, row: &Row<'_>, draw: Option<u32>, token: u32) -> Candidate {
        let mut logit = [canonical_logit(head, token, &self.hidden, &mut self.weight_row)];
        row.transform.apply(token, &mut logit);
        let noise = draw.map_or(0.0, |draw| row.noise.gumbel(Domain::Token, draw, token));
        Candidate { winner: Winner::new(logit[0] + noise, token), logit: logit[0] }
    }

    /// Returns the `limit` best candidates by canonical score (`draw` selects the noise) or logit (`None`).
    pub(crate) fn resolve(
        &mut self,
        head: &Head<'_>,
        row: &Row<'_>,
        draw: Option<u32>,
        limit: usize,
        candidates: &[Candidate],
    ) -> &[Candidate] {
        let mut list = core::mem::take(&mut self.list);
        list.reset(limit, 0.0);
        for c in candidates {
            let candidate = self.candidate(head, row, draw, c.winner.token);
            if candidate.logit > f32::NEG_INFINITY {
                list.push(candidate);
            }
        }
        let last = list.as_slice().last().map_or(0.0, |c| c.winner.score);
        if self.error_bounds.row(head, row, norm(&self.hidden)).needs_full_evaluation(last) {
            list.reset(limit, 0.0);
            for token in head.tokens() {
                let candidate = self.candidate(head, row, draw, token);
                if candidate.logit > f32::NEG_INFINITY {
                    list.push(candidate);
                }
            }
        }
        self.list = list;
        self.list.as_slice()
    }
}
