//! The rows that the fused kernel draws.
#![allow(unsafe_code)]

use crate::abi::{Draw, Row, RowFilters, status};
use crate::device::filtered::{DeviceFilters, FilterKinds, rows_within};
use crate::device::matrix::DeviceMatrix;
use crate::device::results;
use crate::device::scratch::Scratch;
use crate::error::CudaError;
use crate::host::device_sampler::{DeviceSampler, RowRoute};
use crate::host::uploaded_head::FilterSource;
use core::ops::Range;
use cudarc::driver::{CudaStream, result};
use flash_sampling_core::RowParams;

impl DeviceSampler {
    /// Stages rows for their draws of a number, counted from each row's first; what is not drawn `by` its way is drawn
    /// greedily, for nobody.
    pub(super) fn stage(
        &mut self,
        rows: &[RowParams<'_>],
        which: Range<usize>,
        number: u32,
        by: fn(RowRoute) -> bool,
    ) -> Result<(), CudaError> {
        let (can, vocab_size) = (self.capabilities(), self.shape.vocab_size);
        let idle = RowParams { temperature: 0.0, ..RowParams::default() };
        self.staging.clear();
        for r in which {
            let is_drawn = by(self.ways[r]) && number < rows[r].draws;
            let (params, adjustments) = if is_drawn { (&rows[r], self.adjustments.row(r)) } else { (&idle, &[][..]) };
            let row = params.check(adjustments, &can, &self.plan, vocab_size);
            let row = row.expect("rows that are drawn were checked");
            self.staging.push(params, &row, [row.first_draw + number])?;
        }
        Ok(())
    }

    /// Copies what is staged up; where the rows are.
    pub(super) fn copy(&mut self, stream: &CudaStream) -> Result<u64, CudaError> {
        if self.staging.len() > self.inputs.len() {
            self.inputs = Scratch::new(self.staging.len().next_power_of_two(), &[], &self.device)?;
        }
        let base = self.inputs.lend();
        copy_up(base, self.staging.finish(base), stream)?;
        Ok(base + self.staging.rows_at() as u64)
    }

    /// Makes the draws of all rows that are launched, and waits. They lie in `results` launch by launch, each with a draw of
    /// every row of its part.
    ///
    /// # Safety
    /// As [`DeviceSampler::sample`].
    pub(super) unsafe fn draw(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
    ) -> Result<(), CudaError> {
        self.results.clear();
        let count: usize = self.parts.iter().map(|(part, draws)| part.len() * *draws as usize).sum();
        if count == 0 {
            // Rows that ask are drawn from on another stream.
            return stream.synchronize().map_err(CudaError::driver("wait for the hidden states"));
        }
        let from = self.poisoned_draws(count, stream)?;
        let mut to = from;
        self.listed.clear();
        for i in 0..self.parts.len() {
            let (part, draws) = self.parts[i].clone();
            for number in 0..draws {
                self.stage(rows, part.clone(), number, |way| matches!(way, RowRoute::Launched(_)))?;
                // SAFETY: this function's contract; there is room for the draws of all parts.
                let launched =
                    unsafe { self.launch(stream, hidden, (rows, number), part.clone(), to, FilterSource::Lists) };
                self.listed.push(launched? == FilterSource::Lists);
                to += (part.len() * size_of::<Draw>()) as u64;
            }
        }
        self.results.resize(count, Draw::default());
        copy_down(&mut self.results, from, stream)?;
        results::written(&self.results)?;
        self.settle();
        // SAFETY: the same contract.
        unsafe { self.decide_open(stream, hidden, rows) }?;
        // What the selection leaves undecided is asked.
        let mut results = self.results.iter();
        for (part, draws) in &self.parts {
            for _ in 0..*draws {
                let open = part.clone().zip(results.by_ref()).filter(|(_, draw)| draw.status == status::UNDECIDED);
                open.for_each(|(r, _)| self.ways[r] = RowRoute::Asked);
            }
        }
        Ok(())
    }

    /// Makes the draws again, from stored logits, that lists leave undecided, with those between them.
    ///
    /// # Safety
    /// As [`DeviceSampler::sample`].
    unsafe fn decide_open(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: &[RowParams<'_>],
    ) -> Result<(), CudaError> {
        let is_open = |draw: &Draw| draw.status == status::UNDECIDED;
        let (mut at, mut launch) = (0, 0);
        for i in 0..self.parts.len() {
            let (part, draws) = self.parts[i].clone();
            for number in 0..draws {
                let own = at..at + part.len();
                at = own.end;
                launch += 1;
                let drawn = &self.results[own.clone()];
                let ends = drawn.iter().position(is_open).zip(drawn.iter().rposition(is_open));
                let Some((first, last)) = ends.filter(|_| self.listed[launch - 1]) else { continue };
                let some = part.start + first..part.start + last + 1;
                self.stage(rows, some.clone(), number, |way| matches!(way, RowRoute::Launched(_)))?;
                let to = self.poisoned_draws(some.len(), stream)?;
                // SAFETY: the same contract; there is room for these draws.
                unsafe { self.launch(stream, hidden, (rows, number), some.clone(), to, FilterSource::Logits) }?;
                self.of_row.clear();
                self.of_row.resize(some.len(), Draw::default());
                copy_down(&mut self.of_row, to, stream)?;
                results::written(&self.of_row)?;
                self.settle();
                let open = self.results[own][first..=last].iter_mut().zip(&self.of_row).zip(some);
                for ((draw, again), r) in open.filter(|((draw, _), _)| is_open(draw)) {
                    *draw = *again;
                    self.tried[r] = 2;
                }
            }
        }
        Ok(())
    }

    /// Room for draws that no kernel has written.
    pub(super) fn poisoned_draws(&mut self, count: usize, stream: &CudaStream) -> Result<u64, CudaError> {
        let bytes = count * size_of::<Draw>();
        if bytes > self.draws.len() {
            self.draws = Scratch::new(bytes.next_power_of_two(), &[], &self.device)?;
        }
        let draws = self.draws.lend();
        // SAFETY: they are this value's memory, sized above; the stream orders this before the launches.
        unsafe { result::memset_d8_async(draws, 0xff, bytes, stream.cu_stream()) }
            .map_err(CudaError::driver("poison the draws"))?;
        Ok(draws)
    }

    /// Launches the draws of this number of what is staged: the rows `part` of the hidden states. Their filters are decided from
    /// lists only where these may be used and may tell of each row; what they were decided from is returned.
    ///
    /// # Safety
    /// As [`DeviceSampler::sample`]; there is room for the draws.
    unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        (params, number): (&[RowParams<'_>], u32),
        part: Range<usize>,
        draws: u64,
        from: FilterSource,
    ) -> Result<FilterSource, CudaError> {
        let rows = self.copy(stream)?;
        self.filters.clear();
        self.filters.extend(part.clone().map(|r| match self.ways[r] {
            // What is staged for nobody is greedy.
            RowRoute::Launched(filters) if number < params[r].draws => filters,
            _ => RowFilters::OFF,
        }));
        if self.filters.iter().all(|filters| *filters == RowFilters::OFF) {
            let hidden = rows_of(hidden, part);
            // SAFETY: the caller's contract; the rows were just copied on the same stream.
            unsafe { self.fused.launch(stream, &hidden, rows, draws, self.staging.kinds()) }?;
            return Ok(FilterSource::Logits);
        }
        let (tokens, most) = (self.fused.tokens(), self.most);
        let (selection, room) = match &mut self.selection {
            Some(selection) => selection,
            none => {
                let selection = DeviceFilters::new(tokens, most.min(rows_within(self.head.weight.rows)), &self.device)?;
                none.insert((selection, Scratch::new(most * size_of::<RowFilters>(), &[], &self.device)?))
            }
        };
        let there = room.lend();
        copy_up(there, bytemuck::cast_slice(&self.filters), stream)?;
        let is_told = |filters: &RowFilters| *filters == RowFilters::OFF || filters.is_listed();
        let by_lists = from == FilterSource::Lists && self.filters.iter().all(is_told) && self.fused.lists(hidden);
        let step = selection.max_rows();
        for first in (0..part.len()).step_by(step) {
            let some = first..(first + step).min(part.len());
            let hidden = rows_of(hidden, part.start + some.start..part.start + some.end);
            let at = |base: u64, size: usize| base + (first * size) as u64;
            let inputs = (at(rows, size_of::<Row>()), at(there, size_of::<RowFilters>()));
            let kinds = FilterKinds::of(&self.filters[some]).with_rows(self.staging.kinds());
            let to = at(draws, size_of::<Draw>());
            // SAFETY: as above, for the filters too; `RowFilters::of` bounds top-k, and rows that are
            // staged greedily for nobody have none; of the others `RowParams::check` takes greedy rows' filters away.
            unsafe {
                if !by_lists || !selection.launch_listed(stream, &mut self.fused, &hidden, inputs, to)? {
                    selection.launch_kinds(stream, &mut self.fused, &hidden, inputs, to, kinds)?;
                }
            }
        }
        Ok(if by_lists { FilterSource::Lists } else { FilterSource::Logits })
    }

    /// Every launch has run.
    pub(super) fn settle(&mut self) {
        self.fused.settle();
        self.inputs.settle();
        self.draws.settle();
        if let Some((selection, room)) = &mut self.selection {
            selection.settle();
            room.settle();
        }
    }
}

/// Some rows of hidden states.
pub(super) fn rows_of(hidden: &DeviceMatrix, which: Range<usize>) -> DeviceMatrix {
    let address = hidden.address + which.start as u64 * hidden.stride_bytes();
    DeviceMatrix { address, rows: which.len(), ..*hidden }
}

/// Copies to memory of [`Scratch`], which has the room.
fn copy_up(to: u64, bytes: &[u8], stream: &CudaStream) -> Result<(), CudaError> {
    let failed = CudaError::driver("copy the rows of a call");
    stream.context().bind_to_thread().map_err(&failed)?;
    // SAFETY: the caller sized the memory; the driver has taken the bytes when this returns, since they are pageable.
    unsafe { result::memcpy_htod_async(to, bytes, stream.cu_stream()) }.map_err(failed)
}

/// Copies draws down, and waits.
pub(super) fn copy_down(draws: &mut [Draw], from: u64, stream: &CudaStream) -> Result<(), CudaError> {
    let failed = CudaError::driver("copy the draws");
    // SAFETY: as many draws lie there; the stream is waited for while they are borrowed.
    unsafe { result::memcpy_dtoh_async(draws, from, stream.cu_stream()) }.map_err(&failed)?;
    stream.synchronize().map_err(CudaError::driver("run the kernels"))
}
