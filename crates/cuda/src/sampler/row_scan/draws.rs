//! The draws of a pass: their launches, and their results for rows.

use super::source::DrawItem;
use crate::abi::{Draw, RowFilters, status};
use flash_sampling_core::backend::{Candidate, Progress, RowSummary, Stage, StagedError, Winner};
use flash_sampling_core::{RowError, backend};

/// The draws of a pass, grouped by launch.
#[derive(Debug, Default)]
pub(crate) struct DrawItems {
    pub(crate) plain: Vec<DrawItem>,
    /// Draws with filters that lists may decide.
    pub(crate) listed: Vec<DrawItem>,
    /// Draws with filters that need stored logits.
    pub(crate) by_logits: Vec<DrawItem>,
    /// The results of a launch.
    pub(crate) draws: Vec<Draw>,
}

impl DrawItems {
    pub(crate) fn clear(&mut self) {
        [&mut self.plain, &mut self.listed, &mut self.by_logits].into_iter().for_each(Vec::clear);
    }
}

/// Converts a kernel's draw to a candidate, or to the row's error.
pub(crate) fn candidate(draw: &Draw) -> Result<Candidate, RowError> {
    match draw.status {
        status::DRAWN => Ok(Candidate { winner: Winner::new(draw.score, draw.token), logit: draw.logit }),
        status::NAN => Err(RowError::NaN { token: draw.token }),
        status::POSITIVE_INFINITY => Err(RowError::PositiveInfinity { token: draw.token }),
        _ => Err(RowError::NoFiniteLogit),
    }
}

/// The row's bad logit, if any. A row without a finite logit is no error: other shards may have finite logits.
pub(crate) fn bad_logit(draw: &Draw) -> Option<StagedError> {
    let error = candidate(draw).err().filter(RowError::is_bad_logit)?;
    let stage = if draw.score == 0.0 { Stage::Raw } else { Stage::Transformed };
    Some(StagedError { stage, error })
}

/// The filters of a row, if the selection kernels support them and the row requests only draws.
pub(crate) fn quick_filters(row: &backend::Row<'_>) -> Option<RowFilters> {
    let draws_only = !row.kept && !row.without_replacement && row.logprobs.is_none();
    row.filters.as_ref().filter(|_| draws_only).and_then(RowFilters::of)
}

/// Writes the draws of rows, or the bad logits of rows.
pub(crate) fn write_draws(items: &[DrawItem], draws: &[Draw], out: &mut [RowSummary]) {
    for (item, draw) in items.iter().zip(draws) {
        let out = &mut out[item.row];
        match bad_logit(draw) {
            Some(error) => out.error = Some(error),
            None if draw.status == status::UNDECIDED => out.progress = Progress::Open,
            None => out.draws.extend(candidate(draw)),
        }
    }
}

/// Marks as many rows as draws read the whole weight in spite of a shadow. Only the number of marked rows is right, not
/// which rows they are.
pub(crate) fn mark_fallbacks(items: &[DrawItem], draws: usize, out: &mut [RowSummary]) {
    items.chunk_by(|a, b| a.row == b.row).take(draws).for_each(|same| out[same[0].row].is_fallback = true);
}

/// Turns the draws of a row with filters into the row's result, unless the row is undecided.
pub(crate) fn decide(out: &mut RowSummary) {
    if out.progress == Progress::Summarized {
        out.progress = Progress::Decided;
        out.result.begin();
        core::mem::swap(&mut out.result.draws, &mut out.draws);
        let is_drawn = !out.result.draws.is_empty();
        out.result.outcome = Some(if is_drawn { Ok(()) } else { Err(RowError::NoFiniteLogit) });
    }
}
