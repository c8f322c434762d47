//! Decides rows with filters after a pass over the whole vocabulary, on all threads.
//!
//! The summary of the pass decides most rows. For a row with top-p and points in doubt, the logits that the threads
//! cached above the cutoff may give the mass before the points (`logit_cache.rs`). The driver decides all other rows.

use crate::scan::engine::{Engine, Rows};
use crate::scan::filter_state::FilterState;
use crate::scan::logit_cache::{CachedRow, LogitCache};
use crate::scan::row_state::RowState;
use crate::scan::tile::{Planned, Worker};
use flash_sampling_core::RowError;
use flash_sampling_core::backend::LogitRank;
use flash_sampling_core::backend::selection::{FilterResolver, FilteredRow, FollowUp, PrefixMass, RowView};
use rayon::prelude::*;

/// The maximum number of points in doubt of a row that cached logits decide. Each point takes a scan of the row's
/// cached logits by one thread. A pass sums for all points on all threads. Most draws have one point in doubt.
const DOUBTS: usize = 8;

/// Decides a row from its state, or sets its follow-up.
fn decide_row(
    resolver: &mut FilterResolver,
    row: &Result<Planned<'_>, RowError>,
    state: &mut RowState,
    vocab_size: u32,
) {
    state.filter.follow_up = None;
    let Ok(Planned { row, is_whole: true, .. }) = row else { return };
    if let (Some(filters), true, None) = (&row.filters, state.has_finite, state.invalid) {
        let RowState { filter, mass, .. } = state;
        filter.largest.finish();
        let FilterState { largest, moments, doubts, result, frontiers, used, floor, .. } = filter;
        let mass = mass.as_ref().expect("a row with filters has masses");
        if floor.is_too_high(mass) {
            filter.missed = true;
            filter.follow_up = Some(FollowUp::Overview);
            return;
        }
        let view = RowView { tail: floor.tail, ..RowView::first(largest.as_slice(), largest.limit(), mass, moments) };
        let of = FilteredRow { row, filters, vocab_size, passes: 1 };
        filter.follow_up = resolver.resolve(&of, &view, &frontiers[..*used], doubts, result);
    }
}

/// Sets the mass before every point in doubt from `lookup`. Returns false and changes nothing if a mass is unknown, or
/// if there are no points or too many.
fn set_doubts(doubts: &mut [PrefixMass], lookup: impl Fn(LogitRank) -> Option<PrefixMass>) -> bool {
    let mut known = (1..=DOUBTS).contains(&doubts.len());
    known = known && doubts.iter_mut().all(|doubt| lookup(doubt.rank).map(|known| *doubt = known).is_some());
    if !known {
        doubts.iter_mut().for_each(|doubt| *doubt = PrefixMass::new(doubt.rank));
    }
    known
}

/// Decides a row with points in doubt, if cached logits give the mass before them. `own`: the cache of the merged
/// `state`.
fn look_up<'a>(
    resolver: &mut FilterResolver,
    row: &Result<Planned<'_>, RowError>,
    state: &mut RowState,
    own: &'a LogitCache,
    others: impl Iterator<Item = (&'a LogitCache, CachedRow)> + Clone,
    vocab_size: u32,
) {
    let FilterState { follow_up, missed, doubts, run, floor, .. } = &mut state.filter;
    if *follow_up != Some(FollowUp::PrefixMass) || *missed {
        return;
    }
    let (floor, run) = (floor.tail.floor(), *run);
    let workers = others.chain(core::iter::once((own, run)));
    if set_doubts(doubts, |rank| LogitCache::prefix_mass(workers.clone(), rank, floor)) {
        decide_row(resolver, row, state, vocab_size);
    }
}

impl Engine {
    /// Merges the states of a pass into the first worker's, and decides rows with filters if their tokens are the whole
    /// vocabulary.
    ///
    /// With several threads, each thread does both for some rows: waking the threads twice took longer.
    pub(crate) fn gather_and_decide(&mut self, rows: &Rows<'_>, vocab_size: u32) {
        let shared = self.shares_rows(rows);
        if !shared {
            self.gather(rows);
        }
        let Some((first, others)) = self.workers.split_first_mut() else { return };
        let Worker { rows: states, above, .. } = first;
        let (states, above, others) = (&mut states[..rows.len()], &*above, &*others);
        let kept = |r: usize| others.iter().map(move |other| (&other.above, other.rows[r].filter.run));
        if shared {
            let each = rows.len().div_ceil(self.resolvers.len());
            let parts = states.par_chunks_mut(each).zip(rows.par_chunks(each)).zip(&mut self.resolvers);
            self.threads.install(|| {
                parts.enumerate().for_each(|(part, ((states, rows), resolver))| {
                    for (i, (state, row)) in states.iter_mut().zip(rows).enumerate() {
                        if row.is_ok() {
                            others.iter().for_each(|other| state.merge(&other.rows[part * each + i]));
                        }
                        decide_row(resolver, row, state, vocab_size);
                        look_up(resolver, row, state, above, kept(part * each + i), vocab_size);
                    }
                });
            });
        } else {
            let resolver = &mut self.resolvers[0];
            for (r, (state, row)) in states.iter_mut().zip(rows).enumerate() {
                decide_row(resolver, row, state, vocab_size);
                look_up(resolver, row, state, above, kept(r), vocab_size);
            }
        }
        if rows.iter().flatten().any(|planned| planned.is_whole) {
            self.known.note(states.iter().any(|state| state.filter.missed));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_points_in_doubt_are_set_all_or_none() {
        for (count, unknown) in [(0, 9), (1, 9), (DOUBTS, 9), (DOUBTS, 3), (DOUBTS + 1, 99), (1000, 9999)] {
            let points = (0..count).map(|i| LogitRank { logit: i as f32, token: i as u32 });
            let mut doubts: Vec<PrefixMass> = points.clone().map(PrefixMass::new).collect();
            let lookup = |rank: LogitRank| (rank.token != unknown).then(|| PrefixMass::with_mass(rank, 7));
            let is_set = set_doubts(&mut doubts, lookup);
            assert_eq!(is_set, (1..=DOUBTS).contains(&count) && count as u32 <= unknown, "{count} {unknown}");
            let want = |rank| if is_set { PrefixMass::with_mass(rank, 7) } else { PrefixMass::new(rank) };
            assert!(doubts.into_iter().eq(points.map(want)), "{count} {unknown}");
        }
    }
}
