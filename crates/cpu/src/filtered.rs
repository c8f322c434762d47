//! Rows with filters: which tokens a pass keeps for them, and their draws.
//!
//! The first pass leaves the largest logits, the masses and, per draw, a [`Frontier`]; [`Selector`] says what they
//! decide. A row that they do not decide takes another pass (`again.rs`): one that sums the mass before the few points of
//! the frontier that are in doubt, or one that lists the row down to a floor and draws from the list.

use crate::answer::Answer;
use crate::largest::{Largest, order};
use crate::prefetch::prefetch;
use crate::state::RowState;
use crate::words::SPAN;
use flash_sampling_core::params::Row;
use flash_sampling_core::selection::{Before, Seen};
use flash_sampling_core::{
    Candidate, Domain, Filter, Filters, Frontier, Moments, RowError, Selection, Selector, TopList, Winner,
};

/// The largest logits that a pass lists, and the largest top-k for which it lists more.
const LIST: usize = 64;
const LONG_LIST: u32 = 1024;
/// Draws of a row for which frontiers are kept; rows with more are drawn from lists.
const FRONTIERS: u32 = 8;
/// Passes after the first that list a part of the row; one more lists all of it.
const PARTIAL_PASSES: u32 = 2;

/// What a row takes part in a pass for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    /// Everything that it asks for.
    Summary,
    /// The mass before the points in doubt.
    Before,
    /// Every token with a logit of at least `floor`, in this list of the worker.
    List { floor: f32, slot: usize },
}

/// What an undecided row needs of another pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Need {
    /// The mass before the points in doubt.
    Before,
    /// A list of every token with a logit of at least `floor`, of which there are at most `bound`.
    List { floor: f32, bound: u64 },
}

/// What a row with filters keeps of a pass, beside its masses.
#[derive(Clone, Debug, Default)]
pub(crate) struct FilterState {
    pub(crate) moments: Moments,
    pub(crate) largest: Largest,
    /// The largest logit so far.
    pub(crate) largest_logit: f32,
    /// One a draw; none where the row is drawn from a list.
    frontiers: Vec<Frontier>,
    used: usize,
    /// The mass before the points in doubt.
    doubts: Vec<Before>,
    pub(crate) answer: Answer,
    /// What it takes to answer it, where that is not decided.
    pub(crate) need: Option<Need>,
}

/// How many of the largest logits a pass lists for a row.
fn list_len(row: &Row<'_>, filters: &Filters, frontiers: bool) -> usize {
    let thresholds = filters.steps().iter().all(|f| matches!(f, Filter::MinP(_) | Filter::TopNSigma(_)));
    match filters.smallest_k().filter(|&k| k <= LONG_LIST) {
        // The largest logit and the frontier tell all.
        None if thresholds && frontiers && row.logprobs.is_none() && !row.kept => 1,
        k => LIST.max(k.unwrap_or(0) as usize).max(row.logprobs.unwrap_or(0) as usize),
    }
}

impl FilterState {
    /// Empties it for a row's first pass; whether the row needs its masses.
    pub(crate) fn begin(&mut self, row: &Row<'_>, filters: &Filters) -> bool {
        self.moments = filters.moments();
        self.largest_logit = f32::NEG_INFINITY;
        let listed =
            filters.smallest_k().is_some_and(|k| k <= LONG_LIST) || row.without_replacement || row.draws > FRONTIERS;
        self.used = if listed { 0 } else { row.draws as usize };
        self.frontiers.resize_with(self.used.max(self.frontiers.len()), Frontier::default);
        self.frontiers.iter_mut().for_each(Frontier::clear);
        self.largest.begin(list_len(row, filters, !listed));
        self.doubts.clear();
        self.answer.begin();
        filters.need_mass_beyond(self.largest.limit())
    }

    /// Fetches the frontiers, before a tile is added.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        prefetch(&self.frontiers[..self.used]);
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
        self.largest.merge(&other.largest);
        self.largest_logit = self.largest_logit.max(other.largest_logit);
        self.frontiers_mut().iter_mut().zip(other.frontiers()).for_each(|(a, b)| a.merge(b));
    }

    /// Prepares a pass that sums the mass before the points in doubt, which `first` knows.
    pub(crate) fn begin_before(&mut self, first: &FilterState) {
        self.doubts.clear();
        self.doubts.extend(first.doubts.iter().map(|doubt| Before::new(doubt.place)));
    }

    /// Adds a tile, `top` its largest logit, to the mass before the points in doubt.
    pub(crate) fn add_before(&mut self, first: u32, spans: &[[f32; SPAN]], top: f32) {
        for doubt in self.doubts.iter_mut().filter(|doubt| top >= doubt.place.logit) {
            doubt.extend_from_slice(first, spans.as_flattened());
        }
    }

    /// Adds the mass that another worker has seen before the points in doubt.
    pub(crate) fn merge_before(&mut self, other: &FilterState) {
        self.doubts.iter_mut().zip(&other.doubts).for_each(|(a, b)| a.merge(b));
    }
}

/// Decides and draws rows with filters. Keeps its memory from call to call.
#[derive(Debug, Default)]
pub(crate) struct Filtering {
    selector: Selector,
    list: TopList,
}

