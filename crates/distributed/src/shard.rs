//! One local shard and its last answers.

use crate::filtered::kept_list;
use crate::rows::{Batch, surveyed};
use crate::stage::{Stage, is_bad_logit};
use crate::summary::ShardSummary;
use crate::tiling::Whole;
use core::fmt;
use flash_sampling_core::sampler::recycle;
use flash_sampling_core::{
    Inquiry, LogprobsMode, Matrix, PerturbedArgmax, RowError, RowParams, RowSurvey, SampleError, Samples,
};

/// A shard and its last answers; keeps its memory from call to call.
pub(crate) struct Shard<'s> {
    sampler: Box<dyn PerturbedArgmax + 's>,
    answers: Samples,
    /// Where `answers` has each row; nowhere if it has filters.
    at: Vec<Option<usize>>,
    /// What the last pass told of rows with filters.
    surveys: Vec<RowSurvey>,
    inquiries: Vec<Inquiry<'static>>,
    /// Rows that were asked again with fewer draws, ascending, and the answers.
    again: Vec<usize>,
    again_answers: Samples,
    /// Rows with a bad logit, ascending, and what tells its stage.
    bad: Vec<usize>,
    bad_answers: Samples,
    /// Some rows of the input.
    gathered: Vec<u8>,
    /// Only the memory lives from call to call.
    params: Vec<RowParams<'static>>,
}

impl<'s> Shard<'s> {
    pub(crate) fn new(sampler: Box<dyn PerturbedArgmax + 's>) -> Self {
        Shard {
            sampler,
            answers: Samples::new(),
            at: Vec::new(),
            surveys: Vec::new(),
            inquiries: Vec::new(),
            again: Vec::new(),
            again_answers: Samples::new(),
            bad: Vec::new(),
            bad_answers: Samples::new(),
            gathered: Vec::new(),
            params: Vec::new(),
        }
    }

    /// Asks the shard for its summaries, `input [rows, hidden]`: the draws of rows without filters, and the overviews of
    /// rows with filters or raw log-probabilities. Calls that need both read the weight once for each.
    ///
    /// A shard with fewer tokens than a list without replacement has draws refuses, though the other shards may well
    /// fill the list. It is asked for all it has, in one more call for all such rows. One more call is for rows with a bad
    /// logit, whose stage it tells.
    pub(crate) fn ask(&mut self, batch: &Batch<'_, '_>, whole: &Whole) -> Result<(), SampleError> {
        let Batch { input, params, rows } = *batch;
        self.again.clear();
        self.at.clear();
        self.gathered.clear();
        self.inquiries.clear();
        let mut asked = recycle(core::mem::take(&mut self.params));
        for (params, row) in params.iter().zip(rows) {
            // Rows with invalid parameters get their error from the sampler.
            let plain = row.as_ref().map_or(true, |row| row.filters.is_none());
            self.at.push(plain.then_some(asked.len()));
            asked.extend(plain.then(|| asks(params, whole)));
            self.inquiries.push(if surveyed(row).is_some() { Inquiry::Overview } else { Inquiry::Nothing });
        }
        if asked.len() == rows.len() {
            self.sampler.sample(input, &asked, &mut self.answers)?;
        } else {
            self.answers.clear();
            if !asked.is_empty() {
                let plain = self.at.iter().enumerate().filter(|(_, at)| at.is_some());
                plain.for_each(|(r, _)| self.gathered.extend_from_slice(input.row_bytes(r)));
                let some = part(&self.gathered, &input, asked.len())?;
                self.sampler.sample(some, &asked, &mut self.answers)?;
            }
        }
        self.overview(input, params)?;
        asked.clear();
        self.gathered.clear();
        for (r, row) in params.iter().enumerate() {
            let Some(at) = self.at[r] else { continue };
            if let Err(RowError::SupportTooSmall { available: draws @ 1.., .. }) = self.answers.row(at) {
                self.again.push(r);
                self.gathered.extend_from_slice(input.row_bytes(r));
                asked.push(RowParams { draws, ..asks(row, whole) });
            }
        }
        if !self.again.is_empty() {
            let some = part(&self.gathered, &input, self.again.len())?;
            self.sampler.sample(some, &asked, &mut self.again_answers)?;
        }
        asked.clear();
        self.find_stages(input, &mut asked)?;
        self.params = recycle(asked);
        Ok(())
    }

