//! A row of a pass over stored logits, and the needs of its request.

use super::candidate;
use crate::abi::{Draw, Item, Row, SummaryRequest};
use crate::selection::Query;
use crate::selection::stored_rows::LONGEST_LIST;
use flash_sampling_core::backend::selection::SummarySpec;
use flash_sampling_core::backend::{Filters, Request, RowScoreBound, RowSummary};
use flash_sampling_core::{RowParams, backend};

/// A row of a pass.
#[derive(Debug)]
pub(crate) struct ScanRow<'a> {
    /// The row's index in the call.
    pub(crate) at: usize,
    /// The row's index among the stored rows.
    pub(crate) slot: usize,
    pub(crate) params: &'a RowParams<'a>,
    pub(crate) row: backend::Row<'a>,
    pub(crate) request: Request<'a>,
    /// Whether a row without filters is drawn from stored logits.
    pub(crate) draws: bool,
    /// Whether a row without filters gets log Z without masses.
    pub(crate) finishes_log_z: bool,
    /// The error bound of the row's scores, in a canonical plan.
    pub(crate) bound: Option<RowScoreBound>,
    pub(crate) out: &'a mut RowSummary,
}

impl ScanRow<'_> {
    /// Whether the row has raw log-probabilities.
    pub(crate) fn is_raw(&self) -> bool {
        self.row.raw_logprobs.is_some()
    }

    pub(super) fn is_overview(&self) -> bool {
        self.out.error.is_none() && self.request.is_overview()
    }

    /// The filters of the row, if the GPU summarizes the row.
    pub(super) fn filters(&self) -> Option<&Filters> {
        self.row.filters.as_ref().filter(|filters| self.out.error.is_none() && filters.rescale.is_finite())
    }

    /// The parts of the row's overview, if the row has filters.
    pub(super) fn overview(&self) -> Option<(SummarySpec, &Filters)> {
        let filters = self.filters().filter(|_| self.request.is_overview())?;
        Some((SummarySpec::of(&self.row, filters), filters))
    }

    pub(super) fn needs_mass(&self) -> bool {
        match self.row.filters {
            Some(_) => self.overview().is_some_and(|(spec, _)| spec.mass),
            None => !self.finishes_log_z && self.is_overview() && self.row.logprobs.is_some(),
        }
    }

    pub(super) fn needs_log_z(&self) -> bool {
        self.finishes_log_z && self.row.filters.is_none() && self.is_overview() && self.row.logprobs.is_some()
    }

    /// The number of largest logits in an overview.
    pub(super) fn list_len(&self) -> Option<u32> {
        match self.row.filters {
            Some(_) => self.overview().map(|(spec, _)| spec.list as u32),
            None => self.row.logprobs.filter(|&most| most > 0 && self.is_overview()),
        }
    }

    /// Whether the row needs draws with replacement and has no filters.
    pub(super) fn needs_draws(&self) -> bool {
        self.draws && self.row.filters.is_none() && !self.row.without_replacement && self.is_overview()
    }

    /// The number of draws to compute: one for a greedy row, which copies this draw.
    pub(super) fn made_draws(&self) -> u32 {
        if self.row.greedy { 1 } else { self.row.draws }
    }

    /// The results that the storing pass computes for this row. With `has_draw`, that pass also makes the first draw.
    pub(crate) fn summary_request(&self, is_raw: bool, has_draw: bool) -> SummaryRequest {
        let most = if is_raw { self.row.raw_logprobs.filter(|_| self.is_overview()) } else { self.list_len() };
        let limit = most.filter(|&most| most <= LONGEST_LIST).unwrap_or(0);
        let is_done = has_draw && self.needs_draws() && self.made_draws() == 1;
        let has_tokens = self.row.ranks || !self.row.logprob_token_ids.is_empty();
        let draws = self.draws && !is_done;
        let reads_logits = !self.is_overview() || self.row.filters.is_some() || draws || has_tokens;
        let masses = if is_raw { self.is_raw() && self.is_overview() } else { self.needs_mass() };
        SummaryRequest {
            limit,
            stores: (is_raw || reads_logits).into(),
            masses: masses.into(),
            ..SummaryRequest::default()
        }
    }

    /// Takes the draw of the storing pass, if the row needs no other draw.
    pub(crate) fn take_draw(&mut self, draw: &Draw) {
        if self.needs_draws() && self.made_draws() == 1 {
            let copies = self.row.draws as usize;
            self.out.draws.extend(candidate(draw).into_iter().flat_map(|best| core::iter::repeat_n(best, copies)));
        }
    }

    /// The kernels' parameters of a row, without transforms: stored logits are already transformed.
    pub(super) fn noise(&self, draw: u32) -> Row {
        let (seed, position, greedy) = (self.params.seed, self.params.position, self.row.greedy.into());
        Row { seed, position, inv_temperature: 1.0, draw, greedy, ..Row::default() }
    }

    /// A query for the `limit` tokens with the best scores; with [`BY_LOGIT`], the tokens with the largest logits.
    pub(super) fn best(&self, limit: u32, noise: Row) -> Query {
        let slack = match self.bound.map_or(0.0, |bound| bound.slack()) {
            f32::MAX => f32::INFINITY,
            slack => slack,
        };
        Query { item: Item { source: self.slot as u32, limit, slack, padding: 0 }, noise }
    }
}
