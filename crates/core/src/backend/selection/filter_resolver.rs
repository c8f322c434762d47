//! Decides rows with filters from their summaries, and draws them.
//!
//! The first pass lists the largest logits, sums the masses and makes a [`Frontier`] per draw; [`Selector`] decides
//! most rows from these. An open row takes another pass. This pass sums the mass before the few frontier points in
//! doubt, or lists the row down to a floor, for a draw from the list.

use super::{PrefixMass, RowResult, RowView, Selection, Selector};
use crate::error::RowError;
use crate::noise::Domain;
use crate::noise::granule::{self, may_reach};
use crate::params::Row;
use crate::params::filters::{Filter, Filters};
use crate::summary::frontier::Frontier;
use crate::summary::winner::{Candidate, TopList, Winner};

/// The number of largest logits that a pass lists, and the largest top-k with a longer list.
const LIST: usize = 64;
const LONG_LIST: u32 = 1024;
/// The largest number of draws of a row with frontiers; rows with more draws are drawn from lists.
const FRONTIERS: u32 = 8;
/// Number of noise words computed at a time.
const SIDE_BY_SIDE: usize = 8;
/// The number of further passes that list a part of the row; the next pass lists the whole row.
const PARTIAL_PASSES: u32 = 2;

/// The pass that an undecided row needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FollowUp {
    /// The whole overview, for a row whose first pass skipped too many tokens.
    Overview,
    /// The mass before the points in doubt, and in bins the masses [below a floor](super::TailMass).
    PrefixMass,
    /// A list of every token with a logit of at least `floor`, of which there are at most `bound`.
    List {
        /// In nats.
        floor: f32,
        /// Tokens.
        bound: u64,
    },
}

/// The parts of the summary that a row with filters needs, except its moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SummarySpec {
    /// The number of largest logits in the list.
    pub list: usize,
    /// The number of draws with frontiers; 0 if the row is drawn from a list.
    pub frontiers: usize,
    /// Whether the masses are needed.
    pub mass: bool,
    /// Whether the only filter is top-p, and the row requests only draws. Then masses far below the limit need no bins,
    /// and the list may be shorter.
    pub prefix: bool,
}

impl SummarySpec {
    /// The parts that the first pass of a row needs.
    pub fn of(row: &Row<'_>, filters: &Filters) -> SummarySpec {
        let k = filters.smallest_k().filter(|&k| k <= LONG_LIST);
        let more = row.without_replacement || row.logprobs.is_some() || row.kept;
        let listed = k.is_some() || more || row.draws > FRONTIERS;
        let thresholds = filters.steps().iter().all(|f| matches!(f, Filter::MinP(_) | Filter::TopNSigma(_)));
        let list = match k {
            // The largest logit and the frontier decide.
            None if thresholds && !listed => 1,
            // Later filters read only these tokens.
            Some(k) if matches!(filters.steps().first(), Some(Filter::TopK(first)) if *first == k) => k as usize,
            k => LIST.max(k.unwrap_or(0) as usize).max(row.logprobs.unwrap_or(0) as usize),
        };
        let frontiers = if listed { 0 } else { row.draws as usize };
        let prefix = filters.only_top_p().is_some() && frontiers > 0;
        SummarySpec { list, frontiers, mass: filters.need_mass_beyond(list), prefix }
    }
}

/// A row with filters, to be decided.
#[derive(Clone, Copy, Debug)]
pub struct FilteredRow<'a> {
    /// The row.
    pub row: &'a Row<'a>,
    /// Its filters.
    pub filters: &'a Filters,
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// The passes so far.
    pub passes: u32,
}

/// Decides and draws rows with filters. Reuses its memory between calls.
#[derive(Clone, Debug, Default)]
pub struct FilterResolver {
    selector: Selector,
    list: TopList,
    /// The kept tokens of a row with their logits, by token.
    by_token: Vec<(u32, f32)>,
}