impl Filtering {
    /// Answers a row from what the first pass left, or from that and the mass before the points in doubt; what it needs
    /// where these do not decide.
    pub(crate) fn answer(
        &mut self,
        row: &Row<'_>,
        filters: &Filters,
        state: &mut RowState,
        vocab_size: u32,
        passes: u32,
    ) -> Option<Need> {
        let RowState { filter, mass, .. } = state;
        filter.largest.finish();
        let FilterState { largest, moments, doubts, answer, frontiers, used, .. } = filter;
        let mass = mass.as_ref().expect("a row with filters has masses");
        let seen = Seen::first(largest.as_slice(), largest.limit(), mass, moments);
        let selection = self.selector.select(filters, &seen);
        let frontiers = &frontiers[..*used];
        let from_list = row.logprobs.is_some() || row.kept || frontiers.is_empty();
        if let (true, Selection::Listed(kept)) = (from_list, &selection) {
            self.draw(row, filters, &seen.list[kept.clone()], vocab_size, answer);
            return None;
        }
        if !from_list {
            answer.draws.clear();
            let winner = |f| self.selector.winner_knowing(&selection, &seen, f, doubts).ok();
            let rescaled = |c: Candidate| Candidate { logit: c.logit * filters.rescale, ..c };
            answer.draws.extend(frontiers.iter().map_while(winner).map(rescaled));
            if answer.draws.len() == frontiers.len() {
                // Winners on a frontier belong to a run that begins with the row's first token.
                answer.outcome = Some(filters.drawable(&seen.list[..1]).map(drop));
                return None;
            }
            if let Selection::Listed(kept) = &selection {
                self.draw(row, filters, &seen.list[kept.clone()], vocab_size, answer);
                return None;
            }
            if doubts.is_empty() {
                for frontier in frontiers {
                    self.selector.doubts(&selection, &seen, frontier, doubts);
                }
                if !doubts.is_empty() {
                    return Some(Need::Before);
                }
            }
        }
        Some(self.need_list(&selection, &seen, passes))
    }

    /// Answers a row from a list of every token with a logit of at least `floor` (-inf: of all); what it needs where that
    /// does not decide.
    #[allow(clippy::too_many_arguments)] // what a row is, and what it has
    pub(crate) fn answer_listed(
        &mut self,
        row: &Row<'_>,
        filters: &Filters,
        state: &mut RowState,
        list: &mut [Candidate],
        floor: f32,
        vocab_size: u32,
        passes: u32,
    ) -> Option<Need> {
        list.sort_unstable_by(order);
        let RowState { filter, mass, .. } = state;
        let mass = mass.as_ref().expect("a row with filters has masses");
        if list.is_empty() {
            return Some(Need::List { floor: f32::NEG_INFINITY, bound: u64::MAX });
        }
        let seen = Seen { list, floor, mass, moments: &filter.moments };
        let selection = self.selector.select(filters, &seen);
        if let Selection::Listed(kept) = selection {
            self.draw(row, filters, &list[kept], vocab_size, &mut filter.answer);
            return None;
        }
        Some(self.need_list(&selection, &seen, passes))
    }

    /// The list that an undecided row needs.
    fn need_list(&self, selection: &Selection, seen: &Seen<'_>, passes: u32) -> Need {
        let floor = if passes <= PARTIAL_PASSES { self.selector.floor(selection, seen) } else { f32::NEG_INFINITY };
        Need::List { floor, bound: self.selector.most_count(floor) }
    }

    /// Draws from the kept tokens.
    fn draw(&mut self, row: &Row<'_>, filters: &Filters, kept: &[Candidate], vocab_size: u32, answer: &mut Answer) {
        let scored = |draw: u32, c: &Candidate| {
            let (token, logit) = (c.winner.token, c.logit * filters.rescale);
            let noise = row.noise.gumbel(Domain::Token, draw, token);
            Candidate { winner: Winner::new(logit + noise, token), logit }
        };
        answer.begin();
        let kept = match filters.drawable(kept) {
            Ok(kept) => kept,
            Err(error) => {
                answer.outcome = Some(Err(error));
                return;
            }
        };
        if row.without_replacement {
            let available = kept.len() as u32;
            if available < row.draws {
                answer.outcome = Some(Err(RowError::SupportTooSmall { draws: row.draws, available }));
                return;
            }
            self.list.reset(row.draws as usize, 0.0);
            kept.iter().for_each(|c| self.list.push(scored(row.first_draw, c)));
            answer.draws.extend_from_slice(self.list.as_slice());
        } else {
            let draws = row.first_draw..row.first_draw + row.draws;
            answer.draws.extend(draws.map(|draw| kept.iter().fold(Candidate::NONE, |w, c| w.merge(scored(draw, c)))));
        }
        answer.asked = (row.logprobs.is_some(), row.kept);
        if row.logprobs.is_some() || row.kept {
            let tokens = kept.iter().map(|c| (c.winner.token, c.logit * filters.rescale));
            answer.keep(tokens, vocab_size, row.kept);
        }
        let largest = kept.iter().take(row.logprobs.unwrap_or(0) as usize).map(|c| {
            let logit = c.logit * filters.rescale;
            Candidate { winner: Winner::new(logit, c.winner.token), logit }
        });
        answer.top.extend(largest);
        answer.outcome = Some(Ok(()));
    }
}
