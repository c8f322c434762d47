//! Speculative decoding with shared noise: a small model draws ahead with the noise of the same (seed, place), and its
//! tokens hold as far as the model itself draws the same ones. What is written is what the model would have written
//! alone: every token is its own draw.

use super::engine::Engine;
use super::requests::Requests;
use super::sequence::Sequence;
use crate::args::GenerateArgs;
use crate::error::CommandError;
use flash_sampling::{History, RowParams};
use flash_sampling_models::{Cache, ModelError, Run};

/// The small model, and what it keeps of each sequence.
pub(super) struct Draft<'s> {
    args: &'s GenerateArgs,
    engine: Engine<'s>,
    requests: &'s Requests<'s>,
    caches: Vec<Cache>,
    /// Tokens that are drawn ahead, at most.
    ahead: usize,
}

impl<'s> Draft<'s> {
    /// Runs the prompt once; every sequence goes on from there.
    pub(super) fn start(
        args: &'s GenerateArgs,
        engine: Engine<'s>,
        requests: &'s Requests<'s>,
        prompt: &[u32],
        ahead: usize,
    ) -> Result<Self, CommandError> {
        let (length, limit) = (prompt.len() + 1, engine.config().max_positions);
        if length > limit {
            return Err(engine.failed(ModelError::TooLong { length, limit }));
        }
        let mut cache = Cache::new(engine.config());
        // The last token of the prompt comes with the first draw.
        let before = &prompt[..prompt.len() - 1];
        if !before.is_empty() {
            engine.forward(&mut [Run { cache: &mut cache, tokens: before }])?;
        }
        Ok(Draft { args, engine, requests, caches: vec![cache; args.text.num_sequences as usize], ahead })
    }

    /// Tokens that may follow the sequences `going`. Of what was proposed before, the sequences have kept the beginning.
    pub(super) fn propose(
        &mut self,
        sequences: &[Sequence<'_>],
        going: &[usize],
    ) -> Result<Vec<Vec<u32>>, CommandError> {
        let mut histories: Vec<History> = going.iter().map(|&at| sequences[at].history.clone()).collect();
        let mut proposed = vec![Vec::new(); going.len()];
        for &at in going {
            self.caches[at].truncate(sequences[at].len() - 1);
        }
        let (tokens, positions) = (self.args.text.max_tokens as usize, self.engine.config().max_positions);
        // The last token of a sequence is the model's own draw: only those before it are of use.
        let has_room = |history: &History| history.output().len() + 1 < tokens && history.tokens().len() < positions;
        let mut open: Vec<usize> = (0..going.len()).filter(|&row| has_room(&histories[row])).collect();
        for _ in 0..self.ahead {
            if open.is_empty() {
                break;
            }
            self.draw(sequences, going, &open, &histories)?;
            let mut goes_on = Vec::with_capacity(open.len());
            for (drawn, &row) in open.iter().enumerate() {
                // A row without a draw is for the model to tell of.
                let Ok(sample) = self.engine.samples.row(drawn) else { continue };
                let token = sample.token();
                histories[row].push(token);
                proposed[row].push(token);
                if has_room(&histories[row]) && !self.requests.stops(going[row], token) {
                    goes_on.push(row);
                }
            }
            open = goes_on;
        }
        Ok(proposed)
    }

    /// One token for each of the rows `open` of `going`.
    fn draw(
        &mut self,
        sequences: &[Sequence<'_>],
        going: &[usize],
        open: &[usize],
        histories: &[History],
    ) -> Result<(), CommandError> {
        let width = self.engine.config().hidden;
        let caches = self.caches.iter_mut().enumerate();
        let mut of_rows = caches.filter_map(|(at, cache)| Some((going.binary_search(&at).ok()?, cache)));
        let mut runs: Vec<Run<'_>> = Vec::with_capacity(open.len());
        for &row in open {
            if let Some((_, cache)) = of_rows.by_ref().find(|(found, _)| *found == row) {
                let tokens = &histories[row].tokens()[cache.len()..];
                runs.push(Run { cache, tokens });
            }
        }
        let states = self.engine.forward(&mut runs)?;
        let mut hidden = Vec::with_capacity(open.len() * width);
        let mut end = 0;
        for run in &runs {
            end += run.tokens.len() * width;
            hidden.extend_from_slice(&states[end - width..end]);
        }
        let row = |row: &usize| {
            let row_params = self.requests.row(going[*row], sequences[going[*row]].seed, &histories[*row]);
            RowParams { logprobs: None, ..row_params }
        };
        let rows: Vec<RowParams<'_>> = open.iter().map(row).collect();
        self.engine.draw(&hidden, &rows)
    }
}
