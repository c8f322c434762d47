//! Sequences that are written side by side.

use super::load::{Language, Weights};
use super::report::Report;
use super::sequence::{End, Sequence};
use super::text::TextStream;
use crate::args::GenerateArgs;
use crate::error::CommandError;
use flash_sampling::{History, Matrix, PerturbedArgmax, RowParams, Samples};
use flash_sampling_models::{Cache, Model, ModelError, Run};
use rayon::ThreadPool;
use std::time::Instant;

/// What all sequences share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context<'s> {
    pub(super) args: &'s GenerateArgs,
    pub(super) weights: &'s Weights,
    pub(super) model: &'s Model<'s>,
    pub(super) language: &'s Language,
    /// The threads that were asked for.
    pub(super) pool: Option<&'s ThreadPool>,
}

impl Context<'_> {
    /// The layers.
    fn forward(&self, runs: &mut [Run<'_>]) -> Result<Vec<f32>, CommandError> {
        let hidden = match self.pool {
            Some(pool) => pool.install(|| self.model.forward(runs)),
            None => self.model.forward(runs),
        };
        hidden.map_err(|source| self.weights.failed(source))
    }

    /// Whether a sequence ends with the token that was drawn. The model's own end is not written.
    fn end(&self, sequence: &mut Sequence<'_>, token: u32) -> Result<Option<End>, CommandError> {
        let config = self.model.config();
        if config.eos.contains(&token) || sequence.stream.push(token, |tokens| self.language.decode(tokens))? {
            return Ok(Some(End::Stop));
        }
        let written = sequence.history.output().len();
        let full = written >= self.args.text.max_tokens as usize || sequence.len() >= config.max_positions;
        Ok(full.then_some(End::Length))
    }
}

/// A batch in which sequences end one by one.
#[derive(Debug)]
pub(super) struct Batch<'s> {
    context: Context<'s>,
    sequences: Vec<Sequence<'s>>,
    /// The sequences that go on, and the hidden states that their next tokens are drawn from, `[going, hidden]`.
    going: Vec<usize>,
    hidden: Vec<f32>,
    samples: Samples,
}

impl<'s> Batch<'s> {
    /// Runs the prompt once; every sequence goes on from there.
    pub(super) fn start(context: Context<'s>, prompt: &[u32], report: &mut Report) -> Result<Self, CommandError> {
        let at = Instant::now();
        let config = context.model.config();
        if prompt.len() >= config.max_positions {
            let error = ModelError::TooLong { length: prompt.len() + 1, limit: config.max_positions };
            return Err(context.weights.failed(error));
        }
        let mut cache = Cache::new(config);
        let hidden = context.forward(&mut [Run { cache: &mut cache, tokens: prompt }])?;
        let count = context.args.text.num_sequences as usize;
        let sequence = |at: usize| Sequence {
            seed: context.args.draws.seed + at as u64,
            history: History::new(prompt),
            cache: cache.clone(),
            stream: TextStream::after(prompt, &context.args.text.stop),
            logprobs: Vec::new(),
            end: None,
        };
        let sequences = (0..count).map(sequence).collect();
        report.prompt = at.elapsed();
        let hidden = hidden[hidden.len() - config.hidden..].repeat(count);
        Ok(Batch { context, sequences, going: (0..count).collect(), hidden, samples: Samples::new() })
    }

    /// Whether a sequence goes on.
    pub(super) fn is_going(&self) -> bool {
        !self.going.is_empty()
    }

    pub(super) fn sequences(&self) -> &[Sequence<'s>] {
        &self.sequences
    }

    /// A token for every sequence that goes on.
    pub(super) fn step(&mut self, sampler: &mut dyn PerturbedArgmax, report: &mut Report) -> Result<(), CommandError> {
        let at = Instant::now();
        self.draw(sampler)?;
        report.draw += at.elapsed();
        for (row, &sequence) in self.going.iter().enumerate() {
            let sequence = &mut self.sequences[sequence];
            sequence.end = match self.samples.row(row) {
                Ok(row) => {
                    report.tokens += 1;
                    report.more_passes += u64::from(row.passes > 1);
                    sequence.push(&row);
                    self.context.end(sequence, row.token())?
                }
                Err(error) => Some(End::Failed(error)),
            };
            if sequence.end.is_some() {
                sequence.stream.end(|tokens| self.context.language.decode(tokens))?;
            }
        }
        self.going.retain(|sequence| self.sequences[*sequence].end.is_none());
        if self.is_going() {
            let at = Instant::now();
            let going = self.sequences.iter_mut().filter(|sequence| sequence.end.is_none());
            let mut runs: Vec<Run<'_>> = going
                .map(|Sequence { cache, history, .. }| {
                    let tokens = history.tokens();
                    Run { cache, tokens: &tokens[tokens.len() - 1..] }
                })
                .collect();
            self.hidden = self.context.forward(&mut runs)?;
            report.layers += at.elapsed();
        }
        Ok(())
    }

    fn draw(&mut self, sampler: &mut dyn PerturbedArgmax) -> Result<(), CommandError> {
        let GenerateArgs { draws, penalties, filters, .. } = self.context.args;
        let config = self.context.model.config();
        let row = RowParams {
            temperature: draws.temperature,
            logprobs: draws.logprobs,
            logit_bias: draws.logit_bias.as_deref().unwrap_or_default(),
            stop_token_ids: &config.eos,
            ..RowParams::default()
        };
        let row = penalties.apply(filters.apply(row));
        let params = |sequence: &usize| {
            let sequence = &self.sequences[*sequence];
            RowParams { seed: sequence.seed, position: sequence.len() as u64, history: Some(&sequence.history), ..row }
        };
        let rows: Vec<RowParams<'_>> = self.going.iter().map(params).collect();
        let hidden = Matrix::new(&self.hidden, rows.len(), config.hidden)?;
        Ok(sampler.sample(hidden, &rows, &mut self.samples)?)
    }
}