impl FilterResolver {
    /// Decides a row from its first summary, and from the mass before the points in doubt, if known. Returns the pass
    /// that an open row needs.
    pub fn resolve(
        &mut self,
        of: &FilteredRow<'_>,
        view: &RowView<'_>,
        frontiers: &[Frontier],
        doubts: &mut Vec<PrefixMass>,
        result: &mut RowResult,
    ) -> Option<FollowUp> {
        let FilteredRow { filters, .. } = *of;
        let selection = self.selector.select(filters, view);
        let from_list = frontiers.is_empty();
        if let (true, Selection::Listed(kept)) = (from_list, &selection) {
            self.draw(of, &view.list[kept.clone()], result);
            return None;
        }
        if !from_list {
            result.draws.clear();
            // None: frontier and list do not match, which only a damaged summary causes.
            let winner =
                |f| self.selector.winner_knowing(&selection, view, f, doubts).ok().filter(|c| !c.winner.is_none());
            let rescaled = |c: Candidate| Candidate { logit: c.logit * filters.rescale, ..c };
            result.draws.extend(frontiers.iter().map_while(winner).map(rescaled));
            if result.draws.len() == frontiers.len() {
                // Winners on a frontier belong to a run that begins with the row's first token.
                result.outcome = Some(filters.drawable(&view.list[..1]).map(drop));
                return None;
            }
            if let Selection::Listed(kept) = &selection {
                self.draw(of, &view.list[kept.clone()], result);
                return None;
            }
            if doubts.is_empty() {
                for frontier in frontiers {
                    self.selector.doubts(&selection, view, frontier, doubts);
                }
                if !doubts.is_empty() {
                    return Some(FollowUp::PrefixMass);
                }
            }
        }
        if view.tail.is_on() {
            return Some(FollowUp::PrefixMass);
        }
        Some(self.list_follow_up(&selection, view, of.passes))
    }

    /// Decides a row from a list of every token with a logit of at least the floor. Returns the pass that an open row
    /// needs.
    pub fn resolve_list(
        &mut self,
        of: &FilteredRow<'_>,
        view: &RowView<'_>,
        result: &mut RowResult,
    ) -> Option<FollowUp> {
        if view.list.is_empty() {
            return Some(FollowUp::List { floor: f32::NEG_INFINITY, bound: u64::MAX });
        }
        let selection = self.selector.select(of.filters, view);
        if let Selection::Listed(kept) = selection {
            self.draw(of, &view.list[kept], result);
            return None;
        }
        Some(self.list_follow_up(&selection, view, of.passes))
    }

    /// The list pass that an undecided row needs.
    fn list_follow_up(&self, selection: &Selection, view: &RowView<'_>, passes: u32) -> FollowUp {
        let floor = if passes <= PARTIAL_PASSES { self.selector.floor(selection, view) } else { f32::NEG_INFINITY };
        FollowUp::List { floor, bound: self.selector.max_count(floor) }
    }

    /// Draws from the kept tokens.
    fn draw(&mut self, of: &FilteredRow<'_>, kept: &[Candidate], result: &mut RowResult) {
        let FilteredRow { row, filters, vocab_size, .. } = *of;
        result.begin();
        let kept = match filters.drawable(kept) {
            Ok(kept) => kept,
            Err(error) => {
                result.outcome = Some(Err(error));
                return;
            }
        };
        if row.without_replacement {
            let available = kept.len() as u32;
            if available < row.draws {
                result.outcome = Some(Err(RowError::SupportTooSmall { draws: row.draws, available }));
                return;
            }
            self.list.reset(row.draws as usize, 0.0);
            for c in kept {
                let word = granule_word(row, row.first_draw, c);
                self.list.push(scored(row, row.first_draw, c, filters.rescale, word));
            }
            result.draws.extend_from_slice(self.list.as_slice());
        } else {
            let draws = row.first_draw..row.first_draw + row.draws;
            result.draws.extend(draws.map(|draw| winner(row, draw, kept, filters.rescale)));
        }
        (result.has_logprobs, result.has_kept) = (row.logprobs.is_some(), row.kept);
        if row.logprobs.is_some() || row.kept {
            let tokens = kept.iter().map(|c| (c.winner.token, c.logit * filters.rescale));
            result.keep(tokens, vocab_size, row.kept);
        }
        largest(kept, filters.rescale, row.logprobs.unwrap_or(0), &mut self.list);
        result.top.extend_from_slice(self.list.as_slice());
        if row.logprobs.is_some() {
            self.by_token.clear();
            if !row.logprob_token_ids.is_empty() {
                self.by_token.extend(kept.iter().map(|c| (c.winner.token, c.logit * filters.rescale)));
                self.by_token.sort_unstable_by_key(|(token, _)| *token);
            }
            let by_token = &self.by_token;
            result.token_logits.extend(row.logprob_token_ids.iter().map(|&token| {
                let own = by_token.binary_search_by_key(&token, |(own, _)| *own);
                (token, own.map_or(f32::NEG_INFINITY, |at| by_token[at].1))
            }));
            let ranked = result.draws.iter().take(if row.ranks { usize::MAX } else { 0 });
            result.ranks.extend(ranked.map(|c| rank_among(kept, filters.rescale, c)));
        }
        result.outcome = Some(Ok(()));
    }
}

