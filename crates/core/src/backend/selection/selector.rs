//! Decides the filters of a row (top-k, top-p, min-p and the others) from its summary.

use super::cumulative_mass::{CumulativeMass, round_up};
use super::typical::typical;
use super::{PrefixMass, RankRange, RowView, Selection};
use crate::params::filters::{Filter, Filters};
use crate::summary::frontier::Frontier;
use crate::summary::mass_histogram::edge_of;
use crate::summary::winner::{Candidate, LogitRank};

/// The end of the run of kept tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    /// Before this entry of the list.
    At(usize),
    /// With the last token of at least this logit, which is below the list.
    Above(f32),
    /// With the row.
    All,
}

/// Applies the filters of a row, one after the other. Reuses its memory between rows.
#[derive(Clone, Debug, Default)]
pub struct Selector {
    cumulative: CumulativeMass,
    /// The first kept entry of the list.
    from: usize,
    /// Bounds of the mass at which a prefix ends.
    limits: (f64, f64),
    /// The smallest logit that a prefix may hold.
    prefix_floor: f32,
    /// Whether a prefix holds the whole list.
    holds_list: bool,
}

/// Only a list of the whole row decides.
const NEVER: Selection = Selection::Unlisted { floor: f32::NEG_INFINITY };

impl Selector {
    /// The tokens that the filters keep; at least one.
    pub fn select(&mut self, filters: &Filters, view: &RowView<'_>) -> Selection {
        self.cumulative.load(view.mass, view.list[0].logit);
        self.from = 0;
        let mut end = if view.floor == f32::NEG_INFINITY { End::At(view.list.len()) } else { End::All };
        for (i, &filter) in filters.steps().iter().enumerate() {
            let last = i + 1 == filters.steps().len();
            end = match self.step(filter, view, end, last) {
                Ok(end) => end,
                Err(selection) => return selection,
            };
        }
        match end {
            End::At(end) => Selection::Listed(self.from..end),
            _ => {
                let first = if self.from == 0 { RankRange::ALL.first } else { view.list[self.from].logit_rank() };
                let last = match end {
                    End::Above(logit) => LogitRank { logit, token: u32::MAX },
                    _ => RankRange::ALL.last,
                };
                Selection::RankRange(RankRange { first, last })
            }
        }
    }

    /// The winner of a draw among the kept tokens, from the frontier of the row. `selection` is the last result of
    /// [`Selector::select`] for the same row.
    ///
    /// # Errors
    /// The smallest logit that a list must hold to decide the winner.
    pub fn winner(&self, selection: &Selection, view: &RowView<'_>, frontier: &Frontier) -> Result<Candidate, f32> {
        self.winner_knowing(selection, view, frontier, &[])
    }

    /// [`Selector::winner`], with the known mass before some points of the frontier.
    ///
    /// # Errors
    /// The error of [`Selector::winner`].
    pub fn winner_knowing(
        &self,
        selection: &Selection,
        view: &RowView<'_>,
        frontier: &Frontier,
        known: &[PrefixMass],
    ) -> Result<Candidate, f32> {
        match selection {
            Selection::Listed(kept) if kept.start == 0 => {
                Ok(frontier.winner_from(view.list[kept.end - 1].logit_rank()))
            }
            Selection::RankRange(band) if self.from == 0 => Ok(frontier.winner_from(band.last)),
            Selection::Listed(kept) => Err(view.list[kept.end - 1].logit),
            Selection::RankRange(band) => Err(band.last.logit),
            Selection::Unlisted { floor } => Err(*floor),
            Selection::Prefix if self.from > 0 => Err(self.cumulative.floor_of(self.limits.1)),
            Selection::Prefix => {
                for point in frontier.iter() {
                    match self.prefix_keeps(view, point.logit_rank(), known) {
                        Some(true) => return Ok(*point),
                        Some(false) => {}
                        None => return Err(edge_of(point.logit)),
                    }
                }
                Err(f32::NEG_INFINITY)
            }
        }
    }

    /// Appends the points of a frontier in doubt: the winner follows from the [mass before](PrefixMass) each. Appends
    /// none if these masses do not decide.
    pub fn doubts(&self, selection: &Selection, view: &RowView<'_>, frontier: &Frontier, doubts: &mut Vec<PrefixMass>) {
        let exact = self.limits.0 == self.limits.1 || view.tail.is_on();
        if *selection == Selection::Prefix && self.from == 0 && exact {
            for point in frontier.iter() {
                match self.prefix_keeps(view, point.logit_rank(), &[]) {
                    Some(true) => return,
                    Some(false) => {}
                    None => doubts.push(PrefixMass::new(point.logit_rank())),
                }
            }
        }
    }

    /// An upper bound of the number of tokens with a logit of at least `floor`, without tokens that a filter drops from
    /// the top.
    pub fn max_count(&self, floor: f32) -> u64 {
        self.cumulative.max_count(floor)
    }

    /// The smallest logit of a list that holds all kept tokens.
    pub fn floor(&self, selection: &Selection, view: &RowView<'_>) -> f32 {
        match selection {
            Selection::Listed(kept) => view.list[kept.end - 1].logit,
            Selection::RankRange(band) if band.last == RankRange::ALL.last => f32::NEG_INFINITY,
            Selection::RankRange(band) => band.last.logit,
            Selection::Prefix => self.cumulative.floor_of(self.limits.1).max(self.prefix_floor),
            Selection::Unlisted { floor } => *floor,
        }
    }

