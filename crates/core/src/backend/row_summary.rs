//! The summary of a row over some of its tokens, and the merge of such summaries.

use crate::backend::Request;
use crate::backend::selection::{
    FilterResolver, FilteredRow, FollowUp, PrefixMass, RowResult, RowView, SummarySpec, TailMass,
};
use crate::error::{RowError, StagedError};
use crate::params::Row;
use crate::sampler::samples::Samples;
use crate::summary::frontier::Frontier;
use crate::summary::mass_histogram::MassHistogram;
use crate::summary::moments::Moments;
use crate::summary::winner::{Candidate, TopList, Winner};
use core::cmp::{Ordering, Reverse};

/// The state of a row after a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Progress {
    /// The row is summarized.
    #[default]
    Summarized,
    /// The row, which has filters, is decided: [`RowSummary::result`] has the result. Only for [`Request::Decide`].
    Decided,
    /// The pass skipped too many tokens to decide or summarize the row: it needs a [`Request::Overview`]. Only for
    /// [`Request::Decide`].
    Open,
}

/// The summary of a row over some of its tokens. A reused summary keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct RowSummary {
    /// The state of the row. Unless the row is summarized, all fields after `error` are unspecified.
    pub progress: Progress,
    /// The passes over the row's logits that the scan made; 0 counts as 1.
    pub passes: u32,
    /// Whether the pass read the whole weight for this row, although the scan has a shadow of the weight. A scan that
    /// knows only the number of such rows marks any rows.
    pub is_fallback: bool,
    /// The result of a decided row.
    pub result: RowResult,
    /// The row's first bad logit; all other fields are then unspecified. A row without a finite logit has no error, but
    /// no draws and an empty list: other shards may have finite logits.
    pub error: Option<StagedError>,
    /// The draws of a row without filters, in order. Draws without replacement are sorted by descending scores, and are
    /// at most as many as the finite logits.
    pub draws: Vec<Candidate>,
    /// The first tokens by descending logits, then ascending tokens. Scores are logits.
    ///
    /// The length is [`SummarySpec::list`], or the row's number of log-probabilities. For [`Request::List`], the list
    /// has all tokens down to the requested logit.
    pub list: Vec<Candidate>,
    /// The masses, if [`SummarySpec::mass`] is set or the row requests log-probabilities. Tokens that a filter drops
    /// may be missing.
    pub mass: MassHistogram,
    /// The mass that is in no bin. Only for [`Request::Decide`].
    pub tail: TailMass,
    /// The length of the list, if it is shorter than requested. Only for [`Request::Decide`].
    pub listed: Option<usize>,
    /// `ln sum e^l` in nats, for a row that was [sampled](RowSummary::set_sample) with log-probabilities. For
    /// [`Request::Decide`] a scan may set it instead of `mass`, to the bits of [`MassHistogram::log_z`].
    pub log_mass: Option<f64>,
    /// The moments, if the filters [need](crate::backend::Filters::need_moments) them.
    pub moments: Moments,
    /// The first `used` frontiers belong to the row.
    frontiers: Vec<Frontier>,
    used: usize,
    /// The requested masses before points.
    pub prefix_masses: Vec<PrefixMass>,
    /// The masses of the raw logits, masked tokens included, if the row requests raw log-probabilities; otherwise none,
    /// or an empty histogram.
    pub raw_mass: Option<MassHistogram>,
    /// The largest raw logits, as many as the row requests; scores are logits.
    pub raw_top: TopList,
    /// The requested logits of tokens.
    pub logits: Vec<(u32, f32)>,
    /// The requested numbers of tokens before ranks.
    pub prefix_counts: Vec<u32>,
    /// The concatenated lists of merged summaries; [`RowSummary::merge_lists`] makes one list of them.
    parts: Vec<Candidate>,
    /// The end of each list in `parts`.
    ends: Vec<usize>,
    /// For each list in `parts`: the key of its next token, the index of that token, and the end of the list.
    heads: Vec<(u64, usize, usize)>,
}

/// An integer that falls in the order of descending logits. Both zeros have one key.
fn rank_key(c: &Candidate) -> u64 {
    Winner::new(c.logit + 0.0, c.winner.token).to_ordered_bits()
}

/// The order of descending logits.
pub fn by_logit_rank(a: &Candidate, b: &Candidate) -> Ordering {
    rank_key(b).cmp(&rank_key(a))
}

impl RowSummary {
    /// Empties the summary, and keeps its memory.
    pub fn clear(&mut self) {
        (self.progress, self.passes, self.is_fallback) = (Progress::Summarized, 1, false);
        (self.tail, self.listed) = (TailMass::default(), None);
        self.error = None;
        self.clear_sample();
        self.parts.clear();
        self.ends.clear();
        self.moments = Moments::default();
        self.used = 0;
        self.prefix_masses.clear();
        if let Some(mass) = &mut self.raw_mass {
            mass.clear();
        }
        self.raw_top.reset(0, 0.0);
        self.logits.clear();
        self.prefix_counts.clear();
    }