/// The noise word of a token's granule.
fn granule_word(row: &Row<'_>, draw: u32, c: &Candidate) -> u32 {
    row.noise.word(Domain::Granule, draw, granule::of(c.winner.token))
}

/// A token with its score; `word` is the word of its granule.
fn scored(row: &Row<'_>, draw: u32, c: &Candidate, rescale: f32, word: u32) -> Candidate {
    let (token, logit) = (c.winner.token, c.logit * rescale);
    let granule = row.noise.granule(Domain::Token, draw, token, word);
    let noise = row.noise.gumbel_in(&granule, Domain::Token, draw, token);
    Candidate { winner: Winner::new(logit + noise, token), logit }
}

/// Lists the `most` largest of kept tokens, which are sorted by descending logits, with logits times `rescale`.
/// Distinct logits may become equal by a temperature after the filters; then the lower token comes first.
pub fn largest(kept: &[Candidate], rescale: f32, most: u32, list: &mut TopList) {
    list.reset(most as usize, 0.0);
    for c in kept {
        let logit = c.logit * rescale;
        if logit < list.threshold() {
            break;
        }
        list.push(Candidate { winner: Winner::new(logit, c.winner.token), logit });
    }
}

/// The rank of a kept token among kept tokens, which are sorted by descending logits, with logits times `rescale`.
fn rank_among(kept: &[Candidate], rescale: f32, of: &Candidate) -> u32 {
    let before = kept.partition_point(|c| c.logit * rescale > of.logit);
    let equal = kept[before..].iter().take_while(|c| c.logit * rescale == of.logit);
    1 + (before + equal.filter(|c| c.winner.token < of.winner.token).count()) as u32
}

/// The winner of a draw among kept tokens, with scores from logits times `rescale`:
///
/// ```text
/// best = none;  for c in kept { best = best.merge(scored(c)) }
/// ```
///
/// 1. The loop computes the words of several granules at a time, to hide their latency.
/// 2. If the granule's word shows that a token [cannot](may_reach) reach the best score so far, the token needs neither
///    its own word nor logarithms: 8 ns instead of 70 ns (a virtual EPYC). The bound has a margin for the rounding of
///    the sum, so a skipped token scores strictly below the best score.
pub fn winner(row: &Row<'_>, draw: u32, kept: &[Candidate], rescale: f32) -> Candidate {
    let mut best = Candidate::NONE;
    for part in kept.chunks(SIDE_BY_SIDE) {
        let mut words = [0; SIDE_BY_SIDE];
        for (word, c) in words.iter_mut().zip(part) {
            *word = granule_word(row, draw, c);
        }
        for (&word, c) in words.iter().zip(part) {
            let score = f64::from(best.winner.score);
            let least = score - f64::from(c.logit * rescale) - (score.abs() / 4_194_304.0 + 1e-6);
            if may_reach(word, least) {
                best = best.merge(scored(row, draw, c, rescale, word));
            }
        }
    }
    best
}
