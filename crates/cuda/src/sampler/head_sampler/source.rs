//! The launches of a call over a head in device memory.

use super::hidden_states::HiddenStates;
use super::kernels::HeadKernels;
use super::launch_plan::{LaunchPlan, PlannedLaunch};
use crate::abi::{Draw, RowFilters};
use crate::device::Queue;
use crate::error::CudaError;
use crate::sampler::{CallRows, DrawItem, FilterSource, LogitSource, Staging, idle};
use crate::selection::{CanonicalInputs, StoredRows};
use core::ops::Range;
use cudarc::driver::CudaStream;
use flash_sampling_core::Head;
use flash_sampling_core::backend::canonical::norm;
use flash_sampling_core::backend::{Adjustments, RowScoreBound, ScoreBound};
use std::sync::Arc;

/// The rows of launches on the host, and their results. Reuses its memory between calls.
#[derive(Debug)]
pub(super) struct LaunchRows {
    pub(super) staging: Staging,
    adjustments: Adjustments,
    pub(super) filters: Vec<RowFilters>,
    pub(super) plan: LaunchPlan,
    pub(super) results: Vec<Draw>,
}

impl LaunchRows {
    pub(super) fn new(staging: Staging) -> Self {
        let (adjustments, plan) = (Adjustments::default(), LaunchPlan::default());
        LaunchRows { staging, adjustments, filters: Vec::new(), plan, results: Vec::new() }
    }

    /// Plans launches of up to `most` draws for items with ascending rows, and makes room for the items' draws.
    pub(super) fn plan(&mut self, items: &[DrawItem], most: usize, hidden: HiddenStates<'_>, draws: &mut Vec<Draw>) {
        match hidden {
            HiddenStates::Host(_) => self.plan.plan_copies(items, most),
            HiddenStates::Device(_) => self.plan.plan_neighbours(items, most),
        }
        draws.clear();
        draws.resize(items.len(), Draw::default());
    }

    /// Stages the rows of a launch. A row without an item is greedy and has no transforms.
    pub(super) fn stage(
        &mut self,
        rows: &CallRows<'_, '_>,
        items: &[DrawItem],
        launch: &PlannedLaunch,
    ) -> Result<(), CudaError> {
        self.staging.clear();
        self.filters.clear();
        let tokens = self.staging.tokens();
        let is_same =
            |a: &Option<usize>, b: &Option<usize>| a.zip(*b).is_some_and(|(a, b)| items[a].row == items[b].row);
        for draws in self.plan.slots[launch.slots.clone()].chunk_by(is_same) {
            let Some(item) = draws[0].map(|i| &items[i]) else {
                self.staging.push_of(launch.first, &idle(), &rows.raw()?, [0])?;
                self.filters.push(RowFilters::OFF);
                continue;
            };
            let row = rows.adjusted(item.row, &mut self.adjustments, tokens.clone())?;
            let draws = || draws.iter().flatten().map(|&i| items[i]);
            self.staging.push_of(item.row, &rows.batch.params[item.row], &row, draws().map(|item| item.draw))?;
            self.filters.extend(draws().map(|item| item.filters));
        }
        Ok(())
    }

    /// Writes the results of launches to the draws of items.
    pub(super) fn write(&self, slots: Range<usize>, draws: &mut [Draw]) {
        let made = self.plan.slots[slots].iter().zip(&self.results);
        made.for_each(|(slot, draw)| slot.iter().for_each(|&i| draws[i] = *draw));
    }
}

/// The head, error bounds and a hidden state of a canonical plan.
#[derive(Debug)]
pub(super) struct CanonicalBounds<'w> {
    pub(super) head: Head<'w>,
    pub(super) bounds: ScoreBound,
    pub(super) hidden: Vec<f32>,
}

