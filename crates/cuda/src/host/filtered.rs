//! Rows with filters, decided from their stored logits: core's `Selector` over the largest logits and the masses, and the
//! draws from what it keeps. A list that is too short is followed by a longer one, at last by the whole row.

use crate::abi::{Item, Row};
use crate::device::queries::{Kind, Query, QueryResults};
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::selection::{RowView, largest as largest_kept, winner};
use flash_sampling_core::{
    Candidate, Domain, Filters, MassHistogram, RowError, Samples, Selection, Selector, TopList, Winner, params,
};
use std::sync::Arc;

/// The largest logits that are listed at first, and the largest top-k for which more are.
const LIST: u32 = 64;
const LONG_LIST: u32 = 1024;
/// The list after that; the one that follows has the whole row.
const SECOND_LIST: u32 = 8192;

/// A stored row with filters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilterQuery<'a> {
    /// Its number among the stored rows.
    pub(crate) source: usize,
    pub(crate) filters: Filters,
    pub(crate) mass: &'a MassHistogram,
}

/// What is kept of a row: a part of the list of all, none where it has no finite logit.
#[derive(Clone, Debug)]
struct Kept {
    tokens: Range<usize>,
    passes: u32,
    is_open: bool,
}

/// Which tokens the filters of a call's rows keep, in the order of the questions. Keeps its memory from call to call.
#[derive(Debug, Default)]
pub(crate) struct Filtered {
    rows: Vec<Kept>,
    /// In the order of falling logits, row after row.
    tokens: Vec<Candidate>,
    selector: Selector,
    wishes: Vec<Query>,
    lists: QueryResults,
    mass: MassHistogram,
    draws: Vec<Candidate>,
    list: TopList,
}

/// How many of the largest logits are listed at first.
fn list_len(filters: &Filters) -> u32 {
    filters.smallest_k().filter(|&k| k <= LONG_LIST).map_or(LIST, |k| LIST.max(k))
}

/// The largest `limit` logits of a stored row.
fn largest(source: usize, limit: u32) -> Query {
    let noise = Row { inv_temperature: 1.0, greedy: 1, ..Row::default() };
    Query { item: Item { source: source as u32, limit, ..Item::default() }, noise }
}

impl Filtered {
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.tokens.clear();
    }

    /// Number of rows that were decided.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Decides rows.
    pub(crate) fn decide<'a>(
        &mut self,
        questions: impl Iterator<Item = FilterQuery<'a>> + Clone,
        stored: &mut StoredRows,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let first = self.rows.len();
        self.rows.extend(questions.clone().map(|_| Kept { tokens: 0..0, passes: 0, is_open: true }));
        for limit in [None, Some(SECOND_LIST), Some(u32::MAX)] {
            let limit = |filters: &Filters| limit.unwrap_or_else(|| list_len(filters));
            let open = questions.clone().zip(&self.rows[first..]).filter(|(_, row)| row.is_open);
            self.wishes.clear();
            self.wishes.extend(open.map(|(q, _)| largest(q.source, limit(&q.filters))));
            if self.wishes.is_empty() {
                return Ok(());
            }
            self.lists.clear();
            stored.keep(Kind::Lists, &self.wishes, None, &mut self.lists, stream)?;
            let open = self.rows[first..].iter_mut().zip(questions.clone()).filter(|(row, _)| row.is_open);
            for (i, (row, FilterQuery { source, filters, mass })) in open.enumerate() {
                let list = self.lists.get(i);
                row.passes += 1;
                row.is_open = !list.is_empty();
                if !row.is_open {
                    continue;
                }
                let mut moments = filters.moments();
                if filters.need_moments() {
                    stored.read(source, stream)?.iter().for_each(|&logit| moments.push(logit));
                }
                let view = RowView::first(list, limit(&filters) as usize, mass, &moments);
                if let Selection::Listed(kept) = self.selector.select(&filters, &view) {
                    let from = self.tokens.len();
                    self.tokens.extend_from_slice(&list[kept]);
                    (row.tokens, row.is_open) = (from..self.tokens.len(), false);
                }
            }
        }
        match self.rows[first..].iter().any(|row| row.is_open) {
            true => Err(CudaError::Corrupt { what: "lists of whole rows that leave filters open," }),
            false => Ok(()),
        }
    }

    /// Appends the result of the row of question `i`.
    ///
    /// # Errors
    /// The row's.
    pub(crate) fn emit(
        &mut self,
        i: usize,
        row: &params::Row<'_>,
        filters: &Filters,
        vocab_size: u32,
        out: &mut Samples,
    ) -> Result<(), RowError> {
        let Kept { tokens, passes, .. } = self.rows[i].clone();
        let kept = filters.drawable(&self.tokens[tokens])?;
        self.draws.clear();
        if row.without_replacement {
            let available = kept.len() as u32;
            if available < row.draws {
                return Err(RowError::SupportTooSmall { draws: row.draws, available });
            }
            self.list.reset(row.draws as usize, 0.0);
            for c in kept {
                let (token, logit) = (c.winner.token, c.logit * filters.rescale);
                let noise = row.noise.gumbel(Domain::Token, row.first_draw, token);
                self.list.push(Candidate { winner: Winner::new(logit + noise, token), logit });
            }
            self.draws.extend_from_slice(self.list.as_slice());
        } else {
            let draws = row.first_draw..row.first_draw + row.draws;
            self.draws.extend(draws.map(|draw| winner(row, draw, kept, filters.rescale)));
        }
        self.mass.clear();
        if row.logprobs.is_some() || row.kept {
            kept.iter().for_each(|c| self.mass.push(c.logit * filters.rescale));
        }
        largest_kept(kept, filters.rescale, row.logprobs.unwrap_or(0), &mut self.list);
        let mass = row.logprobs.is_some().then_some(&self.mass);
        out.push_row(self.draws.iter().copied(), mass, self.list.as_slice());
        if row.kept {
            out.set_kept(kept.iter().map(|c| c.winner.token), self.mass.log_z(), vocab_size);
        }
        out.set_passes(passes);
        Ok(())
    }
}
