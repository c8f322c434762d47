//! One pass over a shard of the vocabulary, and the row summaries that merge.
//!
//! Which tokens a filter keeps depends on the whole row, so a shard cannot draw for such a row alone. A scan summarizes the
//! shard's tokens instead: the draws of a row without filters; first tokens, integer masses, moments and frontiers of a row
//! with filters. All of these merge in any order. The merged summaries of shards equal the summary of the whole row, to the
//! last bit, so [`Filtering`](crate::selection::Filtering) decides from them what a sampler without shards decides.

use crate::error::{RowError, SampleError, Stage};
use crate::frontier::Frontier;
use crate::mass_histogram::MassHistogram;
use crate::matrix::Matrix;
use crate::moments::Moments;
use crate::noise::Domain;
use crate::params::{Row, RowParams};
use crate::sampler::{Plan, Shape, check_call};
use crate::samples::{Draw, RowSample};
use crate::selection::{Before, Seen, Wants};
use crate::winner::{Candidate, TopList, Winner};
use core::cmp::Ordering;

/// What a scan computes of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Request<'a> {
    /// Nothing.
    Skip,
    /// The row's summary. Without filters: its draws, and masses and largest logits where the row asks for log-probabilities.
    /// With filters: what [`Wants`] lists. In both cases the raw masses and the largest raw logits, where the row asks for
    /// raw log-probabilities.
    Overview,
    /// The mass before these places, starting from zero.
    Before(&'a [Before]),
    /// Every token with a logit of at least `floor`.
    List {
        /// In nats; -inf: every token.
        floor: f32,
    },
    /// The raw logits of these tokens, in order; tokens of other shards are skipped.
    RawLogits(&'a [u32]),
}

/// The summary of a row over some of its tokens. Reusing one keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct RowSummary {
    /// Why the row cannot be drawn: invalid parameters, or its first bad logit, a raw one before a transformed one, then by
    /// token. The rest is unspecified then. A row without a finite logit has no error but no draws and an empty list: other
    /// shards may have one.
    pub error: Option<RowError>,
    /// Where the bad logit that `error` names was found.
    pub stage: Stage,
    /// The draws of a row without filters; without replacement at most as many as there are finite logits.
    pub draws: Vec<Draw>,
    /// The first tokens by falling logits, then rising tokens: as many as [`Wants::list`], or as the row asks
    /// log-probabilities for, or all from a floor on. Scores are logits.
    pub list: Vec<Candidate>,
    /// The masses, where [`Wants::mass`] or the row asks for log-probabilities; tokens that a filter dropped may be missing.
    pub mass: MassHistogram,
    /// The moments, where filters [need](crate::Filters::need_moments) them.
    pub moments: Moments,
    /// Of a row that was [sampled](RowSummary::set_sample).
    log_z: Option<f64>,
    /// The first `used` are the row's.
    frontiers: Vec<Frontier>,
    used: usize,
    /// The masses that were asked for.
    pub before: Vec<Before>,
    /// The masses of the raw logits, those of masked tokens too, where the row asks for raw log-probabilities; otherwise
    /// nothing, or empty ones.
    pub raw_mass: Option<MassHistogram>,
    /// The largest raw logits, as many as the row asks for; scores are logits.
    pub raw_top: TopList,
    /// The raw logits that were asked for.
    pub raw_logits: Vec<(u32, f32)>,
}

