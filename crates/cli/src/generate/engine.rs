//! A model and the sampler of its head.

use super::weights::Weights;
use crate::args::GenerateArgs;
use crate::error::CommandError;
use crate::sampler;
use flash_sampling::{Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_models::{Model, ModelConfig, Run};
use rayon::ThreadPool;

/// A model, the sampler of its head, and the last draws.
pub(super) struct Engine<'s> {
    weights: &'s Weights,
    model: &'s Model<'s>,
    sampler: Box<dyn PerturbedArgmax + 's>,
    /// The threads of `--threads`.
    pool: Option<&'s ThreadPool>,
    pub(super) samples: Samples,
}

impl<'s> Engine<'s> {
    /// Builds the sampler.
    pub(super) fn new(
        args: &GenerateArgs,
        (weights, model, head): (&'s Weights, &'s Model<'s>, Head<'s>),
        plan: Plan,
        pool: Option<&'s ThreadPool>,
    ) -> Result<Self, CommandError> {
        let sampler = sampler::build(head, &args.sampler, plan)?;
        tracing::debug!("{:?}", sampler.capabilities());
        Ok(Engine { weights, model, sampler, pool, samples: Samples::new() })
    }

    pub(super) fn config(&self) -> &'s ModelConfig {
        self.model.config()
    }

    /// Runs the layers; the result is the hidden states `[tokens, hidden]` of all runs.
    pub(super) fn forward(&self, runs: &mut [Run<'_>]) -> Result<Vec<f32>, CommandError> {
        let hidden = match self.pool {
            Some(pool) => pool.install(|| self.model.forward(runs)),
            None => self.model.forward(runs),
        };
        hidden.map_err(|source| self.weights.failed(source))
    }

    /// Draws from `hidden [rows, hidden]` into `samples`.
    pub(super) fn draw(&mut self, hidden: &[f32], rows: &[RowParams<'_>]) -> Result<(), CommandError> {
        let hidden = Matrix::new(hidden, rows.len(), self.config().hidden)?;
        Ok(self.sampler.sample(hidden, rows, &mut self.samples)?)
    }

    /// An error of the model with its folder.
    pub(super) fn failed(&self, source: flash_sampling_models::ModelError) -> CommandError {
        self.weights.failed(source)
    }
}
