//! Rows that ask for more than a draw of the fused kernel gives: log-probabilities, lists without replacement, filters,
//! canonical tokens. Their transformed logits are stored first, some rows at a time; here they are asked.

use crate::abi::{Item, Row};
use crate::device::queries::{CanonicalInputs, Kind, Query, QueryResults};
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::filtered::{FilterQuery, Filtered};
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::error_bounds::RowScoreBound;
use flash_sampling_core::params::transform::RowTransform;
use flash_sampling_core::{MassHistogram, RowError, RowParams, Samples, params};
use std::sync::Arc;

/// A row that asks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredRequest {
    seed: u64,
    position: u64,
    /// Without its lists: what is stored was transformed by them.
    row: params::Row<'static>,
    /// Of a canonical plan.
    near_ties: Option<RowScoreBound>,
}

impl StoredRequest {
    /// A checked row of these parameters; with bounds in a canonical plan.
    pub(crate) fn new(params: &RowParams<'_>, row: &params::Row<'_>, near_ties: Option<RowScoreBound>) -> Self {
        let params::Row {
            noise,
            greedy,
            transform,
            first_draw,
            draws,
            without_replacement,
            logprobs,
            raw_logprobs,
            kept,
            filters,
        } = *row;
        let inv_temperature = transform.inv_temperature;
        let transform = RowTransform { mask: None, adjustments: &[], inv_temperature };
        let row = params::Row {
            noise,
            greedy,
            transform,
            first_draw,
            draws,
            without_replacement,
            logprobs,
            raw_logprobs,
            kept,
            filters,
        };
        StoredRequest { seed: params.seed, position: params.position, row, near_ties }
    }

    /// Its noise as the kernels take it, without the transforms, which are done.
    fn noise(&self, draw: u32, greedy: bool) -> Row {
        let (seed, position) = (self.seed, self.position);
        Row { seed, position, inv_temperature: 1.0, draw, greedy: greedy.into(), ..Row::default() }
    }

    /// Whether its masses are asked for, or its filters look at them.
    fn needs_mass(&self) -> bool {
        self.row.logprobs.is_some() || self.row.filters.is_some()
    }

    fn wish(&self, source: usize, limit: u32, draw: u32, greedy: bool) -> Query {
        let slack = match self.near_ties.map_or(0.0, |bounds| bounds.slack()) {
            f32::MAX => f32::INFINITY,
            slack => slack,
        };
        Query { item: Item { source: source as u32, limit, slack, padding: 0 }, noise: self.noise(draw, greedy) }
    }

    /// Draws of a row that are made: of a greedy row they are all the same.
    fn made(&self) -> u32 {
        if self.row.greedy { 1 } else { self.row.draws }
    }
}

/// What a row came to.
#[derive(Debug)]
struct Answer {
    outcome: Result<(), RowError>,
    /// First and last of the wishes for draws; for a list the one wish among the lists.
    draws: (usize, usize),
    top: Option<usize>,
    mass: Option<usize>,
    /// Of a row with filters, which has none of the others.
    filtered: Option<usize>,
}

impl Answer {
    /// Whether draws and lists are still to be asked for.
    fn is_open(&self) -> bool {
        self.outcome.is_ok() && self.filtered.is_none()
    }
}

/// The answers of a call, in the order in which rows were asked.
#[derive(Debug, Default)]
pub(crate) struct StoredResults {
    answers: Vec<Answer>,
    draws: QueryResults,
    lists: QueryResults,
    /// The first `mass_count` are of this call.
    masses: Vec<MassHistogram>,
    mass_count: usize,
    wishes: Vec<Query>,
    again: QueryResults,
    filtered: Filtered,
}

impl StoredResults {
    pub(crate) fn clear(&mut self) {
        self.answers.clear();
        self.draws.clear();
        self.lists.clear();
        self.mass_count = 0;
        self.filtered.clear();
    }

    /// Asks the first rows of `stored`, one of `asking` each; `outcomes` tells which of them can be drawn from. Without
    /// `draw` none is: log-probabilities alone.
    pub(crate) fn ask(
        &mut self,
        asking: &[StoredRequest],
        outcomes: impl Iterator<Item = Result<(), RowError>>,
        draw: bool,
        canonical: Option<&CanonicalInputs>,
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let first = self.answers.len();
        let answer = |outcome| Answer { outcome, draws: (0, 0), top: None, mass: None, filtered: None };
        self.answers.extend(outcomes.map(answer));
        self.read_masses(first, asking, stored, stream)?;
        self.filter(first, asking, stored, stream)?;
        if draw {
            self.ask_draws(first, asking, canonical, stored, stream)?;
        }
        self.ask_lists(first, asking, draw);
        self.grant(Kind::Lists, asking, canonical, stored, stream)
    }

    /// The masses of the rows that need them.
    fn read_masses(
        &mut self,
        first: usize,
        asking: &[StoredRequest],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        if !asking.iter().any(StoredRequest::needs_mass) {
            return Ok(());
        }
        let words = stored.masses(asking.len(), stream)?.chunks_exact(MassHistogram::WORDS);
        for ((a, answer), words) in asking.iter().zip(&mut self.answers[first..]).zip(words) {
            if a.needs_mass() && answer.outcome.is_ok() {
                if self.mass_count == self.masses.len() {
                    self.masses.push(MassHistogram::default());
                }
                if !self.masses[self.mass_count].assign_words(words) {
                    return Err(CudaError::Corrupt { what: "masses" });
                }
                answer.mass = Some(self.mass_count);
                self.mass_count += 1;
            }
        }
        Ok(())
    }

