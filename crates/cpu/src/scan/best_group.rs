//! The best group of each draw so far, for variants that draw a group.

use super::finish::Summary;
use super::raw_logprobs::RawState;
use super::row_state::{Best, RowState};
use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, Domain, MassHistogram, Plan, StagedError, TopList};

/// The groups of one row on one worker so far.
#[derive(Debug)]
pub(crate) struct BestGroup {
    draws: Vec<GroupWinner>,
    total: MassHistogram,
    top: TopList,
    invalid: Option<StagedError>,
    has_finite: bool,
    best: Best,
    pub(crate) raw: RawState,
}

impl BestGroup {
    pub(crate) fn new(plan: &Plan) -> Self {
        BestGroup {
            draws: Vec::with_capacity(plan.max_draws as usize),
            total: MassHistogram::default(),
            top: TopList::new(plan.max_logprobs.unwrap_or(0) as usize, 0.0),
            invalid: None,
            has_finite: false,
            best: Best::default(),
            raw: RawState::default(),
        }
    }

    pub(crate) fn begin(&mut self, row: &Row<'_>) {
        let draws = if row.greedy { 1 } else { row.draws as usize };
        self.draws.clear();
        self.draws.resize(draws, GroupWinner::NONE);
        self.total.clear();
        self.top.reset(row.logprobs.unwrap_or(0) as usize, 0.0);
        self.invalid = None;
        self.has_finite = false;
        self.raw.begin(row);
    }

    /// Adds group `k`, of which `state` is the summary.
    pub(crate) fn add(&mut self, row: &Row<'_>, k: u32, state: &RowState) {
        self.invalid = StagedError::first(self.invalid, state.invalid);
        self.raw.merge(&state.raw);
        let Some(mass) = state.mass.as_ref().filter(|mass| !mass.is_empty()) else { return };
        self.has_finite = true;
        self.top.merge(&state.top);
        if row.logprobs.is_some() {
            self.total.merge(mass);
        }
        let log_mass = mass.log_z();
        for ((best, &sample), draw) in self.draws.iter_mut().zip(&state.best.winners).zip(row.first_draw..) {
            let score = if row.greedy {
                f64::from(sample.winner.score)
            } else {
                log_mass + f64::from(row.noise.gumbel(Domain::Group, draw, k))
            };
            *best = best.merge(GroupWinner { score, group: k, sample });
        }
    }

    /// Adds another worker's groups.
    pub(crate) fn merge(&mut self, other: &BestGroup) {
        self.invalid = StagedError::first(self.invalid, other.invalid);
        self.has_finite |= other.has_finite;
        self.top.merge(&other.top);
        self.total.merge(&other.total);
        self.raw.merge(&other.raw);
        for (a, &b) in self.draws.iter_mut().zip(&other.draws) {
            *a = a.merge(b);
        }
    }

    /// The row's result.
    pub(crate) fn summary(&mut self) -> Summary<'_> {
        self.best.winners.clear();
        self.best.winners.extend(self.draws.iter().map(|winner| winner.sample));
        Summary {
            invalid: self.invalid,
            has_finite: self.has_finite,
            best: &self.best,
            mass: Some(&self.total),
            top: self.top.as_slice(),
        }
    }
}

/// The best group of a draw: the larger score wins, then the lower number.
#[derive(Clone, Copy, Debug)]
struct GroupWinner {
    score: f64,
    group: u32,
    sample: Candidate,
}

impl GroupWinner {
    const NONE: GroupWinner = GroupWinner { score: f64::NEG_INFINITY, group: u32::MAX, sample: Candidate::NONE };

    fn merge(self, other: GroupWinner) -> GroupWinner {
        let wins = other.score > self.score || (other.score == self.score && other.group < self.group);
        if wins { other } else { self }
    }
}
