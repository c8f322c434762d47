//! Rows that shards do not answer alone: the surveys of shards, merged, and what is decided from them. Those with filters
//! here, those with raw log-probabilities in `raw`.
//!
//! A shard does not know which tokens its row keeps. So it surveys the row ([`Scan`]), the surveys merge to that of the
//! whole row, and every rank decides and draws by itself, with the noise of global tokens. Rows that one pass leaves open
//! take another, in which shards tell the mass before a few places, or the tokens from a floor on. What is decided is a
//! function of integers and of the row's logits, so it is that of a sampler without shards.
//!
//! [`Scan`]: flash_sampling_core::Scan

use crate::error::ShardError;
use crate::lists::{Listed, Lists};
use crate::rows::{Checked, surveyed};
use crate::stage::First;
use core::mem::swap;
use flash_sampling_core::sampler::recycle;
use flash_sampling_core::scan::by_place;
use flash_sampling_core::selection::{
    Answer, Before, Below, Filtered, Filtering, LIST_BYTES, Need, Seen, Wants, next_pass,
};
use flash_sampling_core::{Candidate, MassHistogram, Request, RowError, RowSummary, Samples, Stage};

/// What the pass that a row takes part in is asked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    /// What its filters need.
    Need(Need),
    /// The raw logits of what was drawn.
    Raw,
}

/// What shards told of rows with filters, beside what was added already.
pub(crate) trait Overviews {
    /// An entry of a shard's list.
    fn listed(&self, shard: usize, row: usize, at: usize) -> Listed;

    /// Adds the masses of a shard.
    fn add_masses(&self, shard: usize, row: usize, mass: &mut MassHistogram) -> Result<(), ShardError>;

    /// The error of a list that is damaged or out of order.
    fn damaged(&self, shard: usize, row: usize) -> ShardError;
}

/// One row.
#[derive(Debug, Default)]
pub(crate) struct Open {
    /// The merged overview; its list is as long as the row needed it.
    pub(crate) overview: RowSummary,
    /// The bad logit that counts.
    bad: First,
    /// The places in doubt, and the mass before them.
    doubts: Vec<Before>,
    /// The tokens from a floor on.
    list: Vec<Candidate>,
    pub(crate) ask: Option<Ask>,
    /// The drawn tokens, and their raw logits.
    pub(crate) drawn: Vec<u32>,
    pub(crate) logits: Vec<f32>,
    answer: Answer,
    passes: u32,
    error: Option<RowError>,
}

/// The rows of a call that have filters or raw log-probabilities. Keeps its memory from call to call.
#[derive(Debug, Default)]
pub(crate) struct OpenRows {
    filtering: Filtering,
    lists: Lists,
    /// Of the row that is being decided; where it is not, it stays the row's.
    mass: MassHistogram,
    pub(crate) rows: Vec<Open>,
    /// Rows that are not decided, and what they need.
    needs: Vec<(usize, Need)>,
    /// The rows of the next pass, ascending.
    pub(crate) members: Vec<usize>,
    /// Only the memory lives from pass to pass.
    requests: Vec<Request<'static>>,
}

/// How many tokens the list of one of `rows` rows may keep room for from call to call.
pub(crate) fn kept_list(rows: usize) -> usize {
    LIST_BYTES as usize / size_of::<Candidate>() / rows.max(1)
}