    /// Empties the summary, and prepares it to merge the overviews of a row.
    pub fn begin(&mut self, row: &Row<'_>) {
        self.clear();
        self.raw_top.reset(row.raw_logprobs.unwrap_or(0) as usize, 0.0);
        if row.raw_logprobs.is_some() {
            self.raw_mass.get_or_insert_default();
        }
        if let Some(filters) = &row.filters {
            self.moments = filters.moments();
            self.used = SummarySpec::of(row, filters).frontiers;
            self.frontiers.resize_with(self.used.max(self.frontiers.len()), Frontier::default);
            self.frontiers_mut().iter_mut().for_each(Frontier::clear);
        }
    }

    /// One frontier per draw, as many as [`SummarySpec::frontiers`].
    pub fn frontiers(&self) -> &[Frontier] {
        &self.frontiers[..self.used]
    }

    /// The frontiers, to be filled.
    pub fn frontiers_mut(&mut self) -> &mut [Frontier] {
        &mut self.frontiers[..self.used]
    }

    /// Frees the memory of each list that has room for more than `tokens`.
    pub fn trim(&mut self, tokens: usize) {
        for list in [&mut self.list, &mut self.parts] {
            if list.capacity() > tokens {
                *list = Vec::new();
            }
        }
    }

    /// Adds the summary of other tokens, from the same request for the same row. The order of merges does not matter.
    ///
    /// [`RowSummary::merge_lists`] merges the lists, after the last call.
    pub fn merge(&mut self, row: &Row<'_>, request: &Request<'_>, other: &RowSummary) {
        self.error = StagedError::first(self.error, other.error);
        self.is_fallback |= other.is_fallback;
        if other.error.is_some() {
            return;
        }
        match request {
            Request::Overview | Request::Decide => {
                self.merge_draws(row, &other.draws);
                self.merge_masses(row, other);
            }
            Request::PrefixMass { .. } if self.prefix_masses.is_empty() => {
                self.prefix_masses.extend_from_slice(&other.prefix_masses)
            }
            Request::PrefixMass { .. } => {
                self.prefix_masses.iter_mut().zip(&other.prefix_masses).for_each(|(a, b)| a.merge(b))
            }
            Request::List { .. } => self.copy_list(&other.list),
            Request::Logits { .. } => self.logits.extend_from_slice(&other.logits),
            Request::PrefixCount { ranks, .. } => {
                self.prefix_counts.resize(ranks.len(), 0);
                self.prefix_counts.iter_mut().zip(&other.prefix_counts).for_each(|(a, b)| *a += b);
            }
            Request::Skip => {}
        }
    }

    /// Adds the draws of other tokens: the best score wins, ties to the lower token (paper Lemma D.5).
    fn merge_draws(&mut self, row: &Row<'_>, other: &[Candidate]) {
        let draws = &mut self.draws;
        if row.without_replacement {
            draws.extend_from_slice(other);
            draws.sort_unstable_by_key(|c| Reverse(c.winner.to_ordered_bits()));
            draws.truncate(row.draws as usize);
        } else if draws.is_empty() {
            draws.extend_from_slice(other);
        } else {
            draws.iter_mut().zip(other).for_each(|(a, &b)| *a = a.merge(b));
        }
    }

    /// Adds the overview of other tokens, except its draws.
    pub fn merge_masses(&mut self, row: &Row<'_>, other: &RowSummary) {
        if row.filters.is_some() || row.logprobs.is_some() {
            self.copy_list(&other.list);
        }
        self.mass.merge(&other.mass);
        self.moments.merge(&other.moments);
        self.frontiers_mut().iter_mut().zip(other.frontiers()).for_each(|(a, b)| a.merge(b));
        if let (Some(a), Some(b)) = (&mut self.raw_mass, &other.raw_mass) {
            a.merge(b);
        }
        self.raw_top.merge(&other.raw_top);
    }

    fn copy_list(&mut self, list: &[Candidate]) {
        self.parts.extend_from_slice(list);
        self.ends.push(self.parts.len());
    }

    /// Adds a list of other tokens, to be [merged](RowSummary::merge_lists); returns its first token.
    ///
    /// # Errors
    /// The first error of the list.
    pub fn add_list<E>(&mut self, list: impl Iterator<Item = Result<Candidate, E>>) -> Result<Option<Candidate>, E> {
        let begin = self.parts.len();
        for c in list {
            self.parts.push(c?);
        }
        self.ends.push(self.parts.len());
        Ok(self.parts.get(begin).copied())
    }

