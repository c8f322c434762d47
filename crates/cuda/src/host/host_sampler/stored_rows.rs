//! The rows of a call that ask for more than draws.

use super::HostSampler;
use super::stage::adjusted;
use crate::abi::{Draw, RowFilters, status};
use crate::device::stored_rows::StoredRows;
use crate::error::CudaError;
use crate::host::raw;
use crate::host::results::candidate;
use crate::host::stored_results::StoredRequest;
use crate::host::uploaded_head::FilterSource;
use flash_sampling_core::backend::canonical::norm;
use flash_sampling_core::{Matrix, RowParams, Samples};

impl HostSampler<'_> {
    /// Makes the draws whose filters the GPU decides, from lists where they tell, then from stored logits; rows with one
    /// that is undecided then ask.
    pub(super) fn filter(&mut self, input: &Matrix<'_>, rows: &[RowParams<'_>]) -> Result<(), CudaError> {
        self.filtered.clear();
        self.tried.clear();
        let Some(resident) = self.resident.as_ref().filter(|_| !self.filtering.is_empty()) else { return Ok(()) };
        let most = resident.most_filtered();
        let told = resident.lists(input) && self.filtering.iter().any(|(.., filters)| filters.is_listed());
        self.filtered.resize(self.filtering.len(), Draw { status: status::UNDECIDED, ..Draw::default() });
        self.tried.resize(self.filtering.len(), 0);
        for from in [FilterSource::Lists, FilterSource::Logits] {
            if from == FilterSource::Lists && !told {
                continue;
            }
            let is_open = |&i: &usize| self.filtered[i].status == status::UNDECIDED;
            self.open.clear();
            self.open.extend((0..self.filtering.len()).filter(is_open));
            for first in (0..self.open.len()).step_by(most) {
                let part = first..self.open.len().min(first + most);
                self.stage_filtered(part.clone(), rows)?;
                let Some(resident) = &mut self.resident else { return Ok(()) };
                let asked = (self.filters.as_slice(), from);
                resident.draw_filtered(&mut self.staging, asked, input, &mut self.draws, &self.stream)?;
                for (&i, &draw) in self.open[part].iter().zip(&self.draws) {
                    self.filtered[i] = draw;
                    // Lists are not asked about the others.
                    let filters = self.filtering[i].2;
                    let is_tried = from == FilterSource::Logits || filters.is_listed() || filters == RowFilters::OFF;
                    self.tried[i] += u32::from(is_tried);
                }
            }
        }
        let draws = self.filtering.iter().zip(&self.filtered);
        let undecided = draws.filter(|(_, draw)| draw.status == status::UNDECIDED).map(|(&(r, ..), _)| r);
        self.asking.extend(undecided);
        self.asking.sort_unstable();
        self.asking.dedup();
        Ok(())
    }

    /// Stores the logits of the rows that ask, some at a time, and asks them.
    pub(super) fn ask(&mut self, input: &Matrix<'_>, rows: &[RowParams<'_>]) -> Result<(), CudaError> {
        self.answers.clear();
        let (can, draw) = (self.can, self.draws_from_stored());
        let Some(resident) = self.resident.as_mut().filter(|_| !self.asking.is_empty()) else { return Ok(()) };
        let (tokens, most) = (self.head.tokens(), self.plan.max_rows);
        let stored = StoredRows::made_in(&mut self.stored, tokens.clone(), most, resident.device(), &self.stream)?;
        self.hidden.resize(if self.error_bounds.is_some() { input.cols() } else { 0 }, 0.0);
        for part in self.asking.chunks(stored.rows().min(resident.most())) {
            self.staging.clear();
            self.asked.clear();
            for &r in part {
                let row = adjusted(&rows[r], &mut self.adjustments, &self.head, (&can, &self.plan));
                self.staging.push_of(r, &rows[r], &row, [row.first_draw])?;
                let near_ties = self.error_bounds.as_ref().map(|bounds| {
                    input.row_to_f32(r, &mut self.hidden);
                    bounds.row(&self.head, &row, norm(&self.hidden))
                });
                self.asked.push(StoredRequest::new(&rows[r], &row, near_ties));
            }
            let (logits, stride) = stored.place(&self.stream);
            let inputs = resident.store(&mut self.staging, input, logits, stride, &mut self.draws, &self.stream)?;
            let canonical = self.plan.canonical.then_some(&inputs);
            let outcomes = self.draws.iter().map(|draw| candidate(draw).map(drop));
            self.answers.ask(&self.asked, outcomes, draw, canonical, stored, &self.stream)?;
        }
        Ok(())
    }

    /// Gives the rows of `out` that ask for them their raw log-probabilities.
    pub(super) fn note_raw(
        &mut self,
        input: &Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), CudaError> {
        self.asking.clear();
        let asks = |&r: &usize| out.row(r).is_ok() && raw::bare(&rows[r]).is_some();
        self.asking.extend((0..rows.len()).filter(asks));
        let Some(resident) = self.resident.as_mut().filter(|_| !self.asking.is_empty()) else { return Ok(()) };
        let (tokens, most) = (self.head.tokens(), self.plan.max_rows);
        let stored = StoredRows::made_in(&mut self.stored, tokens.clone(), most, resident.device(), &self.stream)?;
        let vocab_size = self.head.vocab_size();
        for part in self.asking.chunks(stored.rows().min(resident.most())) {
            self.staging.clear();
            self.asked.clear();
            for (r, bare) in part.iter().filter_map(|&r| Some((r, raw::bare(&rows[r])?))) {
                let row = bare.check(&[], &self.can, &self.plan, vocab_size);
                let row = row.expect("log-probabilities of these rows were checked");
                self.staging.push_of(r, &bare, &row, [row.first_draw])?;
                self.asked.push(StoredRequest::new(&bare, &row, None));
            }
            let (logits, stride) = stored.place(&self.stream);
            resident.store(&mut self.staging, input, logits, stride, &mut self.draws, &self.stream)?;
            raw::note(part.iter().copied(), &self.asked, &mut self.answers, stored, &self.stream, out)?;
        }
        Ok(())
    }
}