/// Samplers that summarize rows for a merge of shards; see [`PerturbedArgmax::scan`](crate::PerturbedArgmax::scan).
///
/// # Contract
/// The summaries of shards, [merged](RowSummary::merge) in any order, equal the summary of the whole vocabulary, whatever
/// the shards, threads or neighbours. Errors do not merge: each names the shard's own token and stage. Which masses a filter
/// has dropped may depend on the shards, so a row may take another number of passes to the same result. Logits and scores
/// equal those that [`sample`](crate::PerturbedArgmax::sample) draws from.
pub trait Scan {
    /// Makes one pass over this sampler's tokens. `requests` and `out` have one entry for each row; entries of skipped rows
    /// stay as they are. A row without filters gets [`RowError::NoFiniteLogit`] for a request that is only for filters.
    ///
    /// # Errors
    /// Those of [`sample`](crate::PerturbedArgmax::sample); [`SampleError::RowCount`] also for too few requests or entries.
    fn scan(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError>;
}

/// The checks of a scan that are the same for every implementer.
///
/// # Errors
/// See [`Scan::scan`].
pub fn check_scan(
    input: &Matrix<'_>,
    rows: &[RowParams<'_>],
    requests: &[Request<'_>],
    out: &[RowSummary],
    shape: &Shape,
    plan: &Plan,
) -> Result<(), SampleError> {
    check_call(input, rows, shape, plan)?;
    let params = requests.len().min(out.len());
    if params == rows.len() { Ok(()) } else { Err(SampleError::RowCount { rows: rows.len(), params }) }
}

/// The order of falling logits.
pub fn by_place(a: &Candidate, b: &Candidate) -> Ordering {
    if a.winner == b.winner {
        Ordering::Equal
    } else if a.place().reaches(&b.place()) {
        Ordering::Less
    } else {
        Ordering::Greater
    }
}

impl RowSummary {
    /// Empties it; keeps the memory.
    pub fn clear(&mut self) {
        self.error = None;
        self.stage = Stage::default();
        self.clear_sample();
        self.moments = Moments::default();
        self.used = 0;
        self.before.clear();
        if let Some(mass) = &mut self.raw_mass {
            mass.clear();
        }
        self.raw_top.reset(0, 0.0);
        self.raw_logits.clear();
    }

    /// Prepares it for a row of which overviews are merged.
    pub fn begin(&mut self, row: &Row<'_>) {
        self.clear();
        self.raw_top.reset(row.raw_logprobs.unwrap_or(0) as usize, 0.0);
        if row.raw_logprobs.is_some() {
            self.raw_mass.get_or_insert_default();
        }
        if let Some(filters) = &row.filters {
            self.moments = filters.moments();
            self.used = Wants::of(row, filters).frontiers;
            self.frontiers.resize_with(self.used.max(self.frontiers.len()), Frontier::default);
            self.frontiers_mut().iter_mut().for_each(Frontier::clear);
        }
    }

    /// One frontier a draw, as many as [`Wants::frontiers`].
    pub fn frontiers(&self) -> &[Frontier] {
        &self.frontiers[..self.used]
    }

    /// The frontiers, to be filled.
    pub fn frontiers_mut(&mut self) -> &mut [Frontier] {
        &mut self.frontiers[..self.used]
    }

    /// Gives the memory of a list back that has room for more than so many tokens.
    pub fn trim(&mut self, tokens: usize) {
        if self.list.capacity() > tokens {
            self.list = Vec::new();
        }
    }

    /// Adds the overview of other tokens, which has no error, for a row that wants `list` tokens: what a merge of shards,
    /// which reads lists and masses as they lie, is to come to.
    pub fn merge(&mut self, other: &RowSummary, list: usize) {
        self.list.extend_from_slice(&other.list);
        self.list.sort_by(by_place);
        self.list.truncate(list);
        self.mass.merge(&other.mass);
        self.merge_points(other);
    }

    /// Adds what the overview of other tokens says beside its list and its masses.
    pub fn merge_points(&mut self, other: &RowSummary) {
        self.moments.merge(&other.moments);
        self.frontiers_mut().iter_mut().zip(other.frontiers()).for_each(|(a, b)| a.merge(b));
        if let (Some(a), Some(b)) = (&mut self.raw_mass, &other.raw_mass) {
            a.merge(b);
        }
        self.raw_top.merge(&other.raw_top);
    }

    /// What a list of the row's first `limit` tokens lets see.
    pub fn seen(&self, limit: usize) -> Seen<'_> {
        Seen::first(&self.list, limit, &self.mass, &self.moments)
    }

    /// Summarizes the raw logits of tokens `first ..` in the plain way. Follows [`RowSummary::of`], which empties the summary.
    pub fn of_raw(&mut self, row: &Row<'_>, request: Request<'_>, first: u32, raw: &[f32]) {
        match request {
            Request::Overview if row.raw_logprobs.is_some() => {
                self.raw_mass.get_or_insert_default().extend_from_slice(raw);
                let finite = (first..).zip(raw).filter(|(_, l)| **l > f32::NEG_INFINITY);
                let listed = finite.map(|(token, &logit)| Candidate { winner: Winner::new(logit, token), logit });
                listed.for_each(|c| self.raw_top.push(c));
            }
            Request::RawLogits(tokens) => {
                let own = |token: &u32| token.checked_sub(first).and_then(|at| Some((*token, *raw.get(at as usize)?)));
                self.raw_logits.extend(tokens.iter().filter_map(own));
            }
            _ => {}
        }
    }

    /// The result of a row without filters over these tokens; log Z only where the row was sampled.
    ///
    /// # Errors
    /// The row's error; [`RowError::NoFiniteLogit`] where there are no draws.
    pub fn sample(&self) -> Result<RowSample<'_>, RowError> {
        self.error.map_or(Ok(()), Err)?;
        if self.draws.is_empty() {
            return Err(RowError::NoFiniteLogit);
        }
        let mass = Some(&self.mass).filter(|mass| !mass.is_empty());
        Ok(RowSample {
            draws: &self.draws,
            log_z: self.log_z,
            top: &self.list,
            raw_logits: &[],
            mass,
            kept: None,
            passes: 1,
        })
    }

    /// Removes the result of a row without filters.
    pub fn clear_sample(&mut self) {
        self.draws.clear();
        self.list.clear();
        self.mass.clear();
        self.log_z = None;
    }

    /// Takes over the result of a row without filters.
    pub fn set_sample(&mut self, sample: &RowSample<'_>) {
        self.clear_sample();
        self.draws.extend_from_slice(sample.draws);
        self.list.extend_from_slice(sample.top);
        self.log_z = sample.log_z;
        if let Some(mass) = sample.mass {
            self.mass.clone_from(mass);
        }
    }

    /// Summarizes the transformed logits of tokens `first ..` in the plain way: every fast path is judged against this.
    pub fn of(&mut self, row: &Row<'_>, request: Request<'_>, first: u32, logits: &[f32]) {
        self.begin(row);
        if matches!(request, Request::RawLogits(_)) {
            return;
        }
        let Some(filters) = &row.filters else {
            match request {
                Request::Overview => self.draw(row, first, logits),
                _ => self.error = Some(RowError::NoFiniteLogit),
            }
            return;
        };
        let wants = Wants::of(row, filters);
        let finite = || (first..).zip(logits.iter().copied()).filter(|(_, l)| *l > f32::NEG_INFINITY);
        let listed = |(token, logit)| Candidate { winner: Winner::new(logit, token), logit };
        match request {
            Request::Skip | Request::RawLogits(_) => {}
            Request::Overview => {
                self.list.extend(finite().map(listed));
                self.list.sort_by(by_place);
                self.list.truncate(wants.list);
                if wants.mass {
                    self.mass.extend_from_slice(logits);
                }
                if filters.need_moments() {
                    finite().for_each(|(_, logit)| self.moments.push(logit));
                }
                for (frontier, draw) in self.frontiers_mut().iter_mut().zip(row.first_draw..) {
                    for (token, logit) in finite() {
                        let score = logit * filters.rescale + row.noise.gumbel(Domain::Token, draw, token);
                        frontier.push(Candidate { winner: Winner::new(score, token), logit });
                    }
                }
            }
            Request::Before(doubts) => {
                self.before.extend(doubts.iter().map(|doubt| Before::new(doubt.place)));
                self.before.iter_mut().for_each(|before| before.extend_from_slice(first, logits));
            }
            Request::List { floor } => {
                self.list.extend(finite().filter(|(_, logit)| *logit >= floor).map(listed));
                self.list.sort_by(by_place);
            }
        }
    }
}

impl RowSummary {
    /// Draws for a row without filters.
    fn draw(&mut self, row: &Row<'_>, first: u32, logits: &[f32]) {
        let finite = || (first..).zip(logits.iter().copied()).filter(|(_, l)| *l > f32::NEG_INFINITY);
        let scored = |draw: u32| {
            finite().map(move |(token, logit)| {
                let score = if row.greedy { logit } else { logit + row.noise.gumbel(Domain::Token, draw, token) };
                Candidate { winner: Winner::new(score, token), logit }
            })
        };
        if finite().next().is_none() {
            return;
        }
        if row.without_replacement {
            let mut list = TopList::new(row.draws as usize, 0.0);
            scored(row.first_draw).for_each(|c| list.push(c));
            self.draws.extend(list.as_slice().iter().copied().map(Draw::from));
        } else {
            let draws = row.first_draw..row.first_draw + row.draws;
            self.draws.extend(draws.map(|draw| Draw::from(scored(draw).fold(Candidate::NONE, Candidate::merge))));
        }
        if let Some(most) = row.logprobs {
            self.mass.extend_from_slice(logits);
            self.list.extend(finite().map(|(token, logit)| Candidate { winner: Winner::new(logit, token), logit }));
            self.list.sort_by(by_place);
            self.list.truncate(most as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{Reference, Scheme};
    use crate::{Head, PerturbedArgmax};
    use proptest::prelude::*;

    const VOCAB: u32 = 90;

    proptest! {
        #[test]
        fn the_summaries_of_shards_merge_to_that_of_the_row(
            logits in prop::collection::vec(-9i8..9, VOCAB as usize),
            cuts in prop::collection::btree_set(0u32..VOCAB, 0..5),
            rotate in 0usize..6,
        ) {
            let logits: Vec<f32> = logits.into_iter().map(|l| f32::from(l) * 0.5).collect();
            let weight = vec![0.0f32; VOCAB as usize];
            let head = Head::new(Matrix::new(&weight, VOCAB as usize, 1).unwrap()).unwrap();
            let plan = Plan { max_draws: 3, max_logprobs: Some(3), ..Plan::default() };
            let can = Reference::new(head, plan, Scheme::Tiled).capabilities();
            let base = RowParams { seed: 4, draws: 3, ..RowParams::default() };
            for params in [
                RowParams { top_p: 0.7, ..base },
                RowParams { top_k: 5, logprobs: Some(3), ..base },
                RowParams { top_n_sigma: 1.0, min_p: 0.1, ..base },
            ] {
                let row = params.check(&[], &can, &plan, VOCAB).unwrap();
                let list = Wants::of(&row, row.filters.as_ref().unwrap()).list;
                let mut starts: Vec<u32> = [0].into_iter().chain(cuts.iter().copied()).chain([VOCAB]).collect();
                starts.dedup();
                let mut parts: Vec<_> = starts.windows(2).map(|w| w[0]..w[1]).collect();
                let n = rotate % parts.len();
                parts.rotate_left(n);
                let (mut whole, mut merged, mut part) = <(RowSummary, RowSummary, RowSummary)>::default();
                whole.of(&row, Request::Overview, 0, &logits);
                merged.begin(&row);
                for tokens in parts {
                    let own = &logits[tokens.start as usize..tokens.end as usize];
                    part.of(&row, Request::Overview, tokens.start, own);
                    merged.merge(&part, list);
                }
                prop_assert_eq!(&merged.list, &whole.list);
                prop_assert_eq!(&merged.mass, &whole.mass);
                prop_assert_eq!(merged.moments, whole.moments);
                prop_assert_eq!(merged.frontiers(), whole.frontiers());
            }
        }
    }
}
