//! Rows with filters: which tokens a pass keeps for them, and their draws.
//!
//! The first pass leaves the largest logits, the masses and, per draw, a [`Frontier`]; [`Selector`] says what they
//! decide. A row that they do not decide is listed down to a floor in one more pass, and then drawn from its list.

use crate::state::RowState;
use crate::words::SPAN;
use flash_sampling_core::params::Row;
use flash_sampling_core::selection::Seen;
use flash_sampling_core::{
    Candidate, Domain, Filter, Filters, Frontier, MassHistogram, Moments, RowError, Samples, Selection, Selector,
    TopList, Winner,
};

/// The largest logits that a pass lists, and the largest top-k for which it lists more.
const LIST: usize = 64;
const LONG_LIST: u32 = 1024;
/// Draws of a row for which frontiers are kept; rows with more are drawn from lists.
const FRONTIERS: u32 = 8;
/// Passes after the first that list a part of the row; one more lists all of it.
const PARTIAL_PASSES: u32 = 2;

/// What a row with filters keeps of a pass, beside its masses and largest logits.
#[derive(Clone, Debug, Default)]
pub(crate) struct FilterState {
    pub(crate) moments: Moments,
    /// One a draw; none where the row is drawn from a list.
    frontiers: Vec<Frontier>,
    used: usize,
    /// Every token with a logit of at least `floor`, of a pass that lists.
    listed: Vec<Candidate>,
    floor: Option<f32>,
}

/// How many of the largest logits a pass lists for a row.
pub(crate) fn list_len(filters: &Filters) -> usize {
    filters.most().filter(|&k| k <= LONG_LIST).map_or(LIST, |k| LIST.max(k as usize))
}

impl FilterState {
    /// Empties it for a row's first pass.
    pub(crate) fn begin(&mut self, row: &Row<'_>, filters: &Filters) {
        self.moments = Moments::default();
        self.listed.clear();
        self.floor = None;
        let listed = filters.most().is_some_and(|k| k <= LONG_LIST) || row.without_replacement || row.draws > FRONTIERS;
        self.used = if listed { 0 } else { row.draws as usize };
        self.frontiers.resize_with(self.used.max(self.frontiers.len()), Frontier::default);
        self.frontiers.iter_mut().for_each(Frontier::clear);
    }

    /// Empties the list for a pass that lists.
    pub(crate) fn begin_list(&mut self) {
        self.listed.clear();
    }

    pub(crate) fn frontiers_mut(&mut self) -> &mut [Frontier] {
        &mut self.frontiers[..self.used]
    }

    fn frontiers(&self) -> &[Frontier] {
        &self.frontiers[..self.used]
    }

    /// Adds what another worker has seen in the first pass.
    pub(crate) fn merge(&mut self, other: &FilterState) {
        self.moments.merge(&other.moments);
        self.frontiers_mut().iter_mut().zip(other.frontiers()).for_each(|(a, b)| a.merge(b));
    }

    /// Adds the tokens of a tile that reach the floor of the list.
    pub(crate) fn list(&mut self, first: u32, spans: &[[f32; SPAN]], floor: f32) {
        for (token, &logit) in (first..).zip(spans.as_flattened()) {
            if logit >= floor && logit > f32::NEG_INFINITY {
                self.listed.push(Candidate { winner: Winner::new(logit, token), logit });
            }
        }
    }

    /// Takes over the list of another worker.
    pub(crate) fn merge_list(&mut self, other: &mut FilterState) {
        self.listed.append(&mut other.listed);
    }

    /// Orders the list of a pass that listed everything from `floor` on.
    pub(crate) fn finish_list(&mut self, floor: f32) {
        self.listed.sort_unstable_by(|a, b| {
            if a.place().reaches(&b.place()) { core::cmp::Ordering::Less } else { core::cmp::Ordering::Greater }
        });
        self.floor = Some(floor);
    }
}

/// A logit below which a row keeps no token, whatever is still to come: what min-p says of the largest so far.
pub(crate) fn hopeless(filters: &Filters, largest: Option<&Candidate>) -> f32 {
    match (filters.steps().first(), largest) {
        (Some(Filter::MinP(p)), Some(c)) => c.logit + p.ln() - 1e-3 * (1.0 + c.logit.abs()),
        _ => f32::NEG_INFINITY,
    }
}

