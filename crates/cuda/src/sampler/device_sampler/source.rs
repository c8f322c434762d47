//! Launches over hidden states in device memory.

use crate::abi::{DeviceAddress, Draw, Row, RowFilters};
use crate::device::gpu::Device;
use crate::device::launch::Queue;
use crate::device::matrix::DeviceMatrix;
use crate::device::results;
use crate::device::scratch::Scratch;
use crate::device::tiled::DeviceTiled;
use crate::error::CudaError;
use crate::sampler::row_scan::{CallRows, DrawItem, FilterSource, LogitSource, idle};
use crate::sampler::staging::Staging;
use crate::selection::filtered::{DeviceFilters, FilterKinds, FilteredRows, rows_within};
use crate::selection::queries::CanonicalInputs;
use crate::selection::stored_rows::{StoredRows, SummaryInput};
use core::mem::take;
use core::ops::Range;
use cudarc::driver::CudaStream;
use flash_sampling_core::backend::Adjustments;
use std::sync::Arc;

/// The kernels over a head in device memory, and memory for the rows and draws of a call.
#[derive(Debug)]
pub(super) struct DeviceLaunches {
    pub(super) fused: DeviceTiled,
    /// Filters, and room for those of a launch; made when the first of them come.
    pub(super) selection: Option<(DeviceFilters, Scratch)>,
    pub(super) weight_rows: usize,
    /// Rows of a launch.
    pub(super) most: usize,
    pub(super) staging: Staging,
    pub(super) adjustments: Adjustments,
    pub(super) inputs: Scratch,
    pub(super) draws: Scratch,
    pub(super) filters: Vec<RowFilters>,
    /// Of each launched row, the item whose draw it makes.
    pub(super) slots: Vec<Option<usize>>,
    /// Of each launch its first row, and its slots.
    pub(super) plans: Vec<(usize, Range<usize>)>,
    pub(super) results: Vec<Draw>,
    pub(super) device: Arc<Device>,
}

impl DeviceLaunches {
    fn most_filtered(&self) -> usize {
        self.most.min(rows_within(self.weight_rows))
    }

    /// Stages neighbouring rows: row `first + i` makes the draw of the item `slots[i]`; without one it is drawn greedily
    /// and without transforms, for nobody.
    fn stage(
        &mut self,
        rows: &CallRows<'_, '_>,
        first: usize,
        items: &[DrawItem],
        slots: &[Option<usize>],
    ) -> Result<(), CudaError> {
        self.staging.clear();
        self.filters.clear();
        for (r, slot) in (first..).zip(slots) {
            let item = slot.map(|i| items[i]);
            self.filters.push(item.map_or(RowFilters::OFF, |item| item.filters));
            match item {
                None => self.staging.push(&idle(), &rows.raw()?, [0])?,
                Some(item) => {
                    let row = rows.adjusted(r, &mut self.adjustments, self.fused.tokens())?;
                    self.staging.push(&rows.batch.params[r], &row, [item.draw])?;
                }
            }
        }
        Ok(())
    }

    /// Copies what is staged up; returns the address of the rows.
    fn copy(&mut self, queue: Queue<'_>) -> Result<DeviceAddress<Row>, CudaError> {
        if self.staging.len() > self.inputs.len() {
            self.inputs = Scratch::new(self.staging.len().next_power_of_two(), &[], &self.device)?;
        }
        let base = self.inputs.lend();
        queue.copy_up(self.staging.finish(base), base)?;
        Ok(base.add(self.staging.rows_at()).cast())
    }

    /// Room for draws that no kernel has written.
    fn poisoned_draws(&mut self, count: usize, queue: Queue<'_>) -> Result<DeviceAddress<Draw>, CudaError> {
        let bytes = count * size_of::<Draw>();
        if bytes > self.draws.len() {
            self.draws = Scratch::new(bytes.next_power_of_two(), &[], &self.device)?;
        }
        let draws = self.draws.lend();
        results::poison(draws, count, queue)?;
        Ok(draws)
    }

