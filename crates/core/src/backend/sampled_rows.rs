//! Row summaries from the samples of a sampler, for samplers whose scan does not summarize rows without filters.

use crate::backend::RowSummary;
use crate::error::{RowError, SampleError, Stage, StagedError};
use crate::matrix::Matrix;
use crate::params::{LogprobsMode, RowParams};
use crate::sampler::samples::Samples;
use crate::sampler::{PerturbedArgmax, reuse_vec};

/// Summarizes rows without filters by calls of [`PerturbedArgmax::sample`]. Reuses its memory between calls.
///
/// A row may take up to three samples. A list without replacement that is longer than the sampler's tokens is sampled
/// once more with as many draws as tokens. A row with a bad logit is sampled once more without transforms, to find the
/// logit's [`Stage`].
#[derive(Debug, Default)]
pub struct SampledRows {
    samples: Samples,
    /// The rows of the current sample.
    members: Vec<usize>,
    /// The input of these rows.
    gathered: Vec<u8>,
    /// Empty between calls; only its memory is reused.
    params: Vec<RowParams<'static>>,
}

impl SampledRows {
    /// Fills the draws, masses and largest logits of the rows for which `params_of` returns parameters. Raw
    /// log-probabilities take a [`Scan`](crate::backend::Scan).
    ///
    /// # Errors
    /// The errors of [`sample`](PerturbedArgmax::sample).
    pub fn fill<'a>(
        &mut self,
        sampler: &mut dyn PerturbedArgmax,
        input: Matrix<'_>,
        rows: usize,
        params_of: impl Fn(usize) -> Option<RowParams<'a>>,
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        let drawn = |r| {
            params_of(r).map(|row: RowParams<'a>| {
                let logprobs = row.logprobs.filter(|_| row.logprobs_mode != LogprobsMode::Raw);
                RowParams { logprobs, logprob_token_ids: &[], ranks: false, ..row }
            })
        };
        self.sample(sampler, input, (0..rows).filter_map(|r| Some((r, drawn(r)?))))?;
        let (mut short, mut bad) = (Vec::new(), Vec::new());
        for (at, &r) in self.members.iter().enumerate() {
            let summary = &mut out[r];
            summary.error = None;
            match summary.set_sample(&self.samples, at) {
                Ok(()) => {}
                Err(RowError::SupportTooSmall { available: draws @ 1.., .. }) => {
                    short.extend(drawn(r).map(|row| (r, RowParams { draws, ..row })));
                }
                Err(error) => {
                    let stage = Stage::Transformed;
                    summary.error = (error != RowError::NoFiniteLogit).then_some(StagedError { stage, error });
                    if error.is_bad_logit() {
                        bad.push((r, RowParams { temperature: 0.0, ..RowParams::default() }));
                    }
                }
            }
        }
        if !short.is_empty() {
            self.sample(sampler, input, short.into_iter())?;
            for (at, &r) in self.members.iter().enumerate() {
                let found = out[r].set_sample(&self.samples, at);
                out[r].error = found.err().map(|error| StagedError { stage: Stage::Transformed, error });
            }
        }
        if !bad.is_empty() {
            self.sample(sampler, input, bad.into_iter())?;
            for (at, &r) in self.members.iter().enumerate() {
                let is_raw = self.samples.row(at).is_err_and(|error| error.is_bad_logit());
                if let (true, Some(error)) = (is_raw, &mut out[r].error) {
                    error.stage = Stage::Raw;
                }
            }
        }
        Ok(())
    }

    /// Samples some rows of the input.
    fn sample<'a>(
        &mut self,
        sampler: &mut dyn PerturbedArgmax,
        input: Matrix<'_>,
        rows: impl Iterator<Item = (usize, RowParams<'a>)>,
    ) -> Result<(), SampleError> {
        let mut params = reuse_vec(core::mem::take(&mut self.params));
        self.members.clear();
        for (r, row) in rows {
            self.members.push(r);
            params.push(row);
        }
        self.samples.clear();
        let sampled = if params.is_empty() {
            Ok(())
        } else if params.len() == input.rows() {
            sampler.sample(input, &params, &mut self.samples)
        } else {
            self.gathered.clear();
            self.members.iter().for_each(|&r| self.gathered.extend_from_slice(input.row_bytes(r)));
            let some = Matrix::from_bytes(&self.gathered, input.dtype(), params.len(), input.cols(), input.cols());
            match some {
                Ok(some) => sampler.sample(some, &params, &mut self.samples),
                Err(source) => Err(SampleError::Backend { backend: "core", source: source.into() }),
            }
        };
        self.params = reuse_vec(params);
        sampled
    }
}