    /// Applies one filter; `Err` has the result if later filters cannot be applied.
    fn step(&mut self, filter: Filter, view: &RowView<'_>, end: End, last: bool) -> Result<End, Selection> {
        let until = if let End::At(end) = end { end } else { view.list.len() };
        let first = f64::from(view.list[self.from].logit);
        match filter {
            Filter::TopK(k) => match (self.from + k as usize, end) {
                (at, _) if at <= until => Ok(End::At(at)),
                (_, End::At(_)) => Ok(end),
                (_, End::Above(t)) => Err(Selection::Unlisted { floor: t.max(self.cumulative.floor_of_count(k)) }),
                (_, End::All) => Err(Selection::Unlisted { floor: self.cumulative.floor_of_count(k) }),
            },
            Filter::MinP(p) => self.above(round_up(first + f64::from(p).ln()), view, end),
            Filter::TopNSigma(n) => self.above(round_up(first - f64::from(n) * view.moments.deviation()), view, end),
            Filter::Epsilon(epsilon) => {
                let (low, high) = self.threshold(epsilon, view, end);
                let (a, b) = (self.above(low, view, end)?, self.above(high, view, end)?);
                if a == b { Ok(a) } else { Err(Selection::Unlisted { floor: low }) }
            }
            Filter::Xtc(p) => {
                let (low, high) = self.threshold(p, view, end);
                let (a, b) = (self.above(low, view, end)?, self.above(high, view, end)?);
                match (a, b) {
                    (End::At(a), End::At(b)) if a == b => {
                        self.drop_first(view, a - 1 - self.from);
                        Ok(end)
                    }
                    _ => Err(Selection::Unlisted { floor: low }),
                }
            }
            Filter::TopP(p) => self.prefix(p, view, end, last),
            Filter::TypicalP(p) => match end {
                End::At(end) => {
                    let kept = typical(&view.list[self.from..end], f64::from(p));
                    let end = self.from + kept.end;
                    self.drop_first(view, kept.start);
                    Ok(End::At(end))
                }
                End::Above(floor) => Err(Selection::Unlisted { floor }),
                End::All => Err(NEVER),
            },
        }
    }

    /// Keeps the first tokens until their mass reaches `p` of the mass of the kept tokens.
    fn prefix(&mut self, p: f32, view: &RowView<'_>, end: End, last: bool) -> Result<End, Selection> {
        let until = if let End::At(end) = end { end } else { view.list.len() };
        let (low, high) = self.total(view, end);
        let limits = (f64::from(p) * low, f64::from(p) * high);
        let reach = |limit| {
            let reached = match end {
                End::At(_) => self.cumulative.reached(limit),
                _ => self.cumulative.reach(&view.list[self.from..until], limit),
            };
            reached.map(|n| self.from + n)
        };
        let first = reach(limits.0);
        let second = if limits.0 == limits.1 { first } else { reach(limits.1) };
        match (first, second, end) {
            (Some(a), Some(b), _) if a == b => Ok(End::At(a)),
            (_, _, End::At(_)) => Ok(end),
            (a, b, _) if last && (view.tail.is_on() || a.is_none() && b.is_none()) => {
                self.limits = limits;
                self.holds_list = a.is_none() && b.is_none();
                self.prefix_floor = if let End::Above(t) = end { t } else { f32::NEG_INFINITY };
                Err(Selection::Prefix)
            }
            (_, _, End::Above(t)) => Err(Selection::Unlisted { floor: t }),
            (_, _, End::All) => Err(Selection::Unlisted { floor: self.cumulative.floor_of(limits.1) }),
        }
    }

    /// Keeps logits of at least `t`, and at least one token.
    fn above(&self, t: f32, view: &RowView<'_>, end: End) -> Result<End, Selection> {
        let at = view.list.partition_point(|c| c.logit >= t).max(self.from + 1);
        Ok(match end {
            End::At(end) => End::At(end.min(at)),
            _ if at < view.list.len() || t >= view.floor => End::At(at),
            End::Above(s) => End::Above(s.max(t)),
            End::All => End::Above(t),
        })
    }

    /// Bounds of the least logit with a probability of `p` among the kept tokens.
    fn threshold(&mut self, p: f32, view: &RowView<'_>, end: End) -> (f32, f32) {
        let (low, high) = self.total(view, end);
        let logit = |mass: f64| self.cumulative.least_logit(f64::from(p) * mass);
        (logit(low), logit(high))
    }

    /// Drops the first `n` of the kept tokens.
    fn drop_first(&mut self, view: &RowView<'_>, n: usize) {
        self.cumulative.remove(&view.list[self.from..self.from + n]);
        self.from += n;
    }

    /// A lower and an upper bound of the mass of the kept tokens, relative to the highest edge.
    fn total(&mut self, view: &RowView<'_>, end: End) -> (f64, f64) {
        let both = |mass| (mass, mass);
        match end {
            End::At(end) => both(self.cumulative.sum(&view.list[self.from..end])),
            End::All if view.tail.is_on() => view.tail.whole(self.cumulative.top, self.cumulative.whole()),
            End::All => both(self.cumulative.whole()),
            End::Above(t) => self.cumulative.above(t, &view.list[self.from..]),
        }
    }

    /// Whether the prefix holds a token: it does if the mass before the token is below the limit. `None`: the masses do
    /// not decide.
    fn prefix_keeps(&self, view: &RowView<'_>, rank: LogitRank, known: &[PrefixMass]) -> Option<bool> {
        if view.list.last().is_some_and(|last| rank.is_at_or_before(&last.logit_rank())) {
            return self.holds_list.then_some(true);
        }
        // A pass may skip masses below the floor: a bin there can hold less than the mass of the token.
        if rank.logit < self.prefix_floor {
            return Some(false);
        }
        let (least, most) = self.cumulative.before(rank, view.tail.floor(), view.list, known);
        if least >= self.limits.1 {
            Some(false)
        } else if most < self.limits.0 {
            Some(true)
        } else {
            None
        }
    }
}
