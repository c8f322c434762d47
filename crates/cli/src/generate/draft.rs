//! Speculative decoding with shared noise. The draft model draws with the noise of the same (seed, position), and the model
//! accepts its tokens up to the first difference from its own draws. Every written token is the model's own draw, so the
//! text is the same as without a draft model.

use super::engine::Engine;
use super::requests::Requests;
use super::sequence::Sequence;
use crate::args::GenerateArgs;
use crate::error::CommandError;
use flash_sampling::{History, RowParams};
use flash_sampling_models::{Cache, Run};

/// The draft model with a cache per sequence.
pub(super) struct Draft<'s> {
    args: &'s GenerateArgs,
    engine: Engine<'s>,
    requests: &'s Requests,
    caches: Vec<Cache>,
    /// Maximum of draft tokens per step.
    ahead: usize,
}

impl<'s> Draft<'s> {
    /// Runs the prompt once; all sequences share its cache.
    pub(super) fn start(
        args: &'s GenerateArgs,
        engine: Engine<'s>,
        requests: &'s Requests,
        prompt: &[u32],
        ahead: usize,
    ) -> Result<Self, CommandError> {
        engine.check_length(prompt)?;
        let mut cache = Cache::new(engine.config());
        // The first draw runs the last token of the prompt.
        let before = &prompt[..prompt.len() - 1];
        if !before.is_empty() {
            engine.forward(&mut [Run { cache: &mut cache, tokens: before }])?;
        }
        Ok(Draft { args, engine, requests, caches: vec![cache; args.text.num_sequences as usize], ahead })
    }

    /// Draft tokens for the active sequences.
    pub(super) fn propose(
        &mut self,
        sequences: &[Sequence<'_>],
        active: &[usize],
    ) -> Result<Vec<Vec<u32>>, CommandError> {
        let mut histories: Vec<History> = active.iter().map(|&at| sequences[at].history.clone()).collect();
        let mut proposed = vec![Vec::new(); active.len()];
        for &at in active {
            self.caches[at].truncate(sequences[at].len() - 1);
        }
        let (tokens, positions) = (self.args.text.max_tokens as usize, self.engine.config().max_positions);
        // The model draws the last token of a sequence itself.
        let has_room = |history: &History| history.output().len() + 1 < tokens && history.tokens().len() < positions;
        let mut open: Vec<usize> = (0..active.len()).filter(|&row| has_room(&histories[row])).collect();
        for _ in 0..self.ahead {
            if open.is_empty() {
                break;
            }
            self.draw(sequences, active, &open, &histories)?;
            let mut unfinished = Vec::with_capacity(open.len());
            for (drawn, &row) in open.iter().enumerate() {
                // The model reports errors of rows.
                let Ok(sample) = self.engine.samples.row(drawn) else { continue };
                let token = sample.token();
                histories[row].push(token);
                proposed[row].push(token);
                if has_room(&histories[row]) && !self.requests.stops(active[row], token) {
                    unfinished.push(row);
                }
            }
            open = unfinished;
        }
        Ok(proposed)
    }

    /// Draws one token for each row `open` of `active`.
    fn draw(
        &mut self,
        sequences: &[Sequence<'_>],
        active: &[usize],
        open: &[usize],
        histories: &[History],
    ) -> Result<(), CommandError> {
        let width = self.engine.config().hidden;
        let caches = self.caches.iter_mut().enumerate();
        let mut of_rows = caches.filter_map(|(at, cache)| Some((active.binary_search(&at).ok()?, cache)));
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
            let row_params = self.requests.row(active[*row], sequences[active[*row]].seed, &histories[*row]);
            RowParams { logprobs: None, ..row_params }
        };
        let rows: Vec<RowParams<'_>> = open.iter().map(row).collect();
        self.engine.draw(&hidden, &rows)
    }
}
