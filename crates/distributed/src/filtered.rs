//! Rows that shards do not answer alone: the surveys of shards, merged, and what is decided from them. Those with filters
//! here, those with raw log-probabilities in `raw`.
//!
//! A shard does not know which tokens its row keeps. So it surveys the row ([`Survey`]), the surveys merge to that of the
//! whole row, and every rank decides and draws by itself, with the noise of global tokens. Rows that one pass leaves open
//! take another, in which shards tell the mass before a few places, or the tokens from a floor on. What is decided is a
//! function of integers and of the row's logits, so it is that of a sampler without shards.
//!
//! [`Survey`]: flash_sampling_core::Survey

use crate::stage::{First, Stage};
use crate::tiling::Whole;
use core::cmp::Reverse;
use flash_sampling_core::params::Row;
use flash_sampling_core::selection::{Answer, Before, Below, Filtered, Filtering, Need, Seen, Wants};
use flash_sampling_core::survey::by_place;
use flash_sampling_core::{Candidate, Inquiry, RowError, RowParams, RowSurvey, Samples};

/// Bytes that the lists of one pass may take; a longer list is alone in its pass.
const LISTS: u64 = 16 << 20;

/// What the pass that a row takes part in is asked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    /// What its filters need.
    Need(Need),
    /// The raw logits of what was drawn.
    Raw,
}

/// One row.
#[derive(Debug, Default)]
pub(crate) struct Open {
    /// The merged overview.
    pub(crate) overview: RowSurvey,
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
    pub(crate) rows: Vec<Open>,
    /// Rows that are not decided, and what they need.
    needs: Vec<(usize, Need)>,
    /// The rows of the next pass, ascending.
    pub(crate) members: Vec<usize>,
    /// Only the memory lives from pass to pass.
    inquiries: Vec<Inquiry<'static>>,
}

/// A row that takes surveys, whose parameters are valid.
pub(crate) fn surveyed<'a>(whole: &Whole, params: &RowParams<'a>) -> Option<Row<'a>> {
    whole.check(params).ok().filter(is_surveyed)
}

/// Whether a row takes surveys.
pub(crate) fn is_surveyed(row: &Row<'_>) -> bool {
    row.filters.is_some() || row.raw_logprobs.is_some()
}

/// How many tokens the list of one of `rows` rows may keep room for from call to call.
pub(crate) fn kept_list(rows: usize) -> usize {
    LISTS as usize / size_of::<Candidate>() / rows.max(1)
}

/// Bytes of a row's list.
fn bytes_of(need: &Need, vocab_size: u32) -> u64 {
    match need {
        Need::Before => 0,
        Need::List { bound, .. } => u64::from(vocab_size).min(*bound) * size_of::<Candidate>() as u64,
    }
}

impl OpenRows {
    /// Merges the overviews of a call's rows and decides what they tell. `survey(shard, row)` and `stage(shard, row)`, that of
    /// a bad logit, are asked only for rows that take surveys.
    pub(crate) fn overview<'s>(
        &mut self,
        whole: &Whole,
        rows: &[RowParams<'_>],
        shards: usize,
        survey: impl Fn(usize, usize) -> &'s RowSurvey,
        stage: impl Fn(usize, usize) -> Stage,
    ) {
        self.needs.clear();
        self.members.clear();
        for (r, params) in rows.iter().enumerate() {
            let Some(row) = surveyed(whole, params) else { continue };
            self.rows.resize_with((r + 1).max(self.rows.len()), Open::default);
            let open = &mut self.rows[r];
            open.overview.begin(&row);
            let mut first = First::default();
            (0..shards).for_each(|s| survey(s, r).error.into_iter().for_each(|error| first.add(stage(s, r), error)));
            open.error = first.error();
            if open.error.is_some() {
                continue;
            }
            let Some(filters) = &row.filters else {
                (0..shards).for_each(|shard| open.overview.merge_raw(survey(shard, r)));
                continue;
            };
            let wants = Wants::of(&row, filters);
            (0..shards).for_each(|shard| open.overview.merge(survey(shard, r), wants.list));
            open.doubts.clear();
            open.answer.begin();
            open.passes = 1;
            if open.overview.list.is_empty() {
                open.error = Some(RowError::NoFiniteLogit);
            } else {
                let of = Filtered { row: &row, filters, vocab_size: whole.shape.vocab_size, passes: 1 };
                let seen = open.overview.seen(wants.list);
                let frontiers = open.overview.frontiers();
                let need = self.filtering.answer(&of, &seen, frontiers, &mut open.doubts, &mut open.answer);
                self.needs.extend(need.map(|need| (r, need)));
            }
        }
    }

