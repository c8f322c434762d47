//! What a shard of the vocabulary tells of rows with filters.
//!
//! Which tokens a filter keeps depends on the whole row, so a shard cannot draw for such a row alone. It makes the passes
//! of [`selection`](crate::selection) over its own tokens and hands over what they leave: first tokens, integer masses and
//! moments, frontiers. All of these merge in any order, so the merged survey of shards is the survey of the row, to the
//! last bit, and what [`Filtering`](crate::selection::Filtering) decides from it is what a sampler without shards decides.

use crate::error::{RowError, SampleError};
use crate::frontier::Frontier;
use crate::mass_histogram::MassHistogram;
use crate::matrix::Matrix;
use crate::moments::Moments;
use crate::noise::Domain;
use crate::params::{Row, RowParams};
use crate::sampler::{Plan, Shape, check_call};
use crate::selection::{Before, Seen, Wants};
use crate::winner::{Candidate, TopList, Winner};
use core::cmp::Ordering;

/// What a pass is to tell of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Inquiry<'a> {
    /// Nothing: the row is another's.
    Nothing,
    /// What the first pass keeps: what [`Wants`] says, and raw masses where the row asks for raw log-probabilities; of a
    /// row without filters these alone.
    Overview,
    /// The mass before these places; what they have seen so far does not count.
    Before(&'a [Before]),
    /// Every token with a logit of at least `floor`.
    List {
        /// In nats; -inf: every token.
        floor: f32,
    },
    /// The raw logits of those of these tokens that are the sampler's own, in their order.
    RawLogits(&'a [u32]),
}

/// What passes tell of a row, over some of its tokens. Reusing one keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct RowSurvey {
    /// Why the row cannot be drawn: invalid parameters, or its lowest token with a NaN or +inf. The rest is unspecified
    /// then. `NoFiniteLogit` is no error here but an empty list: other shards may have one.
    pub error: Option<RowError>,
    /// The first tokens by falling logits, then rising tokens: as many as [`Wants::list`], or all from a floor on. Scores
    /// are logits.
    pub list: Vec<Candidate>,
    /// The masses, where [`Wants::mass`]; what a filter has given up may be missing.
    pub mass: MassHistogram,
    /// The moments, where filters [need](crate::Filters::need_moments) them.
    pub moments: Moments,
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

/// Samplers that can survey rows for a merge of shards; see [`PerturbedArgmax::survey`].
///
/// # Contract
/// The surveys of shards, [merged](RowSurvey::merge) in any order, say of a row what one survey of the whole vocabulary
/// says, whatever the shards, threads or neighbours. Errors do not merge: each names the shard's own, which does not say
/// whether a raw logit was bad, and that counts first. Which masses a filter has given up may depend on the shards, so a row
/// may take another number of passes to the same result. Logits and scores are those that
/// [`sample`](crate::PerturbedArgmax::sample) draws from.
///
/// [`PerturbedArgmax::survey`]: crate::PerturbedArgmax::survey
pub trait Survey {
    /// One pass over this sampler's tokens for the rows that an inquiry is made about; `inquiries` and `out` have one
    /// entry for each row. Entries of other rows are left as they are. A row about which an inquiry means nothing gets
    /// [`RowError::NoFiniteLogit`] as its error.
    ///
    /// # Errors
    /// Those of [`sample`](crate::PerturbedArgmax::sample); [`SampleError::RowCount`] also for too few inquiries or entries.
    fn survey(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        inquiries: &[Inquiry<'_>],
        out: &mut [RowSurvey],
    ) -> Result<(), SampleError>;
}

/// The checks of a survey that are the same for every implementer.
///
/// # Errors
/// See [`Survey::survey`].
pub fn check_survey(
    input: &Matrix<'_>,
    rows: &[RowParams<'_>],
    inquiries: &[Inquiry<'_>],
    out: &[RowSurvey],
    shape: &Shape,
    plan: &Plan,
) -> Result<(), SampleError> {
    check_call(input, rows, shape, plan)?;
    let params = inquiries.len().min(out.len());
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

impl RowSurvey {
    /// Empties it; keeps the memory.
    pub fn clear(&mut self) {
        self.error = None;
        self.list.clear();
        self.mass.clear();
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
    pub fn merge(&mut self, other: &RowSurvey, list: usize) {
        self.list.extend_from_slice(&other.list);
        self.list.sort_by(by_place);
        self.list.truncate(list);
        self.mass.merge(&other.mass);
        self.merge_points(other);
    }

    /// Adds what the overview of other tokens says beside its list and its masses.
    pub fn merge_points(&mut self, other: &RowSurvey) {
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

    /// The plain survey of raw logits, those of tokens `first ..`, for an overview or [`Inquiry::RawLogits`]; after
    /// [`RowSurvey::of`], which empties it.
    pub fn of_raw(&mut self, row: &Row<'_>, inquiry: Inquiry<'_>, first: u32, raw: &[f32]) {
        match inquiry {
            Inquiry::Overview if row.raw_logprobs.is_some() => {
                self.raw_mass.get_or_insert_default().extend_from_slice(raw);
                let finite = (first..).zip(raw).filter(|(_, l)| **l > f32::NEG_INFINITY);
                let listed = finite.map(|(token, &logit)| Candidate { winner: Winner::new(logit, token), logit });
                listed.for_each(|c| self.raw_top.push(c));
            }
            Inquiry::RawLogits(tokens) => {
                let own = |token: &u32| token.checked_sub(first).and_then(|at| Some((*token, *raw.get(at as usize)?)));
                self.raw_logits.extend(tokens.iter().filter_map(own));
            }
            _ => {}
        }
    }

    /// The plain survey of transformed logits, those of tokens `first ..`: what every fast path is judged against.
    pub fn of(&mut self, row: &Row<'_>, inquiry: Inquiry<'_>, first: u32, logits: &[f32]) {
        self.begin(row);
        if row.raw_logprobs.is_some() && row.filters.is_none() || matches!(inquiry, Inquiry::RawLogits(_)) {
            return;
        }
        let Some(filters) = &row.filters else {
            self.error = Some(RowError::NoFiniteLogit);
            return;
        };
        let wants = Wants::of(row, filters);
        let finite = || (first..).zip(logits.iter().copied()).filter(|(_, l)| *l > f32::NEG_INFINITY);
        let listed = |(token, logit)| Candidate { winner: Winner::new(logit, token), logit };
        match inquiry {
            Inquiry::Nothing | Inquiry::RawLogits(_) => {}
            Inquiry::Overview => {
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
            Inquiry::Before(doubts) => {
                self.before.extend(doubts.iter().map(|doubt| Before::new(doubt.place)));
                self.before.iter_mut().for_each(|before| before.extend_from_slice(first, logits));
            }
            Inquiry::List { floor } => {
                self.list.extend(finite().filter(|(_, logit)| *logit >= floor).map(listed));
                self.list.sort_by(by_place);
            }
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
        fn the_surveys_of_shards_merge_to_that_of_the_row(
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
                let (mut whole, mut merged, mut part) = <(RowSurvey, RowSurvey, RowSurvey)>::default();
                whole.of(&row, Inquiry::Overview, 0, &logits);
                merged.begin(&row);
                for tokens in parts {
                    let own = &logits[tokens.start as usize..tokens.end as usize];
                    part.of(&row, Inquiry::Overview, tokens.start, own);
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
