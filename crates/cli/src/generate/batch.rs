//! A batch of growing sequences.

use super::draft::Draft;
use super::engine::Engine;
use super::report::Report;
use super::requests::Requests;
use super::sequence::{End, Sequence};
use super::text_stream::TextStream;
use super::tokenizer::TextTokenizer;
use crate::args::GenerateArgs;
use crate::error::CommandError;
use flash_sampling::{History, RowParams};
use flash_sampling_models::{Cache, ModelConfig, Run};
use std::time::Instant;

/// A batch whose sequences end one by one.
pub(super) struct Batch<'s> {
    args: &'s GenerateArgs,
    tokenizer: &'s TextTokenizer,
    engine: Engine<'s>,
    requests: &'s Requests,
    draft: Option<Draft<'s>>,
    sequences: Vec<Sequence<'s>>,
    /// The unfinished sequences, ascending, and the draft tokens of each.
    active: Vec<usize>,
    proposed: Vec<Vec<u32>>,
    /// Hidden states `[rows, hidden]` of the next draws: for each active sequence a row after its last token, and a row
    /// after each draft token.
    hidden: Vec<f32>,
}

impl<'s> Batch<'s> {
    /// Runs the prompt once; all sequences share its cache.
    pub(super) fn start(
        args: &'s GenerateArgs,
        tokenizer: &'s TextTokenizer,
        (engine, draft, requests): (Engine<'s>, Option<Draft<'s>>, &'s Requests),
        prompt: &[u32],
        report: &mut Report,
    ) -> Result<Self, CommandError> {
        let at = Instant::now();
        let config = engine.config();
        engine.check_length(prompt)?;
        let mut cache = Cache::new(config);
        let hidden = engine.forward(&mut [Run { cache: &mut cache, tokens: prompt }])?;
        let count = args.text.num_sequences as usize;
        let sequence = |at: usize| Sequence {
            seed: requests.seed(at),
            history: History::new(prompt),
            cache: cache.clone(),
            stream: TextStream::after(prompt, &args.text.stop),
            logprobs: Vec::new(),
            end: None,
        };
        let sequences = (0..count).map(sequence).collect();
        report.prompt = at.elapsed();
        let hidden = hidden[hidden.len() - config.hidden..].repeat(count);
        let (active, proposed) = ((0..count).collect(), vec![Vec::new(); count]);
        Ok(Batch { args, tokenizer, engine, requests, draft, sequences, active, proposed, hidden })
    }

    pub(super) fn is_active(&self) -> bool {
        !self.active.is_empty()
    }

    pub(super) fn sequences(&self) -> &[Sequence<'s>] {
        &self.sequences
    }

    /// Adds a token to every active sequence, and the draft tokens that are equal to the model's draws.
    pub(super) fn step(&mut self, report: &mut Report) -> Result<(), CommandError> {
        let at = Instant::now();
        self.draw(report)?;
        report.draw += at.elapsed();
        self.accept(report)?;
        self.active.retain(|sequence| self.sequences[*sequence].end.is_none());
        if self.is_active() {
            self.forward(report)?;
        }
        Ok(())
    }

    /// Draws after the last token and each draft token of every active sequence.
    fn draw(&mut self, report: &mut Report) -> Result<(), CommandError> {
        // The histories with the draft tokens.
        let longer: Vec<Vec<History>> = (self.active.iter().zip(&self.proposed))
            .map(|(&sequence, proposed)| {
                let mut history = self.sequences[sequence].history.clone();
                let with = |token: &u32| {
                    history.push(*token);
                    history.clone()
                };
                proposed.iter().map(with).collect()
            })
            .collect();
        let mut rows: Vec<RowParams<'_>> = Vec::new();
        for (&at, longer) in self.active.iter().zip(&longer) {
            let sequence = &self.sequences[at];
            let histories = [&sequence.history].into_iter().chain(longer);
            rows.extend(histories.map(|history| self.requests.row(at, sequence.seed, history)));
        }
        self.engine.draw(&self.hidden, &rows)?;
        report.rows += rows.len();
        report.fallback_rows += self.engine.samples.fallback_rows();
        Ok(())
    }

    /// Adds the drawn tokens up to the first that differs from its draft.
    fn accept(&mut self, report: &mut Report) -> Result<(), CommandError> {
        let mut first = 0;
        for (&at, proposed) in self.active.iter().zip(&self.proposed) {
            let sequence = &mut self.sequences[at];
            report.proposed += proposed.len() as u64;
            for place in 0..=proposed.len() {
                let row = match self.engine.samples.row(first + place) {
                    Ok(row) => row,
                    Err(error) => {
                        sequence.end = Some(End::Failed(error));
                        break;
                    }
                };
                report.tokens += 1;
                report.more_passes += u64::from(row.passes > 1);
                sequence.push(&row);
                let is_proposed = proposed.get(place) == Some(&row.token());
                report.accepted += u64::from(is_proposed);
                let stops = self.requests.stops(at, row.token());
                sequence.end = end(self.args, self.tokenizer, self.engine.config(), sequence, (row.token(), stops))?;
                if sequence.end.is_some() || !is_proposed {
                    break;
                }
            }
            if sequence.end.is_some() {
                sequence.stream.end(|tokens| self.tokenizer.decode(tokens))?;
            }
            first += proposed.len() + 1;
        }
        Ok(())
    }

    /// Runs the layers for the last token of each active sequence and its next draft tokens.
    fn forward(&mut self, report: &mut Report) -> Result<(), CommandError> {
        let at = Instant::now();
        self.proposed = match &mut self.draft {
            Some(draft) => draft.propose(&self.sequences, &self.active)?,
            None => vec![Vec::new(); self.active.len()],
        };
        let limit = self.engine.config().max_positions;
        let mut tokens = Vec::with_capacity(self.active.len());
        for (&sequence, proposed) in self.active.iter().zip(&mut self.proposed) {
            let history = self.sequences[sequence].history.tokens();
            proposed.truncate(limit - history.len());
            tokens.push([&history[history.len() - 1..], proposed].concat());
        }
        let drafted = Instant::now();
        report.draft += drafted - at;
        let active = self.sequences.iter_mut().filter(|sequence| sequence.end.is_none());
        let mut runs: Vec<Run<'_>> = (active.zip(&tokens))
            .map(|(sequence, tokens)| {
                // Drops rejected draft tokens.
                sequence.cache.truncate(sequence.history.tokens().len() - 1);
                Run { cache: &mut sequence.cache, tokens }
            })
            .collect();
        self.hidden = self.engine.forward(&mut runs)?;
        report.layers += drafted.elapsed();
        Ok(())
    }
}

/// The end of a sequence, if the drawn token ends it. `stops` means a stop token, which is not written.
fn end(
    args: &GenerateArgs,
    tokenizer: &TextTokenizer,
    config: &ModelConfig,
    sequence: &mut Sequence<'_>,
    (token, stops): (u32, bool),
) -> Result<Option<End>, CommandError> {
    if stops || sequence.stream.push(token, |tokens| tokenizer.decode(tokens))? {
        return Ok(Some(End::Stop));
    }
    let written = sequence.history.output().len();
    let full = written >= args.text.max_tokens as usize || sequence.len() >= config.max_positions;
    Ok(full.then_some(End::Length))
}
