//! The summary of a row's groups so far, for variants that draw groups or merge them.

use super::finish::Summary;
use super::raw_logprobs::RawState;
use super::row_state::{Best, RowState};
use flash_sampling_core::backend::{Candidate, GroupSummary, LogMass, MassHistogram, Row, StagedError, TopList};
use flash_sampling_core::{Domain, Plan};

/// The state of a draw among the groups so far.
pub(crate) trait GroupMerge: Copy {
    /// No group.
    const NONE: Self;

    /// Adds group `k`, which has mass. `sample` is its sample for the draw.
    fn add(self, row: &Row<'_>, draw: u32, k: u32, mass: LogMass, sample: Candidate) -> Self;

    /// The sample of the draw.
    fn sample(&self) -> Candidate;
}

/// The groups of one row so far.
#[derive(Debug)]
pub(crate) struct RowGroups<D> {
    pub(crate) draws: Vec<D>,
    total: MassHistogram,
    top: TopList,
    invalid: Option<StagedError>,
    has_finite: bool,
    best: Best,
    pub(crate) raw: RawState,
}

impl<D: GroupMerge> RowGroups<D> {
    pub(crate) fn new(plan: &Plan) -> Self {
        RowGroups {
            draws: Vec::with_capacity(plan.max_draws as usize),
            total: MassHistogram::default(),
            top: TopList::new(plan.max_logprobs.unwrap_or(0) as usize, 0.0),
            invalid: None,
            has_finite: false,
            best: Best::default(),
            raw: RawState::default(),
        }
    }

    /// Resets the state for a row. A greedy row has one draw.
    pub(crate) fn begin(&mut self, row: &Row<'_>) {
        let draws = if row.greedy { 1 } else { row.draws as usize };
        self.draws.clear();
        self.draws.resize(draws, D::NONE);
        self.total.clear();
        self.top.reset(row.logprobs.unwrap_or(0) as usize, 0.0);
        self.invalid = None;
        self.has_finite = false;
        self.raw.begin(row);
    }

    /// Adds group `k` with the summary `state`.
    pub(crate) fn add(&mut self, row: &Row<'_>, k: u32, state: &RowState) {
        self.invalid = StagedError::first(self.invalid, state.invalid);
        self.raw.merge(&state.raw);
        let Some(mass) = state.mass.as_ref().filter(|mass| !mass.is_empty()) else { return };
        self.has_finite = true;
        self.top.merge(&state.top);
        if row.logprobs.is_some() {
            self.total.merge(mass);
        }
        let mass = mass.log_mass();
        for ((merged, &sample), draw) in self.draws.iter_mut().zip(&state.best.winners).zip(row.first_draw..) {
            *merged = merged.add(row, draw, k, mass, sample);
        }
    }

    /// The row's result.
    pub(crate) fn summary(&mut self) -> Summary<'_> {
        self.best.winners.clear();
        self.best.winners.extend(self.draws.iter().map(D::sample));
        Summary {
            invalid: self.invalid,
            has_finite: self.has_finite,
            best: &self.best,
            mass: Some(&self.total),
            top: self.top.as_slice(),
        }
    }
}

impl RowGroups<GroupWinner> {
    /// Adds another worker's groups.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.invalid = StagedError::first(self.invalid, other.invalid);
        self.has_finite |= other.has_finite;
        self.top.merge(&other.top);
        self.total.merge(&other.total);
        self.raw.merge(&other.raw);
        for (a, &b) in self.draws.iter_mut().zip(&other.draws) {
            *a = a.merge(b);
        }
    }
}

/// The best group of a draw: the larger score wins, then the lower group number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupWinner {
    score: f64,
    group: u32,
    sample: Candidate,
}

impl GroupWinner {
    fn merge(self, other: GroupWinner) -> GroupWinner {
        let wins = other.score > self.score || (other.score == self.score && other.group < self.group);
        if wins { other } else { self }
    }
}

impl GroupMerge for GroupWinner {
    const NONE: GroupWinner = GroupWinner { score: f64::NEG_INFINITY, group: u32::MAX, sample: Candidate::NONE };

    fn add(self, row: &Row<'_>, draw: u32, k: u32, mass: LogMass, sample: Candidate) -> Self {
        let score = if row.greedy {
            f64::from(sample.winner.score)
        } else {
            mass.value() + f64::from(row.noise.gumbel(Domain::Group, draw, k))
        };
        self.merge(GroupWinner { score, group: k, sample })
    }

    fn sample(&self) -> Candidate {
        self.sample
    }
}

/// The binary merge of consecutive groups.
impl GroupMerge for GroupSummary<Candidate> {
    const NONE: Self = GroupSummary::EMPTY;

    fn add(self, row: &Row<'_>, draw: u32, k: u32, mass: LogMass, sample: Candidate) -> Self {
        if row.greedy {
            // The argmax needs no coin.
            return GroupSummary { mass: self.mass.merge(mass), sample: Some(GroupMerge::sample(&self).merge(sample)) };
        }
        self.merge(GroupSummary { mass, sample: Some(sample) }, row.noise.coin(draw, k))
    }

    fn sample(&self) -> Candidate {
        self.sample.unwrap_or(Candidate::NONE)
    }
}