    /// Chooses the rows of the next pass, as many as their lists have room; false when all rows are decided.
    pub(crate) fn next_pass(&mut self, vocab_size: u32) -> bool {
        let OpenRows { rows, needs, members, .. } = self;
        members.clear();
        needs.sort_unstable_by_key(|(r, need)| (Reverse(bytes_of(need, vocab_size)), *r));
        let (mut lists, mut room) = (0, LISTS);
        needs.retain(|(r, need)| {
            let bytes = bytes_of(need, vocab_size);
            if bytes > room && lists > 0 {
                return true;
            }
            room = room.saturating_sub(bytes);
            lists += usize::from(bytes > 0);
            rows[*r].ask = Some(Ask::Need(*need));
            rows[*r].list.clear();
            members.push(*r);
            false
        });
        members.sort_unstable();
        !members.is_empty()
    }

    /// The rows of the pass, ascending, with what they are asked.
    pub(crate) fn asked(&self) -> impl Iterator<Item = (usize, Inquiry<'_>)> {
        self.members.iter().map(|&r| {
            let open = &self.rows[r];
            let inquiry = match open.ask {
                Some(Ask::Need(Need::Before)) => Inquiry::Before(&open.doubts),
                Some(Ask::Need(Need::List { floor, .. })) => Inquiry::List { floor },
                Some(Ask::Raw) => Inquiry::RawLogits(&open.drawn),
                None => Inquiry::Nothing,
            };
            (r, inquiry)
        })
    }

    /// Calls `ask` with the inquiries of the pass, one for each of the call's `rows`.
    pub(crate) fn inquire<R>(&mut self, rows: usize, ask: impl FnOnce(&[Inquiry<'_>]) -> R) -> R {
        let mut inquiries = recycle(core::mem::take(&mut self.inquiries));
        inquiries.resize(rows, Inquiry::Nothing);
        self.asked().for_each(|(r, inquiry)| inquiries[r] = inquiry);
        let answer = ask(&inquiries);
        self.inquiries = recycle(inquiries);
        answer
    }

    /// Merges what the shards told in the pass, and decides. `told(shard, row)` is asked only for the rows of the pass.
    pub(crate) fn settle<'s>(
        &mut self,
        whole: &Whole,
        rows: &[RowParams<'_>],
        shards: usize,
        told: impl Fn(usize, usize) -> &'s RowSurvey,
    ) {
        for &r in &self.members {
            let Some(row) = surveyed(whole, &rows[r]) else { continue };
            let Some(filters) = &row.filters else { continue };
            let open = &mut self.rows[r];
            open.passes += 1;
            let of = Filtered { row: &row, filters, vocab_size: whole.shape.vocab_size, passes: open.passes };
            let need = match open.ask.take() {
                Some(Ask::Need(Need::List { floor, .. })) => {
                    (0..shards).for_each(|shard| open.list.extend_from_slice(&told(shard, r).list));
                    open.list.sort_unstable_by(by_place);
                    if open.list.is_empty() && floor == f32::NEG_INFINITY {
                        // Shards that take back what they told.
                        open.error = Some(RowError::NoFiniteLogit);
                        continue;
                    }
                    let RowSurvey { mass, moments, .. } = &open.overview;
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
                    let seen = open.overview.seen(Wants::of(&row, filters).list);
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

/// Empties a list but keeps its memory for elements of another lifetime.
fn recycle<'a>(mut inquiries: Vec<Inquiry<'_>>) -> Vec<Inquiry<'a>> {
    inquiries.clear();
    inquiries.into_iter().map(|_| Inquiry::Nothing).collect()
}
