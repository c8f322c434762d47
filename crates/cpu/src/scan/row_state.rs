//! The state of a row during a pass: small summaries, merged over workers.

use crate::scan::filter_state::{FilterState, ListBudget};
use crate::scan::granules::WordsAhead;
use crate::scan::prefetch::prefetch;
use crate::scan::raw_logprobs::RawState;
use flash_sampling_core::Plan;
use flash_sampling_core::backend::{Candidate, LogitRank, MassHistogram, Row, StagedError, TopList};

/// The best candidates of a row's draws, over some set of tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct Best {
    /// The winner of each draw; empty if there are lists.
    pub(crate) winners: Vec<Candidate>,
    /// One list per draw if there is a slack, for canonical re-evaluation; or one list of draws without replacement.
    lists: Vec<TopList>,
    /// The number of lists in use.
    used: usize,
}

impl Best {
    /// Resets the state for a row. With a `slack`, each draw has a list instead of a winner.
    pub(crate) fn begin(&mut self, row: &Row<'_>, slack: f32) {
        // All draws of a greedy row are equal, so there is one winner. Draws without replacement are one list.
        let (draws, limit) = match (row.without_replacement, row.greedy) {
            (true, _) => (1, row.draws as usize),
            (false, true) => (1, 1),
            (false, false) => (row.draws as usize, 1),
        };
        self.winners.clear();
        self.used = 0;
        if row.without_replacement || slack > 0.0 {
            self.used = draws;
            self.lists.resize_with(draws.max(self.lists.len()), TopList::default);
            self.lists[..draws].iter_mut().for_each(|list| list.reset(limit, slack));
        } else {
            self.winners.resize(draws, Candidate::NONE);
        }
    }

    /// Removes all winners and lists.
    pub(crate) fn clear(&mut self) {
        self.winners.clear();
        self.used = 0;
    }

    /// Returns the lists; empty if there are winners.
    pub(crate) fn lists(&self) -> &[TopList] {
        &self.lists[..self.used]
    }

    /// Returns the lists, to be filled.
    pub(crate) fn lists_mut(&mut self) -> &mut [TopList] {
        &mut self.lists[..self.used]
    }

    /// Returns the draws of a row, in order. Every draw of a greedy row is its winner.
    pub(crate) fn draws(&self, row: &Row<'_>) -> impl Iterator<Item = Candidate> {
        let (found, times) = match (self.lists(), row.greedy) {
            ([list, ..], _) => (list.as_slice(), 1),
            ([], true) => (&self.winners[..1], row.draws as usize),
            ([], false) => (&self.winners[..], 1),
        };
        found.iter().flat_map(move |&c| core::iter::repeat_n(c, times))
    }

    /// Adds the best candidates of other tokens.
    pub(crate) fn merge(&mut self, other: &Best) {
        for (a, &b) in self.winners.iter_mut().zip(&other.winners) {
            *a = a.merge(b);
        }
        self.lists_mut().iter_mut().zip(other.lists()).for_each(|(a, b)| a.merge(b));
    }
}

/// The summary of one row over the tokens of a worker so far.
#[derive(Clone, Debug)]
pub(crate) struct RowState {
    pub(crate) best: Best,
    /// The state of the row's filters.
    pub(crate) filter: FilterState,
    filtered: bool,
    /// The state of raw log-probabilities.
    pub(crate) raw: RawState,
    /// Masses, if the plan allows log-probabilities, groups are weighed, or a row has had filters.
    pub(crate) mass: Option<MassHistogram>,
    /// Whether groups are weighed, so that every row needs its masses.
    weigh: bool,
    /// Whether this row needs its masses.
    pub(crate) weighed: bool,
    /// The largest logits of a row without filters.
    pub(crate) top: TopList,
    /// Ranks, and the number of tokens before each.
    pub(crate) prefix_counts: Vec<(LogitRank, u32)>,
    pub(crate) invalid: Option<StagedError>,
    /// Whether any logit was finite.
    pub(crate) has_finite: bool,
    /// Whether the best score of all workers may prune tokens here, because each draw has one winner of all tokens.
    pub(crate) shares: bool,
    /// The granule words of the first draw, computed in advance for the next tiles.
    pub(crate) ahead: WordsAhead,
}

impl RowState {
    /// Creates a state for any row of a plan. With `weigh`, it sums masses even without log-probabilities.
    pub(crate) fn new(plan: &Plan, weigh: bool) -> Self {
        let mut state = RowState {
            best: Best::default(),
            filter: FilterState::default(),
            filtered: false,
            raw: RawState::default(),
            mass: (weigh || plan.max_logprobs.is_some()).then(MassHistogram::default),
            weigh,
            weighed: false,
            top: TopList::new(plan.max_logprobs.unwrap_or(0) as usize, 0.0),
            prefix_counts: Vec::new(),
            invalid: None,
            has_finite: false,
            shares: false,
            ahead: WordsAhead::NONE,
        };
        if !plan.canonical {
            state.best.winners.reserve(plan.max_draws as usize);
        }
        state
    }

    /// Resets the state for a row. `short` is as for [`FilterState::begin`]. `shares`: workers share the first draw's
    /// best score.
    pub(crate) fn begin(&mut self, row: &Row<'_>, slack: f32, short: Option<ListBudget>, shares: bool) {
        self.raw.begin(row);
        if let Some(mass) = &mut self.mass {
            mass.clear_from(self.filter.floor.lowest);
        }
        self.filtered = row.filters.is_some();
        let mut largest = 0;
        if let Some(filters) = &row.filters {
            self.best.clear();
            self.weighed = self.filter.begin(row, filters, short);
            self.mass.get_or_insert_default();
        } else {
            self.weighed = self.weigh || row.logprobs.is_some();
            largest = row.logprobs.unwrap_or(0) as usize;
            self.best.begin(row, slack);
            self.filter.floor.begin(None);
        }
        self.top.reset(largest, slack);
        self.invalid = None;
        self.has_finite = false;
        self.shares = shares;
        self.ahead.clear();
    }

    /// Prefetches the state itself, before [`RowState::prefetch_parts`] reads it.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        prefetch(core::slice::from_ref(self));
    }

    /// Prefetches the parts that a tile updates: the top 24 nats of masses, or six nats above a floor.
    #[inline(always)]
    pub(crate) fn prefetch_parts(&self) {
        prefetch(&self.best.winners[..self.best.winners.len().min(1)]);
        if self.filtered {
            self.filter.prefetch();
        }
        if let (true, Some(mass)) = (self.weighed, &self.mass) {
            let floor = self.filter.floor.tail.floor();
            if self.filtered && floor > f32::NEG_INFINITY {
                mass.upwards(floor, 6 * 8).into_iter().for_each(prefetch);
            } else {
                mass.highest(24 * 8).into_iter().for_each(prefetch);
            }
        }
    }

    /// Prefetches the frontier points, whose pointers [`RowState::prefetch_parts`] has prefetched.
    #[inline(always)]
    pub(crate) fn prefetch_points(&self) {
        if self.filtered {
            self.filter.prefetch_points();
        }
    }

    /// Adds another worker's state of the same row.
    pub(crate) fn merge(&mut self, other: &RowState) {
        self.invalid = StagedError::first(self.invalid, other.invalid);
        self.has_finite |= other.has_finite;
        self.best.merge(&other.best);
        if self.filtered {
            self.filter.merge(&other.filter);
        }
        self.raw.merge(&other.raw);
        if let (Some(a), Some(b)) = (&mut self.mass, &other.mass) {
            a.merge_from(b, other.filter.floor.lowest);
        }
        self.top.merge(&other.top);
    }
}
