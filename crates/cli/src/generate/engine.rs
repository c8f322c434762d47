//! A model and the sampler of its head.

use super::weights::Weights;
use crate::args::GenerateArgs;
use crate::error::CommandError;
use crate::sampler;
use flash_sampling::{Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_models::{Model, ModelConfig, ModelError, Run};

/// A model, the sampler of its head, and the last draws.
pub(super) struct Engine<'s> {
    weights: &'s Weights,
    model: &'s Model<'s>,
    sampler: Box<dyn PerturbedArgmax + 's>,
    pub(super) samples: Samples,
}

impl<'s> Engine<'s> {
    pub(super) fn new(
        args: &GenerateArgs,
        (weights, model, head): (&'s Weights, &'s Model<'s>, Head<'s>),
        plan: Plan,
    ) -> Result<Self, CommandError> {
        let sampler = sampler::build(head, &args.sampler, plan)?;
        tracing::debug!("{:?}", sampler.capabilities());
        Ok(Engine { weights, model, sampler, samples: Samples::new() })
    }

    pub(super) fn config(&self) -> &'s ModelConfig {
        self.model.config()
    }

    /// Runs the layers; the result is the hidden states `[tokens, hidden]` of all runs.
    pub(super) fn forward(&self, runs: &mut [Run<'_>]) -> Result<Vec<f32>, CommandError> {
        self.model.forward(runs).map_err(|source| self.weights.failed(source))
    }

    /// Draws from `hidden [rows, hidden]` into `samples`.
    pub(super) fn draw(&mut self, hidden: &[f32], rows: &[RowParams<'_>]) -> Result<(), CommandError> {
        let hidden = Matrix::new(hidden, rows.len(), self.config().hidden)?;
        Ok(self.sampler.sample(hidden, rows, &mut self.samples)?)
    }

    /// Refuses a prompt that leaves no position for a token.
    pub(super) fn check_length(&self, prompt: &[u32]) -> Result<(), CommandError> {
        let (length, limit) = (prompt.len() + 1, self.config().max_positions);
        if length > limit { Err(self.weights.failed(ModelError::TooLong { length, limit })) } else { Ok(()) }
    }
}