    /// Asks for the stage of every bad logit.
    fn find_stages<'a>(&mut self, input: Matrix<'_>, asked: &mut Vec<RowParams<'a>>) -> Result<(), SampleError> {
        self.bad.clear();
        self.gathered.clear();
        for (r, at) in self.at.iter().enumerate() {
            let drawn = at.and_then(|at| self.answers.row(at).err());
            let surveyed = match self.inquiries[r] {
                Inquiry::Nothing => None,
                _ => self.surveys[r].error,
            };
            if drawn.or(surveyed).is_some_and(|error| is_bad_logit(&error)) {
                self.bad.push(r);
                self.gathered.extend_from_slice(input.row_bytes(r));
                asked.push(Stage::question());
            }
        }
        if self.bad.is_empty() {
            return Ok(());
        }
        let some = part(&self.gathered, &input, self.bad.len())?;
        self.sampler.sample(some, asked, &mut self.bad_answers)
    }

    /// The stage of the bad logit that a row's error names.
    pub(crate) fn stage(&self, row: usize) -> Stage {
        self.bad.binary_search(&row).map_or(Stage::default(), |at| Stage::of(&self.bad_answers.row(at)))
    }

    /// Surveys the rows that take it.
    fn overview(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>]) -> Result<(), SampleError> {
        if self.inquiries.iter().all(|inquiry| *inquiry == Inquiry::Nothing) {
            return Ok(());
        }
        let inquiries = core::mem::take(&mut self.inquiries);
        self.surveys.resize_with(rows.len().max(self.surveys.len()), RowSurvey::default);
        let looked = self.look(input, rows, &inquiries);
        self.inquiries = inquiries;
        looked
    }

    /// A pass for the rows that an inquiry is made about.
    pub(crate) fn look(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        inquiries: &[Inquiry<'_>],
    ) -> Result<(), SampleError> {
        match self.sampler.survey() {
            Some(survey) => survey.survey(input, rows, inquiries, &mut self.surveys),
            // It had one when the shards met.
            None => Err(SampleError::Backend { backend: "distributed", source: "the shard has no surveys".into() }),
        }
    }

    /// Gives the memory of long lists back.
    pub(crate) fn trim(&mut self, rows: usize) {
        self.surveys.iter_mut().for_each(|survey| survey.trim(kept_list(rows)));
    }

    /// What the last pass told of a row that takes surveys.
    pub(crate) fn survey(&self, row: usize) -> &RowSurvey {
        &self.surveys[row]
    }

    /// The answer for a row of the last call that has no filters.
    pub(crate) fn summary(&self, row: usize) -> ShardSummary<'_> {
        match self.again.binary_search(&row) {
            Ok(at) => self.again_answers.row(at),
            Err(_) => self.at[row].map_or(Err(RowError::NoFiniteLogit), |at| self.answers.row(at)),
        }
    }
}

impl fmt::Debug for Shard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (can, shape) = (self.sampler.capabilities(), self.sampler.shape());
        f.debug_struct("Shard").field("capabilities", &can).field("shape", &shape).finish_non_exhaustive()
    }
}

/// What the sampler is asked for a row without filters: not for raw log-probabilities, of which surveys tell.
fn asks<'a>(row: &RowParams<'a>, whole: &Whole) -> RowParams<'a> {
    let is_raw = row.logprobs_mode == LogprobsMode::Raw;
    whole.merge.asks(&RowParams { logprobs: row.logprobs.filter(|_| !is_raw), ..*row })
}

/// Some rows of an input.
fn part<'b>(bytes: &'b [u8], input: &Matrix<'_>, rows: usize) -> Result<Matrix<'b>, SampleError> {
    let some = Matrix::from_bytes(bytes, input.dtype(), rows, input.cols(), input.cols());
    some.map_err(|source| SampleError::Backend { backend: "distributed", source: source.into() })
}
