//! Decides rows with filters after a pass over the whole vocabulary, on all threads.
//!
//! Most rows are decided by what the pass left. Where a row with top-p has places in doubt, the logits that the threads cached
//! above its cutoff (`logit_cache.rs`) may tell the mass before them. What remains is left to the driver.

use crate::scan::engine::{Engine, Rows};
use crate::scan::filter_state::FilterState;
use crate::scan::logit_cache::{CachedRow, LogitCache};
use crate::scan::row_state::RowState;
use crate::scan::tile::{Planned, Worker};
use flash_sampling_core::RowError;
use flash_sampling_core::backend::selection::{FilterResolver, FilteredRow, FollowUp, PrefixMass, RowView};
use flash_sampling_core::summary::winner::LogitRank;
use rayon::prelude::*;

/// Points in doubt that kept logits are asked about, of one row: each is a scan of all that is kept of it by one thread,
/// and a pass, by all threads, sums before all points at once. A draw has one as a rule, so rows with more have many draws.
const DOUBTS: usize = 8;

/// Answers a row from what it has, or notes what it needs.
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

/// Takes what is told of every point in doubt; false, and nothing taken, where one is not told, or there are none or too many.
fn take_told(doubts: &mut [PrefixMass], told: impl Fn(LogitRank) -> Option<PrefixMass>) -> bool {
    let mut known = (1..=DOUBTS).contains(&doubts.len());
    known = known && doubts.iter_mut().all(|doubt| told(doubt.rank).map(|told| *doubt = told).is_some());
    if !known {
        doubts.iter_mut().for_each(|doubt| *doubt = PrefixMass::new(doubt.rank));
    }
    known
}

/// Answers a row that was not decided for points in doubt, where the logits that the workers kept tell the mass before them:
/// `own` are those of the worker whose `state` has what all have seen.
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
    if take_told(doubts, |rank| LogitCache::before(workers.clone(), rank, floor)) {
        decide_row(resolver, row, state, vocab_size);
    }
}

impl Engine {
    /// Gathers what a pass left in the first worker, and decides the rows with filters whose tokens are the whole vocabulary,
    /// or notes what they need; where threads share that, each does both for some rows: to wake them twice took longer.
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
            let each = rows.len().div_ceil(self.resolver.len());
            let parts = states.par_chunks_mut(each).zip(rows.par_chunks(each)).zip(&mut self.resolver);
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
            let resolver = &mut self.resolver[0];
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
    fn a_few_points_in_doubt_are_told_of_and_all_or_none_are_taken() {
        for (count, unknown) in [(0, 9), (1, 9), (DOUBTS, 9), (DOUBTS, 3), (DOUBTS + 1, 99), (1000, 9999)] {
            let points = (0..count).map(|i| LogitRank { logit: i as f32, token: i as u32 });
            let mut doubts: Vec<PrefixMass> = points.clone().map(PrefixMass::new).collect();
            let told = |rank: LogitRank| (rank.token != unknown).then(|| PrefixMass::with_mass(rank, 7));
            let taken = take_told(&mut doubts, told);
            assert_eq!(taken, (1..=DOUBTS).contains(&count) && count as u32 <= unknown, "{count} {unknown}");
            let want = |rank| if taken { PrefixMass::with_mass(rank, 7) } else { PrefixMass::new(rank) };
            assert!(doubts.into_iter().eq(points.map(want)), "{count} {unknown}");
        }
    }
}