/// The kernels of a head with the hidden states of a call.
#[derive(Debug)]
pub(super) struct HeadSource<'s, 'w> {
    pub(super) kernels: &'s mut HeadKernels,
    pub(super) rows: &'s mut LaunchRows,
    pub(super) hidden: HiddenStates<'s>,
    /// The queue for draws.
    pub(super) queue: Queue<'s>,
    /// The stream for stored logits; and whether the hidden states are complete for this stream.
    pub(super) stream: &'s Arc<CudaStream>,
    pub(super) is_ready: &'s mut bool,
    pub(super) canonical: Option<&'s mut CanonicalBounds<'w>>,
}

impl LogitSource for HeadSource<'_, '_> {
    /// Waits as few times as the room for results allows.
    fn draw(
        &mut self,
        call: &CallRows<'_, '_>,
        items: &[DrawItem],
        from: Option<FilterSource>,
        draws: &mut Vec<Draw>,
    ) -> Result<usize, CudaError> {
        let HeadSource { kernels, rows, hidden, queue, .. } = self;
        let (hidden, queue) = (*hidden, *queue);
        // A later launch draws and counts the rows that lists do not decide.
        let fallbacks = |kernels: &HeadKernels| match from {
            Some(FilterSource::Lists) => kernels.draws_by_weight,
            _ => kernels.fallback_draws(),
        };
        let before = fallbacks(kernels);
        let most = if from.is_some() { kernels.max_filtered() } else { kernels.max_draws() };
        rows.plan(items, most, hidden, draws);
        // The launched slots whose results are not copied.
        let mut pending = 0..0;
        for at in 0..=rows.plan.launches.len() {
            let launch = rows.plan.launches.get(at).cloned();
            if launch.as_ref().is_none_or(|launch| launch.slots.end - pending.start > kernels.max_results()) {
                kernels.finish(queue, pending.len(), &mut rows.results)?;
                rows.write(pending.clone(), draws);
                pending.start = pending.end;
            }
            let Some(launch) = launch else { break };
            rows.stage(call, items, &launch)?;
            let at = launch.slots.start - pending.start;
            kernels.launch(queue, rows, hidden, (&launch, at), from, None)?;
            pending.end = launch.slots.end;
        }
        *self.is_ready = true;
        Ok(fallbacks(kernels).wrapping_sub(before) as usize)
    }

    fn max_filtered(&self) -> usize {
        self.kernels.max_filtered()
    }

    fn has_lists(&self) -> bool {
        self.kernels.can_list(self.hidden)
    }

    fn max_stored(&self) -> usize {
        self.kernels.max_draws()
    }

    fn store(
        &mut self,
        rows: &CallRows<'_, '_>,
        which: &[usize],
        is_raw: bool,
        stored: &mut StoredRows,
        draws: &mut Vec<Draw>,
    ) -> Result<Option<CanonicalInputs>, CudaError> {
        if !*self.is_ready {
            self.stream.join(self.queue.stream()).map_err(CudaError::driver("wait for the hidden states"))?;
            *self.is_ready = true;
        }
        let LaunchRows { staging, adjustments, .. } = &mut *self.rows;
        rows.stage_first(which, is_raw, adjustments, staging)?;
        let (is_canonical, stream) = (self.canonical.is_some(), self.stream);
        let inputs = self.kernels.store(staging, self.hidden, which, is_canonical, stored, stream)?;
        self.kernels.finish(HeadKernels::queue(stream), which.len(), draws)?;
        Ok(Some(inputs))
    }

    fn stores_draws(&self) -> bool {
        true
    }

    fn score_bound(&mut self, rows: &CallRows<'_, '_>, r: usize) -> Result<Option<RowScoreBound>, CudaError> {
        let Some(CanonicalBounds { head, bounds, hidden }) = self.canonical.as_deref_mut() else { return Ok(None) };
        let input = &rows.batch.input;
        hidden.resize(input.cols(), 0.0);
        input.row_to_f32(r, hidden);
        let row = rows.adjusted(r, &mut self.rows.adjustments, head.tokens())?;
        Ok(Some(bounds.row(head, &row, norm(hidden))))
    }
}