/// Decides and draws rows with filters. Keeps its memory from call to call.
#[derive(Debug, Default)]
pub(crate) struct Filtering {
    selector: Selector,
    draws: Vec<Candidate>,
    top: Vec<Candidate>,
    mass: MassHistogram,
    list: TopList,
}

impl Filtering {
    /// The floor of the list that a row still needs after `passes` passes; `None` when it can be drawn.
    pub(crate) fn needs(&mut self, row: &Row<'_>, state: &RowState, passes: u32) -> Option<f32> {
        let (Some(filters), true, None) = (&row.filters, state.alive, state.fault) else { return None };
        let (seen, part) = state.seen(filters);
        let selection = self.selector.select(filters, &seen);
        if matches!(selection, Selection::Listed(_)) {
            return None;
        }
        let from_list = row.logprobs.is_some() || row.kept || part.frontiers().is_empty();
        let open = || part.frontiers().iter().any(|f| self.selector.winner(&selection, &seen, f).is_err());
        if !from_list && !open() {
            return None;
        }
        Some(if passes <= PARTIAL_PASSES { self.selector.floor(&selection, &seen) } else { f32::NEG_INFINITY })
    }

    /// Appends the result of a row that needs no further pass.
    pub(crate) fn emit(
        &mut self,
        row: &Row<'_>,
        filters: &Filters,
        state: &RowState,
        vocab_size: u32,
        out: &mut Samples,
    ) -> Result<(), RowError> {
        let (seen, part) = state.seen(filters);
        let selection = self.selector.select(filters, &seen);
        let kept = if let Selection::Listed(kept) = &selection { &seen.list[kept.clone()] } else { &[] };
        let rescaled = |c: &Candidate| Candidate { logit: c.logit * filters.rescale, ..*c };
        let scored = |draw: u32, c: &Candidate| {
            let (token, logit) = (c.winner.token, c.logit * filters.rescale);
            let noise = row.noise.gumbel(Domain::Token, draw, token);
            Candidate { winner: Winner::new(logit + noise, token), logit }
        };
        self.draws.clear();
        if row.without_replacement {
            let available = kept.len() as u32;
            if available < row.draws {
                return Err(RowError::SupportTooSmall { draws: row.draws, available });
            }
            self.list.reset(row.draws as usize, 0.0);
            kept.iter().for_each(|c| self.list.push(scored(row.first_draw, c)));
            self.draws.extend_from_slice(self.list.as_slice());
        } else {
            for (i, draw) in (row.first_draw..row.first_draw + row.draws).enumerate() {
                let won = part.frontiers().get(i).and_then(|f| self.selector.winner(&selection, &seen, f).ok());
                let from_list = || kept.iter().fold(Candidate::NONE, |w, c| w.merge(scored(draw, c)));
                self.draws.push(won.map_or_else(from_list, |c| rescaled(&c)));
            }
        }
        self.mass.clear();
        self.top.clear();
        if row.logprobs.is_some() || row.kept {
            kept.iter().for_each(|c| self.mass.push(c.logit * filters.rescale));
        }
        let largest = kept.iter().take(row.logprobs.unwrap_or(0) as usize).map(|c| {
            let logit = c.logit * filters.rescale;
            Candidate { winner: Winner::new(logit, c.winner.token), logit }
        });
        self.top.extend(largest);
        out.push_row(self.draws.iter().copied(), row.logprobs.is_some().then_some(&self.mass), &self.top);
        if row.kept {
            out.note_kept(kept.iter().map(|c| c.winner.token), self.mass.log_z(), vocab_size);
        }
        Ok(())
    }
}

impl RowState {
    /// What is known of a row with filters.
    fn seen(&self, filters: &Filters) -> (Seen<'_>, &FilterState) {
        let part = &self.filter;
        let mass = self.mass.as_ref().expect("a row with filters has masses");
        let seen = match part.floor {
            Some(floor) => Seen { list: &part.listed, floor, mass, moments: &part.moments },
            None => {
                // The list may be longer where more log-probabilities are asked for.
                let limit = self.top.as_slice().len().max(list_len(filters));
                Seen::first(self.top.as_slice(), limit, mass, &part.moments)
            }
        };
        (seen, part)
    }
}
