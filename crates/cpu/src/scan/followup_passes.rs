//! Further passes, for rows with filters that the first pass did not decide, and for them alone.
//!
//! A row whose floor (`mass_cutoff.rs`) was too high does its first pass again, without one. A pass that sums the mass before
//! points in doubt keeps a number a point. A pass that lists rows keeps every token from a floor on, so it takes only as
//! many rows as have room: the masses bound how many tokens that is.

use crate::scan::engine::{Engine, Rows};
use crate::scan::filter_state::{FilterState, PassKind};
use crate::scan::logit_cache::{CachedRow, LogitCache};
use crate::scan::row_state::RowState;
use crate::scan::tile::{Planned, Source, Worker};
use core::ops::Range;
use flash_sampling_core::scan::by_place;
use flash_sampling_core::selection::{Before, Below, Filtered, Filtering, LIST_BYTES, Need, Seen, next_pass};
use flash_sampling_core::winner::Place;
use flash_sampling_core::{Candidate, RowError};
use rayon::prelude::*;

/// Points in doubt that kept logits are asked about, of one row: each is a scan of all that is kept of it by one thread,
/// and a pass, by all threads, sums before all points at once. A draw has one as a rule, so rows with more have many draws.
const DOUBTS: usize = 8;

/// Answers a row from what it has, or notes what it needs.
fn answer(
    filtering: &mut Filtering,
    row: &Result<Planned<'_>, RowError>,
    state: &mut RowState,
    vocab_size: u32,
    passes: u32,
) {
    state.filter.need = None;
    let Ok(Planned { row, .. }) = row else { return };
    if let (Some(filters), true, None) = (&row.filters, state.has_finite, state.invalid) {
        let RowState { filter, mass, .. } = state;
        filter.largest.finish();
        let FilterState { largest, moments, doubts, answer, frontiers, used, floor, .. } = filter;
        let mass = mass.as_ref().expect("a row with filters has masses");
        if floor.is_too_high(mass) {
            filter.missed = true;
            filter.need = Some(Need::Before);
            return;
        }
        let seen = Seen { below: floor.below, ..Seen::first(largest.as_slice(), largest.limit(), mass, moments) };
        let of = Filtered { row, filters, vocab_size, passes };
        filter.need = filtering.answer(&of, &seen, &frontiers[..*used], doubts, answer);
    }
}

/// Takes what is told of every point in doubt; false, and nothing taken, where one is not told, or there are none or too many.
fn take_told(doubts: &mut [Before], told: impl Fn(Place) -> Option<Before>) -> bool {
    let mut known = (1..=DOUBTS).contains(&doubts.len());
    known = known && doubts.iter_mut().all(|doubt| told(doubt.place).map(|told| *doubt = told).is_some());
    if !known {
        forget(doubts);
    }
    known
}

/// Nothing is known of the mass before any of these.
fn forget(doubts: &mut [Before]) {
    doubts.iter_mut().for_each(|doubt| *doubt = Before::new(doubt.place));
}

/// Answers a row that was not decided for points in doubt, where the logits that the workers kept tell the mass before them:
/// `own` are those of the worker whose `state` has what all have seen.
fn look_up<'a>(
    filtering: &mut Filtering,
    row: &Result<Planned<'_>, RowError>,
    state: &mut RowState,
    own: &'a LogitCache,
    others: impl Iterator<Item = (&'a LogitCache, CachedRow)> + Clone,
    vocab_size: u32,
) {
    let FilterState { need, missed, doubts, run, floor, .. } = &mut state.filter;
    if *need != Some(Need::Before) || *missed {
        return;
    }
    let (floor, run) = (floor.below.floor(), *run);
    let workers = others.chain(core::iter::once((own, run)));
    if take_told(doubts, |place| LogitCache::before(workers.clone(), place, floor)) {
        answer(filtering, row, state, vocab_size, 1);
        if state.filter.need.is_some() {
            forget(&mut state.filter.doubts);
        }
    }
}