    /// Sets the list to the first `limit` tokens of all added lists. Without added lists it changes nothing. A later
    /// call may have a larger limit.
    pub fn merge_lists(&mut self, limit: usize) {
        let RowSummary { list, parts, ends, heads, .. } = self;
        if ends.is_empty() {
            return;
        }
        let head = |at: usize, end: usize| (if at < end { rank_key(&parts[at]) } else { 0 }, at, end);
        if limit >= parts.len() {
            // All tokens: one sort, and no second list.
            core::mem::swap(list, parts);
            list.sort_unstable_by(by_logit_rank);
            ends.clear();
            return;
        }
        list.clear();
        heads.clear();
        heads.extend(ends.iter().scan(0, |begin, &end| Some(head(core::mem::replace(begin, end), end))));
        while list.len() < limit {
            let Some(best) = heads.iter_mut().max_by_key(|head| head.0) else { break };
            if best.0 == 0 {
                break;
            }
            list.push(parts[best.1]);
            *best = head(best.1 + 1, best.2);
        }
    }

    /// Decides a row with filters from its overview, and from the mass before its points in doubt, if known. Returns
    /// the pass that an open row needs.
    pub(crate) fn decide(
        &mut self,
        resolver: &mut FilterResolver,
        of: &FilteredRow<'_>,
        doubts: &mut Vec<PrefixMass>,
    ) -> Option<FollowUp> {
        let spec = SummarySpec::of(of.row, of.filters);
        if spec.prefix && !self.ends.is_empty() && doubts.is_empty() {
            // Most rows with top-p alone are decided by their masses and frontiers.
            self.merge_lists(1);
            self.decide_from(resolver, of, 1, doubts)?;
            doubts.clear();
        }
        self.merge_lists(spec.list);
        self.decide_from(resolver, of, self.listed.unwrap_or(spec.list), doubts)
    }

    fn decide_from(
        &mut self,
        resolver: &mut FilterResolver,
        of: &FilteredRow<'_>,
        limit: usize,
        doubts: &mut Vec<PrefixMass>,
    ) -> Option<FollowUp> {
        self.result.begin();
        if self.list.is_empty() {
            self.result.outcome = Some(Err(RowError::NoFiniteLogit));
            return None;
        }
        let RowSummary { list, mass, tail, moments, frontiers, used, result, .. } = self;
        let view = RowView { tail: *tail, ..RowView::first(list, limit, mass, moments) };
        resolver.resolve(of, &view, &frontiers[..*used], doubts, result)
    }

    /// Removes the result of a row without filters.
    pub(super) fn clear_sample(&mut self) {
        self.draws.clear();
        self.list.clear();
        self.mass.clear();
        self.log_mass = None;
    }

    /// Copies the result of a row without filters.
    ///
    /// # Errors
    /// The reason why the row has no draw.
    pub fn set_sample(&mut self, samples: &Samples, row: usize) -> Result<(), RowError> {
        self.clear_sample();
        let sample = samples.row(row)?;
        let candidate = |d: &crate::Draw| Candidate { winner: Winner::new(d.score, d.token), logit: d.logit };
        self.draws.extend(sample.draws.iter().map(candidate));
        let listed = |&(token, logit): &(u32, f32)| Candidate { winner: Winner::new(logit, token), logit };
        self.list.extend(sample.top.iter().map(listed));
        self.log_mass = sample.log_z;
        if let Some(mass) = samples.mass(row) {
            self.mass.clone_from(mass);
        }
        Ok(())
    }

    /// Refuses a request that is only for rows with filters.
    pub fn refuse(&mut self) {
        self.error = Some(StagedError { stage: crate::error::Stage::Transformed, error: RowError::NoFiniteLogit });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{Reference, ReferenceVariant};
    use crate::{Head, Matrix, PerturbedArgmax, Plan, RowParams};
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
            let can = Reference::new(head, plan, ReferenceVariant::Tiled).capabilities();
            let base = RowParams { seed: 4, draws: 3, ..RowParams::default() };
            for params in [
                RowParams { top_p: 0.7, ..base },
                RowParams { top_k: 5, logprobs: Some(3), ..base },
                RowParams { top_n_sigma: 1.0, min_p: 0.1, ..base },
                RowParams { logprobs: Some(3), ..base },
                RowParams { without_replacement: true, draws: 3, ..base },
            ] {
                let row = params.check(&[], &can, &plan, VOCAB).unwrap();
                let limit = |filters| SummarySpec::of(&row, &filters).list;
                let list = row.filters.map_or(row.logprobs.unwrap_or(0) as usize, limit);
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
                    merged.merge(&row, &Request::Overview, &part);
                }
                merged.merge_lists(list);
                prop_assert_eq!((&merged.draws, &merged.list), (&whole.draws, &whole.list));
                prop_assert_eq!(&merged.mass, &whole.mass);
                prop_assert_eq!(merged.moments, whole.moments);
                prop_assert_eq!(merged.frontiers(), whole.frontiers());
            }
        }
    }
}