    /// Copies the draws of all launches down to `results`, and waits.
    fn copy_down(&mut self, count: usize, queue: Queue<'_>) -> Result<(), CudaError> {
        self.results.clear();
        self.results.resize(count, Draw::default());
        queue.copy_down(self.draws.lend(), &mut self.results)?;
        results::written(&self.results)?;
        self.fused.settle();
        self.inputs.settle();
        self.draws.settle();
        if let Some((selection, room)) = &mut self.selection {
            selection.settle();
            room.settle();
        }
        Ok(())
    }
}

/// The launches of a call over its hidden states.
#[derive(Debug)]
pub(super) struct DeviceInputs<'s> {
    pub(super) launches: &'s mut DeviceLaunches,
    pub(super) queue: Queue<'s>,
    pub(super) hidden: &'s DeviceMatrix,
    /// For stored logits: the stream, and whether the hidden states are there for it.
    pub(super) own: &'s Arc<CudaStream>,
    pub(super) own_queue: Queue<'s>,
    pub(super) is_ready: bool,
}

impl<'s> DeviceInputs<'s> {
    /// Makes the draws of items by ascending rows: launches over neighbouring rows, as many as the most draws of a row of
    /// them. Waits once.
    fn launch_all(
        &mut self,
        rows: &CallRows<'_, '_>,
        items: &[DrawItem],
        from: Option<FilterSource>,
        draws: &mut Vec<Draw>,
    ) -> Result<(), CudaError> {
        let most = if from.is_some() { self.launches.most_filtered() } else { self.launches.most };
        let (mut plans, mut slots) = (take(&mut self.launches.plans), take(&mut self.launches.slots));
        plans.clear();
        slots.clear();
        let mut rest = 0;
        while let Some(first) = items.get(rest).map(|item| item.row) {
            let part = rest..rest + items[rest..].partition_point(|item| item.row < first + most);
            rest = part.end;
            let count = items[part.end - 1].row - first + 1;
            let mut number = 0;
            // The items of a row are neighbours: the draw with number `n` of a row is `n` behind its first.
            loop {
                let at = slots.len();
                slots.resize(at + count, None);
                let mut begin = part.start;
                while begin < part.end {
                    let row = items[begin].row;
                    let end = begin + items[begin..part.end].partition_point(|item| item.row == row);
                    slots[at + row - first] = Some(begin + number).filter(|&i| i < end);
                    begin = end;
                }
                if slots[at..].iter().all(Option::is_none) {
                    slots.truncate(at);
                    break;
                }
                plans.push((first, at..at + count));
                number += 1;
            }
        }
        let launched = self.launch_plans(rows, items, from, &plans, &slots);
        if launched.is_ok() {
            draws.clear();
            draws.resize(items.len(), Draw::default());
            let made = slots.iter().zip(&self.launches.results);
            made.for_each(|(slot, draw)| slot.iter().for_each(|&i| draws[i] = *draw));
        }
        (self.launches.plans, self.launches.slots) = (plans, slots);
        launched
    }

    fn launch_plans(
        &mut self,
        rows: &CallRows<'_, '_>,
        items: &[DrawItem],
        from: Option<FilterSource>,
        plans: &[(usize, Range<usize>)],
        slots: &[Option<usize>],
    ) -> Result<(), CudaError> {
        let to = self.launches.poisoned_draws(slots.len(), self.queue)?;
        for (first, own) in plans {
            self.launches.stage(rows, *first, items, &slots[own.clone()])?;
            let there = self.launches.copy(self.queue)?;
            let hidden = self.hidden.rows(*first..first + own.len());
            let to = to.add(own.start);
            let kinds = self.launches.staging.kinds();
            let Some(from) = from else {
                self.launches.fused.enqueue(self.queue, &hidden, (there, to), kinds)?;
                continue;
            };
            let filters = self.copy_filters()?;
            let DeviceLaunches { fused, selection: Some((selection, _)), filters: of_rows, .. } = &mut *self.launches
            else {
                continue;
            };
            let (queue, rows) = (self.queue, FilteredRows { rows: there, filters, draws: to });
            let listed = from == FilterSource::Lists && selection.enqueue_listed(queue, fused, &hidden, rows)?;
            if !listed {
                let kinds = FilterKinds::of(of_rows).with_rows(kinds);
                selection.enqueue_kinds(queue, fused, &hidden, rows, kinds)?;
            }
        }
        self.launches.copy_down(slots.len(), self.queue)?;
        self.is_ready = true;
        Ok(())
    }

