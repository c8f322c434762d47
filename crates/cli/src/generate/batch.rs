//! Sequences that are written side by side.

use super::draft::Draft;
use super::engine::Engine;
use super::load::Language;
use super::report::Report;
use super::requests::Requests;
use super::sequence::{End, Sequence};
use super::text::TextStream;
use crate::args::GenerateArgs;
use crate::error::CommandError;
use crate::sampler::refusal;
use flash_sampling::{History, RowParams};
use flash_sampling_models::{Cache, ModelConfig, ModelError, Run};
use std::time::Instant;

/// A batch in which sequences end one by one.
pub(super) struct Batch<'s> {
    args: &'s GenerateArgs,
    language: &'s Language,
    engine: Engine<'s>,
    requests: &'s Requests<'s>,
    draft: Option<Draft<'s>>,
    sequences: Vec<Sequence<'s>>,
    /// The sequences that go on, ascending, and the tokens that are proposed for each.
    going: Vec<usize>,
    proposed: Vec<Vec<u32>>,
    /// What the next tokens are drawn from: for each sequence a row after its last token, and one after each that is
    /// proposed, `[rows, hidden]`.
    hidden: Vec<f32>,
}

impl<'s> Batch<'s> {
    /// Runs the prompt once; every sequence goes on from there.
    pub(super) fn start(
        args: &'s GenerateArgs,
        language: &'s Language,
        (engine, requests): (Engine<'s>, &'s Requests<'s>),
        prompt: &[u32],
        report: &mut Report,
    ) -> Result<Self, CommandError> {
        let at = Instant::now();
        let config = engine.config();
        if prompt.len() >= config.max_positions {
            return Err(engine.failed(ModelError::TooLong { length: prompt.len() + 1, limit: config.max_positions }));
        }
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
        let (going, proposed) = ((0..count).collect(), vec![Vec::new(); count]);
        Ok(Batch { args, language, engine, requests, draft: None, sequences, going, proposed, hidden })
    }

    /// Lets a small model draw ahead.
    pub(super) fn with_draft(mut self, draft: Option<Draft<'s>>) -> Self {
        self.draft = draft;
        self
    }

    /// Whether a sequence goes on.
    pub(super) fn is_going(&self) -> bool {
        !self.going.is_empty()
    }

    pub(super) fn sequences(&self) -> &[Sequence<'s>] {
        &self.sequences
    }

    /// A token for every sequence that goes on, and more where those proposed are the ones that are drawn.
    pub(super) fn step(&mut self, report: &mut Report) -> Result<(), CommandError> {
        let at = Instant::now();
        self.draw()?;
        report.draw += at.elapsed();
        self.take(report)?;
        self.going.retain(|sequence| self.sequences[*sequence].end.is_none());
        if self.is_going() {
            self.go_on(report)?;
        }
        Ok(())
    }

    /// Draws after each sequence, and after each of its proposed tokens.
    fn draw(&mut self) -> Result<(), CommandError> {
        // The sequences as they would be with what is proposed.
        let longer: Vec<Vec<History>> = (self.going.iter().zip(&self.proposed))
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
        for (&at, longer) in self.going.iter().zip(&longer) {
            let sequence = &self.sequences[at];
            let histories = [&sequence.history].into_iter().chain(longer);
            rows.extend(histories.map(|history| self.requests.row(at, sequence.seed, history)));
        }
        self.engine.draw(&self.hidden, &rows)
    }

    /// Adds what was drawn, as far as it is what was proposed.
    fn take(&mut self, report: &mut Report) -> Result<(), CommandError> {
        let mut first = 0;
        for (&at, proposed) in self.going.iter().zip(&self.proposed) {
            let sequence = &mut self.sequences[at];
            report.proposed += proposed.len() as u64;
            for place in 0..=proposed.len() {
                let row = match self.engine.samples.row(first + place) {
                    Ok(row) => row,
                    Err(error) => {
                        // What the flags ask, they ask of every sequence.
                        if let Some(refusal) = refusal(&self.args.sampler, self.args.draws.canonical, &error) {
                            return Err(refusal);
                        }
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
                sequence.end = end(self.args, self.language, self.engine.config(), sequence, (row.token(), stops))?;
                if sequence.end.is_some() || !is_proposed {
                    break;
                }
            }
            if sequence.end.is_some() {
                sequence.stream.end(|tokens| self.language.decode(tokens))?;
            }
            first += proposed.len() + 1;
        }
        Ok(())
    }

    /// The layers, for the last token of each sequence and what is proposed after it.
    fn go_on(&mut self, report: &mut Report) -> Result<(), CommandError> {
        let at = Instant::now();
        self.proposed = match &mut self.draft {
            Some(draft) => draft.propose(&self.sequences, &self.going)?,
            None => vec![Vec::new(); self.going.len()],
        };
        let limit = self.engine.config().max_positions;
        let mut tokens = Vec::with_capacity(self.going.len());
        for (&sequence, proposed) in self.going.iter().zip(&mut self.proposed) {
            let history = self.sequences[sequence].history.tokens();
            proposed.truncate(limit - history.len());
            tokens.push([&history[history.len() - 1..], proposed].concat());
        }
        let drafted = Instant::now();
        report.draft += drafted - at;
        let going = self.sequences.iter_mut().filter(|sequence| sequence.end.is_none());
        let mut runs: Vec<Run<'_>> = (going.zip(&tokens))
            .map(|(sequence, tokens)| {
                // Of what was proposed before, only what was drawn stays.
                sequence.cache.truncate(sequence.history.tokens().len() - 1);
                Run { cache: &mut sequence.cache, tokens }
            })
            .collect();
        self.hidden = self.engine.forward(&mut runs)?;
        report.layers += drafted.elapsed();
        Ok(())
    }
}

/// Whether a sequence ends with the token that was drawn, which stops it or not. What stops it is not written.
fn end(
    args: &GenerateArgs,
    language: &Language,
    config: &ModelConfig,
    sequence: &mut Sequence<'_>,
    (token, stops): (u32, bool),
) -> Result<Option<End>, CommandError> {
    if stops || sequence.stream.push(token, |tokens| language.decode(tokens))? {
        return Ok(Some(End::Stop));
    }
    let written = sequence.history.output().len();
    let full = written >= args.text.max_tokens as usize || sequence.len() >= config.max_positions;
    Ok(full.then_some(End::Length))
}
