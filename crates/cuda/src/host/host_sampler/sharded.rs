//! The calls of ranks whose rows have filters that the GPUs decide together.

use super::{HostSampler, of_call};
use crate::abi::{Draw, RowFilters, status};
use crate::error::CudaError;
use crate::host::exchange::CudaExchange;
use crate::host::results::push_row;
use crate::host::sharded::FiltersTogether;
use crate::host::uploaded_head::FilterSource;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{Matrix, RowError, RowParams, SampleError, Samples, params};

const NOT_DECIDED: CudaError = CudaError::NotTogether { reason: "its ranks do not decide the filters of a row" };

impl HostSampler<'_> {
    /// What this head can do in an exchange by peers.
    pub(crate) fn filters_together(&self) -> FiltersTogether {
        let Some(resident) = self.resident.as_ref().filter(|_| !self.plan.canonical && self.draws_from_stored()) else {
            return FiltersTogether::default();
        };
        let (lists, masses) = resident.can_together();
        FiltersTogether { lists, masses, most: resident.most_together() }
    }

    /// The same, for the other ranks.
    pub(crate) fn encode_support(&self) -> Vec<u8> {
        self.filters_together().encode(self.head.weight().dtype())
    }

    /// Loads and allocates all that such calls need.
    pub(crate) fn prepare_sharded(&mut self) -> Result<(), CudaError> {
        self.resident.as_mut().map_or(Ok(()), |resident| resident.prepare_sharded(&self.stream))
    }

    /// Whether all valid rows of a call are drawn, or decided, together: a function of what all ranks know.
    pub(crate) fn can_filter_sharded(&self, can: FiltersTogether, rows: &[RowParams<'_>]) -> bool {
        let (own, plan, vocab_size) = (&self.can, &self.plan, self.head.vocab_size());
        let decides = |params: &RowParams<'_>| {
            let row = params.check(&[], own, plan, vocab_size);
            row.map_or(true, |row| self.way(can, &row).is_some())
        };
        can.is_any() && rows.iter().all(decides)
    }

    fn checked<'r>(&'r self, r: usize, rows: &[RowParams<'r>]) -> Option<params::Row<'r>> {
        rows[r].check(&[], &self.can, &self.plan, self.head.vocab_size()).ok()
    }

    /// The filters of a row, and what decides it; `None` where nothing does together.
    fn way(&self, can: FiltersTogether, row: &params::Row<'_>) -> Option<(RowFilters, FilterSource)> {
        let asks_more = row.without_replacement || row.kept || row.logprobs.is_some() || row.raw_logprobs.is_some();
        let filters = match row.filters {
            _ if asks_more => None,
            None => Some(RowFilters::OFF),
            Some(_) => self.quick(row),
        }?;
        Some((filters, can.decides(&filters)?))
    }

    /// Draws together with the other ranks of an exchange, rows with filters too; every row is one that is
    /// [decided together](HostSampler::can_filter_sharded). Rows that stay open are noted; an error stands in their place. All do where
    /// the hidden states of all ranks have another type than the weight.
    pub(crate) fn sample_filtered_with(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        exchange: &mut CudaExchange,
        open: &mut Vec<usize>,
        out: &mut Samples,
    ) -> Result<(), SampleError> {
        out.clear();
        open.clear();
        check_call(&input, rows, &self.shape(), &self.plan)?;
        let failed = |error| SampleError::Backend { backend: "cuda", source: Box::new(error) };
        self.draw_filtered_with(&input, rows, exchange).map_err(failed)?;
        let (can, vocab_size) = (self.can, self.head.vocab_size());
        let (mut filtered, mut filtering) = (self.filtered.as_slice(), self.filtering.iter().peekable());
        for (r, params) in rows.iter().enumerate() {
            let mut draws = 0;
            while filtering.next_if(|(row, ..)| *row == r).is_some() {
                draws += 1;
            }
            let (mut own, rest) = filtered.split_at(draws);
            filtered = rest;
            if own.iter().any(|draw| draw.status == status::UNDECIDED) {
                open.push(r);
                out.push_error(RowError::NoFiniteLogit);
                continue;
            }
            let checked = params.check(&[], &can, &self.plan, vocab_size);
            if let Err(error) = checked.and_then(|row| push_row(&mut own, &row, None, &[], out)) {
                out.push_error(error);
            }
        }
        Ok(())
    }

    /// Makes all draws of a call: those from lists, then those from stored logits.
    fn draw_filtered_with(
        &mut self,
        input: &Matrix<'_>,
        rows: &[RowParams<'_>],
        exchange: &mut CudaExchange,
    ) -> Result<(), CudaError> {
        let (can, weight) = (exchange.filters(), self.head.weight().dtype());
        let mut filtering = core::mem::take(&mut self.filtering);
        filtering.clear();
        // Rows without filters go with rows of either kind.
        let (mut ways, mut any) = (Vec::new(), [false; 2]);
        for r in 0..rows.len() {
            let Some(row) = self.checked(r, rows) else { continue };
            let (filters, from) = self.way(can, &row).ok_or(NOT_DECIDED)?;
            let from = (filters != RowFilters::OFF).then_some(from);
            from.into_iter().for_each(|from| any[usize::from(from == FilterSource::Logits)] = true);
            for draw in row.first_draw..row.first_draw + row.draws {
                filtering.push((r, draw, filters));
                ways.push(from);
            }
        }
        self.filtering = filtering;
        let of_plain = if any == [false, true] { FilterSource::Logits } else { FilterSource::Lists };
        self.filtered.clear();
        self.filtered.resize(self.filtering.len(), Draw { status: status::UNDECIDED, ..Draw::default() });
        for from in [FilterSource::Lists, FilterSource::Logits] {
            self.open.clear();
            self.open.extend((0..ways.len()).filter(|&i| ways[i].unwrap_or(of_plain) == from));
            for first in (0..self.open.len()).step_by(can.most) {
                let part = first..self.open.len().min(first + can.most);
                self.stage_filtered(part.clone(), rows)?;
                let part = &self.open[part];
                let Some(resident) = &mut self.resident else { return Err(NOT_DECIDED) };
                let asked = (self.filters.as_slice(), from);
                let (staging, draws) = (&mut self.staging, &mut self.draws);
                let drawn = match input.dtype() == weight {
                    true => resident.draw_filtered_with(staging, asked, input, draws, &self.stream, (exchange, rows)),
                    false => exchange.draw_nothing((staging.staged(), rows), draws, &self.stream),
                };
                drawn.map_err(|error| of_call(error, |at| self.filtering[part[at]].0))?;
                // The mark of the exchange tells types apart: the other ranks, too, have this one, and leave all rows open.
                if input.dtype() != weight {
                    return Ok(());
                }
                part.iter().zip(&self.draws).for_each(|(&i, &draw)| self.filtered[i] = draw);
            }
        }
        Ok(())
    }
}