    /// The draws of rows that no filter decides, but for lists.
    fn ask_draws(
        &mut self,
        first: usize,
        asking: &[StoredRequest],
        canonical: Option<&CanonicalInputs>,
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        for (r, a) in asking.iter().enumerate() {
            if !self.answers[first + r].is_open() || a.row.without_replacement {
                continue;
            }
            let from = self.draws.len() + self.wishes.len();
            for number in a.row.first_draw..a.row.first_draw + a.made() {
                self.wishes.push(a.wish(r, 1, number, a.row.greedy));
                if self.wishes.len() == 4096 {
                    self.grant(Kind::Draws, asking, canonical, stored, stream)?;
                }
            }
            self.answers[first + r].draws = (from, from + a.made() as usize);
        }
        self.grant(Kind::Draws, asking, canonical, stored, stream)
    }

    /// Wishes for the lists of rows that no filter decides: draws without replacement, the largest logits.
    fn ask_lists(&mut self, first: usize, asking: &[StoredRequest], draw: bool) {
        for (r, (a, answer)) in asking.iter().zip(&mut self.answers[first..]).enumerate() {
            if !answer.is_open() {
                continue;
            }
            let from = self.lists.len() + self.wishes.len();
            let is_list = draw && a.row.without_replacement;
            if is_list {
                self.wishes.push(a.wish(r, a.row.draws, a.row.first_draw, a.row.greedy));
                answer.draws = (from, from + 1);
            }
            if let Some(most @ 1..) = a.row.logprobs {
                self.wishes.push(a.wish(r, most, 0, true));
                answer.top = Some(from + usize::from(is_list));
            }
        }
    }

    /// Decides the rows with filters.
    fn filter(
        &mut self,
        first: usize,
        asking: &[StoredRequest],
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let StoredResults { answers, filtered, masses, .. } = self;
        let mut decided = filtered.len();
        for (a, answer) in asking.iter().zip(&mut answers[first..]) {
            if a.row.filters.is_some() && answer.outcome.is_ok() {
                answer.filtered = Some(decided);
                decided += 1;
            }
        }
        let rows = asking.iter().zip(&answers[first..]).enumerate();
        let question = |(source, (a, answer)): (usize, (&StoredRequest, &Answer))| {
            let (filters, mass) = (a.row.filters.filter(|_| answer.filtered.is_some())?, &masses[answer.mass?]);
            Some(FilterQuery { source, filters, mass })
        };
        filtered.decide(rows.filter_map(question), stored, stream)
    }

    /// Grants the wishes that were gathered.
    fn grant(
        &mut self,
        kind: Kind,
        asking: &[StoredRequest],
        canonical: Option<&CanonicalInputs>,
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let out = if kind == Kind::Draws { &mut self.draws } else { &mut self.lists };
        let before = out.len();
        stored.keep(kind, &self.wishes, canonical, out, stream)?;
        // Where the bounds left tokens out that may have won after all, every token is a candidate.
        let open = |i: usize, out: &QueryResults| {
            let last = out.get(before + i).last().map_or(0.0, |c| c.winner.score);
            asking[self.wishes[i].item.source as usize].near_ties.is_some_and(|bounds| bounds.leaves_open(last))
        };
        if (0..self.wishes.len()).any(|i| open(i, out)) {
            self.again.clear();
            for i in 0..before {
                self.again.push(out.get(i).iter().copied());
            }
            for (i, wish) in self.wishes.iter().enumerate() {
                if open(i, out) {
                    let every = Query { item: Item { slack: f32::INFINITY, ..wish.item }, ..*wish };
                    stored.keep(kind, &[every], canonical, &mut self.again, stream)?;
                } else {
                    self.again.push(out.get(before + i).iter().copied());
                }
            }
            core::mem::swap(&mut self.again, out);
        }
        self.wishes.clear();
        Ok(())
    }

    /// The mass and the largest logits of the row that was asked as number `i`.
    pub(crate) fn extras(&self, i: usize) -> (Option<&MassHistogram>, &[flash_sampling_core::Candidate]) {
        let Answer { top, mass, .. } = &self.answers[i];
        (mass.map(|at| &self.masses[at]), top.map_or(&[], |at| self.lists.get(at)))
    }

    /// Appends the result of the row that was asked as number `i`.
    ///
    /// # Errors
    /// The row's.
    pub(crate) fn emit(
        &mut self,
        i: usize,
        row: &params::Row<'_>,
        vocab_size: u32,
        out: &mut Samples,
    ) -> Result<(), RowError> {
        let Answer { outcome, draws: (from, to), filtered, .. } = &self.answers[i];
        (*outcome)?;
        if let (Some(question), Some(filters)) = (filtered, &row.filters) {
            return self.filtered.emit(*question, row, filters, vocab_size, out);
        }
        let (mass, top) = self.extras(i);
        if row.without_replacement {
            let list = self.lists.get(*from);
            let available = list.len() as u32;
            if available == 0 {
                return Err(RowError::NoFiniteLogit);
            }
            if available < row.draws {
                return Err(RowError::SupportTooSmall { draws: row.draws, available });
            }
            out.push_row(list.iter().copied(), mass, top);
            return Ok(());
        }
        if (*from..*to).any(|wish| self.draws.get(wish).is_empty()) {
            return Err(RowError::NoFiniteLogit);
        }
        let drawn = (*from..*to).flat_map(|wish| self.draws.get(wish)).copied();
        let copies = row.draws as usize / (to - from);
        out.push_row(drawn.cycle().take(copies * (to - from)), mass, top);
        Ok(())
    }
}