impl OpenRows {
    /// Begins a call: the overviews of its rows are those of no tokens.
    pub(crate) fn begin(&mut self, rows: &[Checked<'_>]) {
        self.needs.clear();
        self.members.clear();
        self.rows.resize_with(rows.len().max(self.rows.len()), Open::default);
        for (open, row) in self.rows.iter_mut().zip(rows) {
            let Some(row) = surveyed(row) else { continue };
            open.overview.begin(row);
            open.bad = First::default();
        }
    }

    /// Adds the overview of one shard, all but its list and its masses; `stage` is that of its bad logit.
    pub(crate) fn add(&mut self, r: usize, survey: &RowSummary, stage: Stage) {
        match survey.error {
            Some(error) => self.note_error(r, stage, error),
            None => self.rows[r].overview.merge_points(survey),
        }
    }

    /// The overview of a row, to which those of shards are added.
    pub(crate) fn overview_mut(&mut self, r: usize) -> &mut RowSummary {
        &mut self.rows[r].overview
    }

    /// Notes that a shard has a bad logit.
    pub(crate) fn note_error(&mut self, r: usize, stage: Stage, error: RowError) {
        self.rows[r].bad.add(stage, error);
    }

    /// Decides what the overviews tell. `told` says what else the shards told.
    ///
    /// Most rows with top-p alone are decided by their masses and frontiers, without the lists: of these no more than the first
    /// token is merged then.
    ///
    /// # Errors
    /// Of a shard whose list or masses are damaged.
    pub(crate) fn decide(
        &mut self,
        vocab_size: u32,
        rows: &[Checked<'_>],
        shards: usize,
        told: &impl Overviews,
    ) -> Result<(), ShardError> {
        for (r, row) in rows.iter().enumerate() {
            let Some(row) = surveyed(row) else { continue };
            let open = &mut self.rows[r];
            open.error = open.bad.error();
            let (None, Some(filters)) = (open.error, &row.filters) else { continue };
            let wants = Wants::of(row, filters);
            open.passes = 1;
            if wants.mass {
                self.mass.clear();
                (0..shards).try_for_each(|shard| told.add_masses(shard, r, &mut self.mass))?;
                swap(&mut self.mass, &mut open.overview.mass);
            }
            let mut limit = if wants.prefix { 1 } else { wants.list };
            let need = loop {
                let list = &mut open.overview.list;
                let merged = self.lists.merge(shards, limit, |shard, at| told.listed(shard, r, at), list);
                merged.map_err(|shard| told.damaged(shard, r))?;
                if list.is_empty() {
                    open.error = Some(RowError::NoFiniteLogit);
                    break None;
                }
                open.doubts.clear();
                open.answer.begin();
                let of = Filtered { row, filters, vocab_size, passes: 1 };
                let seen = open.overview.seen(limit);
                let frontiers = open.overview.frontiers();
                let need = self.filtering.answer(&of, &seen, frontiers, &mut open.doubts, &mut open.answer);
                if need.is_none() || limit == wants.list {
                    break need;
                }
                limit = wants.list;
            };
            if wants.mass && need.is_none() {
                // The next row finds it in the processor's cache.
                swap(&mut self.mass, &mut open.overview.mass);
            }
            self.needs.extend(need.map(|need| (r, need)));
        }
        Ok(())
    }

    /// Chooses the rows of the next pass, as many as their lists have room; false when all rows are decided.
    pub(crate) fn next_pass(&mut self, vocab_size: u32) -> bool {
        let OpenRows { rows, needs, members, .. } = self;
        members.clear();
        next_pass(needs, vocab_size.into(), |r, need| {
            rows[r].ask = Some(Ask::Need(need));
            rows[r].list.clear();
            members.push(r);
        });
        members.sort_unstable();
        !members.is_empty()
    }

    /// The rows of the pass, ascending, with what they are asked.
    pub(crate) fn asked(&self) -> impl Iterator<Item = (usize, Request<'_>)> {
        self.members.iter().map(|&r| {
            let open = &self.rows[r];
            let request = match open.ask {
                Some(Ask::Need(Need::Before)) => Request::Before(&open.doubts),
                Some(Ask::Need(Need::List { floor, .. })) => Request::List { floor },
                Some(Ask::Raw) => Request::RawLogits(&open.drawn),
                None => Request::Skip,
            };
            (r, request)
        })
    }

    /// Calls `ask` with the requests of the pass, one for each of the call's `rows`.
    pub(crate) fn inquire<R>(&mut self, rows: usize, ask: impl FnOnce(&[Request<'_>]) -> R) -> R {
        let mut requests = recycle(core::mem::take(&mut self.requests));
        requests.resize(rows, Request::Skip);
        self.asked().for_each(|(r, request)| requests[r] = request);
        let answer = ask(&requests);
        self.requests = recycle(requests);
        answer
    }

    /// Merges what the shards told in the pass, and decides. `told(shard, row)` is asked only for the rows of the pass.
    pub(crate) fn settle<'s>(
        &mut self,
        vocab_size: u32,
        rows: &[Checked<'_>],
        shards: usize,
        told: impl Fn(usize, usize) -> &'s RowSummary,
    ) {
        for &r in &self.members {
            let Some(row) = surveyed(&rows[r]) else { continue };
            let Some(filters) = &row.filters else { continue };
            let open = &mut self.rows[r];
            open.passes += 1;
            let of = Filtered { row, filters, vocab_size, passes: open.passes };
            let need = match open.ask.take() {
                Some(Ask::Need(Need::List { floor, .. })) => {
                    (0..shards).for_each(|shard| open.list.extend_from_slice(&told(shard, r).list));
                    open.list.sort_unstable_by(by_place);
                    if open.list.is_empty() && floor == f32::NEG_INFINITY {
                        // Shards that take back what they told.
                        open.error = Some(RowError::NoFiniteLogit);
                        continue;
                    }
                    let RowSummary { mass, moments, .. } = &open.overview;
                    let seen = Seen { list: &open.list, floor, mass, below: Below::default(), moments };
                    let need = self.filtering.answer_listed(&of, &seen, &mut open.answer);
                    if open.list.capacity() > kept_list(rows.len()) {
                        open.list = Vec::new();
                    }
                    need
                }
                _ => {
                    for shard in 0..shards {
                        open.doubts.iter_mut().zip(&told(shard, r).before).for_each(|(a, b)| a.merge(b));
                    }
                    let seen = open.overview.seen(Wants::of(row, filters).list);
                    let frontiers = open.overview.frontiers();
                    self.filtering.answer(&of, &seen, frontiers, &mut open.doubts, &mut open.answer)
                }
            };
            self.needs.extend(need.map(|need| (r, need)));
        }
    }

    /// Appends the result of a row with filters.
    pub(crate) fn emit(&self, r: usize, vocab_size: u32, out: &mut Samples) {
        let open = &self.rows[r];
        let outcome = open.error.map_or_else(|| open.answer.emit(open.passes, vocab_size, out), Err);
        if let Err(error) = outcome {
            out.push_error(error);
        }
    }
}