    /// Copies the filters of what is staged up; returns their address.
    fn copy_filters(&mut self) -> Result<DeviceAddress<RowFilters>, CudaError> {
        let most = self.launches.most_filtered();
        let DeviceLaunches { fused, selection, filters, device, .. } = &mut *self.launches;
        let (_, room) = match selection {
            Some(selection) => selection,
            none => {
                let room = Scratch::new(most * size_of::<RowFilters>(), &[], device)?;
                none.insert((DeviceFilters::new(fused.tokens(), most, device)?, room))
            }
        };
        let there = room.lend();
        self.queue.copy_up(filters, there)?;
        Ok(there)
    }
}

impl LogitSource for DeviceInputs<'_> {
    fn draw(&mut self, rows: &CallRows<'_, '_>, items: &[DrawItem], draws: &mut Vec<Draw>) -> Result<(), CudaError> {
        self.launch_all(rows, items, None, draws)
    }

    fn most_filtered(&self) -> usize {
        self.launches.most_filtered()
    }

    fn has_lists(&self, _: &CallRows<'_, '_>) -> bool {
        self.launches.fused.lists(self.hidden)
    }

    fn draw_filtered(
        &mut self,
        rows: &CallRows<'_, '_>,
        items: &[DrawItem],
        from: FilterSource,
        draws: &mut Vec<Draw>,
    ) -> Result<(), CudaError> {
        self.launch_all(rows, items, Some(from), draws)
    }

    fn most_stored(&self) -> usize {
        self.launches.most
    }

    fn store(
        &mut self,
        rows: &CallRows<'_, '_>,
        which: &[usize],
        is_raw: bool,
        stored: &mut StoredRows,
        draws: &mut Vec<Draw>,
    ) -> Result<Option<CanonicalInputs>, CudaError> {
        if !self.is_ready {
            // The logits are stored on another stream.
            self.own.join(self.queue.stream()).map_err(CudaError::driver("wait for the hidden states"))?;
            self.is_ready = true;
        }
        let to = self.launches.poisoned_draws(which.len(), self.own_queue)?;
        let DeviceLaunches { staging, adjustments, fused, .. } = &mut *self.launches;
        staging.clear();
        for &r in which {
            match is_raw {
                true => staging.push(&idle(), &rows.raw()?, [0])?,
                false => {
                    let row = rows.adjusted(r, adjustments, fused.tokens())?;
                    staging.push(&rows.batch.params[r], &row, [row.first_draw])?;
                }
            }
        }
        let there = self.launches.copy(self.own_queue)?;
        let features = self.launches.staging.kinds();
        let (mut at, mut is_transformed) = (0, false);
        for run in which.chunk_by(|a, b| a + 1 == *b) {
            let hidden = self.hidden.rows(run[0]..run[0] + run.len());
            let of_rows = (there.add(at), to.add(at));
            let place = stored.place(at, self.own);
            let fused = &mut self.launches.fused;
            is_transformed = fused.enqueue_storing_fast(self.own_queue, &hidden, of_rows, features, place)?;
            at += run.len();
        }
        let rows = if is_transformed { DeviceAddress::NULL } else { there };
        stored.summarize(&SummaryInput { rows, ..SummaryInput::default() }, self.own)?;
        self.launches.copy_down(which.len(), self.own_queue)?;
        draws.clone_from(&self.launches.results);
        Ok(None)
    }

    fn stores_draws(&self) -> bool {
        true
    }
}
