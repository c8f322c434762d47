//! What the sequences are drawn with: the flags, or the objects of `--params`.

use crate::args::GenerateArgs;
use crate::args::values::known_logprobs;
use crate::error::CommandError;
use crate::idle;
use crate::load::mask::Masks;
use crate::load::requests::{self, Of};
use crate::sampler;
use flash_sampling::{History, RowParams, SamplingParams};

/// The parameters of every sequence.
#[derive(Debug)]
pub(super) struct Requests<'s> {
    args: &'s GenerateArgs,
    /// The tokens that end a sequence: the model's own, and those of the flags.
    stops: Vec<u32>,
    /// The tokens of the flags that may be drawn.
    mask: Option<Masks>,
    /// What the flags ask for of log-probabilities.
    logprobs: Option<u32>,
    /// One for each sequence, with the model's own end among the tokens that stop it; empty without a file.
    of_file: Vec<SamplingParams>,
}

impl<'s> Requests<'s> {
    /// Reads the file, if there is one, for a vocabulary.
    ///
    /// # Errors
    /// What is wrong with it, or asks for what a text cannot have.
    pub(super) fn open(args: &'s GenerateArgs, eos: &[u32], vocab_size: u32) -> Result<Self, CommandError> {
        let Some(path) = &args.draws.params else {
            sampler::known("--banned-token-ids", args.draws.banned_token_ids.as_deref(), vocab_size)?;
            sampler::known("--stop-token-ids", args.draws.stop_token_ids.as_deref(), vocab_size)?;
            let logprobs = args.draws.logprobs.map(|asked| known_logprobs(asked, vocab_size)).transpose()?;
            let stops = [eos, args.draws.stop_token_ids.as_deref().unwrap_or_default()].concat();
            args.check_stops(&stops)?;
            let mask = args.draws.allowed_token_ids.as_ref().map(|tokens| Masks::of_tokens(tokens, vocab_size));
            let beyond = |token| CommandError::usage(sampler::beyond("--allowed-token-ids", token, vocab_size));
            let mask = mask.transpose().map_err(beyond)?;
            return Ok(Requests { args, stops, mask, logprobs, of_file: Vec::new() });
        };
        let usage = |reason: String| CommandError::usage(format!("--params {}: {reason}", path.display()));
        let mut of_file = Vec::new();
        let requests = requests::open(path, Of::Sequences, args.text.num_sequences as usize, vocab_size)?;
        requests::needs_seed(&requests, args.draws.seed.map(|_| "--seed"))?;
        for (at, request) in requests.into_iter().enumerate() {
            let of_one = |reason: String| usage(format!("sequence {at}: {reason}"));
            let mut fields = request.params.fields().clone();
            let wrong = [
                (request.history.is_some(), "prompt_token_ids and output_token_ids are the sequence's own here"),
                (fields.n != 1, "n: a sequence goes on with one token; --num-sequences writes several"),
                (fields.without_replacement, "without_replacement: a sequence goes on with one token"),
                (fields.kept, "kept: the tokens that were kept are not written"),
            ];
            if let Some((_, reason)) = wrong.into_iter().find(|(is_wrong, _)| *is_wrong) {
                return Err(of_one(reason.into()));
            }
            let (least, most) = (fields.min_tokens, args.text.max_tokens);
            if least > most {
                return Err(of_one(format!("min_tokens is {least}, but --max-tokens is {most}")));
            }
            fields.stop_token_ids.extend_from_slice(eos);
            of_file.push(fields.build(vocab_size).map_err(|error| of_one(error.to_string()))?);
        }
        if let Some(at) = of_file.windows(2).position(|two| two[0].fields().seed.is_some() && two[0] == two[1]) {
            return Err(usage(format!("sequences {at} and {} would be one: they have the same seed", at + 1)));
        }
        let rows = of_file.iter().map(|params| params.row(0, 0, Some(idle::written())));
        requests::tell_idle(path, Of::Sequences, sampler::lacks(&args.sampler, args.draws.canonical), rows);
        Ok(Requests { args, stops: Vec::new(), mask: None, logprobs: None, of_file })
    }

    /// The seed of a sequence: its object's as it is, or that of the flags.
    pub(super) fn seed(&self, sequence: usize) -> u64 {
        let of_flags = self.args.draws.seed.unwrap_or(0) + sequence as u64;
        self.of_file.get(sequence).and_then(|params| params.fields().seed).unwrap_or(of_flags)
    }

    /// The parameters of the token after `history`.
    pub(super) fn row<'a>(&'a self, sequence: usize, seed: u64, history: &'a History) -> RowParams<'a> {
        let position = history.tokens().len() as u64;
        if let Some(params) = self.of_file.get(sequence) {
            return RowParams { seed, ..params.next_row(seed, history) };
        }
        let mask = self.mask.as_ref().map(|mask| mask.row(0));
        RowParams { seed, position, logprobs: self.logprobs, ..self.args.row(history, &self.stops, mask) }
    }

    /// Whether a token ends a sequence.
    pub(super) fn stops(&self, sequence: usize, token: u32) -> bool {
        let of_file = self.of_file.get(sequence).map(|params| &params.fields().stop_token_ids);
        of_file.unwrap_or(&self.stops).contains(&token)
    }

    /// The most log-probabilities that are asked for; `None` when none are.
    pub(super) fn most_logprobs(&self) -> Option<u32> {
        let of_file = self.of_file.iter().filter_map(|params| params.fields().logprobs).max();
        of_file.or(self.logprobs)
    }

    /// Whether the log-probabilities of a sequence are written.
    pub(super) fn tells_logprobs(&self, sequence: usize) -> bool {
        self.of_file.get(sequence).map_or(self.logprobs, |params| params.fields().logprobs).is_some()
    }
}