impl Engine {
    /// Gathers what a [pass](Engine::pass) left, and answers the rows with filters, with further passes over `tokens` where
    /// the first one does not decide them.
    /// `gather` makes the source of the rows that it is given, in this order, and calls what it is given with it.
    pub(crate) fn settle(
        &mut self,
        rows: &Rows<'_>,
        tokens: Range<u32>,
        chunk: u32,
        vocab_size: u32,
        mut gather: impl FnMut(&[usize], &mut dyn FnMut(&Source<'_>)),
    ) {
        self.passes.clear();
        self.passes.resize(rows.len(), 1);
        self.needs.clear();
        self.answer_all(rows, vocab_size);
        if self.needs.is_empty() {
            return;
        }
        let (mut again, mut members) = (self.take_again(), core::mem::take(&mut self.members));
        while !self.needs.is_empty() {
            self.group(rows, tokens.len() as u64, &mut members, &mut again);
            gather(&members, &mut |source| {
                let work = |worker: &mut Worker, part, simd| worker.evaluate(source, &again, part, simd);
                self.for_parts(tokens.clone(), chunk, |_| {}, work);
            });
            for &r in &members {
                self.passes[r] += 1;
                if let Ok(planned) = &again[r] {
                    self.finish(rows, r, planned.ask, vocab_size);
                }
            }
        }
        self.keep_again(again);
        self.members = members;
        self.trim();
    }

    /// Gathers what the first pass left in the first worker, and answers all rows from it or notes what they need; where
    /// threads share that, each does both for some rows: to wake them twice took longer.
    fn answer_all(&mut self, rows: &Rows<'_>, vocab_size: u32) {
        let shared = self.shares_rows(rows);
        if !shared {
            self.gather(rows);
        }
        let Some((first, others)) = self.workers.split_first_mut() else { return };
        let Worker { rows: states, above, .. } = first;
        let (states, above, others) = (&mut states[..rows.len()], &*above, &*others);
        let kept = |r: usize| others.iter().map(move |other| (&other.above, other.rows[r].filter.run));
        if shared {
            let each = rows.len().div_ceil(self.filtering.len());
            let parts = states.par_chunks_mut(each).zip(rows.par_chunks(each)).zip(&mut self.filtering);
            self.threads.install(|| {
                parts.enumerate().for_each(|(part, ((states, rows), filtering))| {
                    for (i, (state, row)) in states.iter_mut().zip(rows).enumerate() {
                        if row.is_ok() {
                            others.iter().for_each(|other| state.merge(&other.rows[part * each + i]));
                        }
                        answer(filtering, row, state, vocab_size, 1);
                        look_up(filtering, row, state, above, kept(part * each + i), vocab_size);
                    }
                });
            });
        } else {
            let filtering = &mut self.filtering[0];
            for (r, (state, row)) in states.iter_mut().zip(rows).enumerate() {
                answer(filtering, row, state, vocab_size, 1);
                look_up(filtering, row, state, above, kept(r), vocab_size);
            }
        }
        self.known.note(states.iter().any(|state| state.filter.missed));
        for (r, state) in states.iter_mut().enumerate() {
            self.needs.extend(state.filter.need.take().map(|need| (r, need)));
        }
    }

    /// Chooses the rows of the next pass, the longest lists first, and empties what they fill.
    fn group<'a>(&mut self, rows: &Rows<'a>, tokens: u64, members: &mut Vec<usize>, again: &mut Rows<'a>) {
        again.clear();
        again.extend(rows.iter().map(|_| Err(RowError::NoFiniteLogit)));
        members.clear();
        let mut slots = 0;
        let workers = &self.workers;
        next_pass(&mut self.needs, tokens, |r, need| {
            let Ok(planned) = &rows[r] else { return };
            let ask = match need {
                Need::Before if workers[0].rows[r].filter.missed => PassKind::Summary,
                Need::Before => PassKind::Before,
                Need::List { floor, .. } => {
                    slots += 1;
                    PassKind::List { floor, slot: slots - 1 }
                }
            };
            again[r] = Ok(Planned { at: members.len(), ask, ..*planned });
            members.push(r);
        });
        let Some((first, others)) = self.workers.split_first_mut() else { return };
        for &r in &*members {
            if first.rows[r].filter.missed {
                if let Ok(planned) = &rows[r] {
                    let states = core::iter::once(&mut *first).chain(&mut *others).map(|worker| &mut worker.rows[r]);
                    states.for_each(|state| state.begin(&planned.row, planned.slack, None, false));
                }
                continue;
            }
            for other in &mut *others {
                other.rows[r].filter.begin_before(&first.rows[r].filter);
                if let Some(mass) = &mut other.rows[r].mass {
                    mass.clear();
                }
            }
            let RowState { filter, mass, .. } = &mut first.rows[r];
            if let (Some(mass), true) = (mass, filter.floor.below.is_on()) {
                mass.clear_below(filter.floor.below.floor());
            }
            filter.floor.holds(f32::NEG_INFINITY);
        }
        for worker in core::iter::once(first).chain(others) {
            worker.lists.resize_with(slots.max(worker.lists.len()), Vec::new);
            worker.lists.iter_mut().for_each(Vec::clear);
        }
    }

    /// Gathers what a pass found for a row, and answers it.
    fn finish(&mut self, rows: &Rows<'_>, r: usize, ask: PassKind, vocab_size: u32) {
        let Some((first, others)) = self.workers.split_first_mut() else { return };
        match ask {
            PassKind::Summary => {
                let state = &mut first.rows[r];
                others.iter().for_each(|other| state.merge(&other.rows[r]));
                answer(&mut self.filtering[0], &rows[r], state, vocab_size, self.passes[r]);
                self.needs.extend(state.filter.need.take().map(|need| (r, need)));
            }
            PassKind::Before => {
                let state = &mut first.rows[r];
                for other in others {
                    state.filter.merge_before(&other.rows[r].filter);
                    if let (Some(a), Some(b)) = (&mut state.mass, &other.rows[r].mass) {
                        a.merge(b);
                    }
                }
                state.filter.floor.below = Below::default();
                answer(&mut self.filtering[0], &rows[r], state, vocab_size, self.passes[r]);
                self.needs.extend(state.filter.need.take().map(|need| (r, need)));
            }
            PassKind::List { floor, slot } => {
                let list = &mut first.lists[slot];
                others.iter_mut().for_each(|other| list.append(&mut other.lists[slot]));
                if let Ok(Planned { row, .. }) = &rows[r]
                    && let Some(filters) = &row.filters
                {
                    list.sort_unstable_by(by_place);
                    let RowState { filter, mass, .. } = &mut first.rows[r];
                    let mass = mass.as_ref().expect("a row with filters has masses");
                    let seen = Seen { list, floor, mass, below: Below::default(), moments: &filter.moments };
                    let of = Filtered { row, filters, vocab_size, passes: self.passes[r] };
                    let need = self.filtering[0].answer_listed(&of, &seen, &mut filter.answer);
                    self.needs.extend(need.map(|need| (r, need)));
                }
            }
        }
    }

    /// Gives the memory of lists back that are larger than those of one pass need be.
    pub(crate) fn trim(&mut self) {
        let bytes = |list: &Vec<Candidate>| (list.capacity() * size_of::<Candidate>()) as u64;
        let held: u64 = self.workers.iter().flat_map(|worker| &worker.lists).map(bytes).sum();
        if held > 4 * LIST_BYTES {
            self.workers.iter_mut().for_each(|worker| worker.lists.clear());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_points_in_doubt_are_told_of_and_all_or_none_are_taken() {
        for (count, unknown) in [(0, 9), (1, 9), (DOUBTS, 9), (DOUBTS, 3), (DOUBTS + 1, 99), (1000, 9999)] {
            let places = (0..count).map(|i| Place { logit: i as f32, token: i as u32 });
            let mut doubts: Vec<Before> = places.clone().map(Before::new).collect();
            let told = |place: Place| (place.token != unknown).then(|| Before::with_mass(place, 7));
            let taken = take_told(&mut doubts, told);
            assert_eq!(taken, (1..=DOUBTS).contains(&count) && count as u32 <= unknown, "{count} {unknown}");
            let want = |place| if taken { Before::with_mass(place, 7) } else { Before::new(place) };
            assert!(doubts.into_iter().eq(places.map(want)), "{count} {unknown}");
        }
    }
}
