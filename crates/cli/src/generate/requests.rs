//! The parameters of each sequence: from the flags, or from `--params`.

use crate::args::values::checked_logprobs;
use crate::args::{GenerateArgs, ineffective_flags};
use crate::error::CommandError;
use crate::input::mask::Masks;
use crate::input::requests::{self, RequestKind};
use crate::sampler::unsupported;
use flash_sampling::{History, RowParams, SamplingParams};

/// The parameters of every sequence.
#[derive(Debug)]
pub(super) struct Requests<'s> {
    args: &'s GenerateArgs,
    /// Tokens that end a sequence: of the model and of `--stop-token-ids`.
    stops: Vec<u32>,
    /// `--allowed-token-ids`.
    mask: Option<Masks>,
    /// `--logprobs`.
    logprobs: Option<u32>,
    /// The objects of `--params`, one per sequence, with the model's end-of-sequence tokens added; empty without a file.
    in_file: Vec<SamplingParams>,
}

impl<'s> Requests<'s> {
    /// Reads `--params` and checks tokens against the vocabulary.
    ///
    /// # Errors
    /// An invalid file, or fields that `generate` does not support.
    pub(super) fn open(args: &'s GenerateArgs, eos: &[u32], vocab_size: u32) -> Result<Self, CommandError> {
        let Some(path) = &args.draws.params else {
            let logprobs = args.draws.logprobs.map(|number| checked_logprobs(number, vocab_size)).transpose()?;
            let stops = [eos, args.draws.stop_token_ids.as_deref().unwrap_or_default()].concat();
            args.check_stops(&stops)?;
            let mask = args.draws.allowed_token_ids.as_ref().map(|tokens| Masks::of_tokens(tokens, vocab_size));
            return Ok(Requests { args, stops, mask, logprobs, in_file: Vec::new() });
        };
        let usage = |reason: String| CommandError::usage(format!("--params {}: {reason}", path.display()));
        let mut in_file = Vec::new();
        let requests = requests::open(path, RequestKind::Sequence, args.text.num_sequences as usize, vocab_size)?;
        ineffective_flags::refuse_seed(args.draws.seed.map(|_| "--seed"), &requests)?;
        for (at, request) in requests.into_iter().enumerate() {
            let in_sequence = |reason: String| usage(format!("sequence {at}: {reason}"));
            let mut fields = request.params.fields().clone();
            let wrong = [
                (request.history.is_some(), "prompt_token_ids and output_token_ids are not supported by generate"),
                (fields.n != 1, "n is not supported by generate; use --num-sequences"),
                (fields.without_replacement, "without_replacement is not supported by generate"),
                (fields.kept, "kept is not supported by generate"),
            ];
            if let Some((_, reason)) = wrong.into_iter().find(|(is_wrong, _)| *is_wrong) {
                return Err(in_sequence(reason.into()));
            }
            let (least, most) = (fields.min_tokens, args.text.max_tokens);
            if least > most {
                return Err(in_sequence(format!("min_tokens is {least}, but --max-tokens is {most}")));
            }
            fields.stop_token_ids.extend_from_slice(eos);
            in_file.push(fields.build(vocab_size).map_err(|error| in_sequence(error.to_string()))?);
        }
        if let Some(at) = in_file.windows(2).position(|two| two[0].fields().seed.is_some() && two[0] == two[1]) {
            return Err(usage(format!("sequences {at} and {} are equal: they have the same seed", at + 1)));
        }
        let rows = in_file.iter().map(|params| params.row(0, 0, Some(ineffective_flags::placeholder_history())));
        let lacks = unsupported::knobs(&args.sampler, args.draws.canonical);
        ineffective_flags::warn_in_file(path, RequestKind::Sequence, lacks, rows);
        Ok(Requests { args, stops: Vec::new(), mask: None, logprobs: None, in_file })
    }

    /// The seed of a sequence: of its object, or `--seed` plus its number.
    pub(super) fn seed(&self, sequence: usize) -> u64 {
        let in_flags = self.args.draws.seed.unwrap_or(0) + sequence as u64;
        self.in_file.get(sequence).and_then(|params| params.fields().seed).unwrap_or(in_flags)
    }

    /// The parameters of the token after `history`.
    pub(super) fn row<'a>(&'a self, sequence: usize, seed: u64, history: &'a History) -> RowParams<'a> {
        let position = history.tokens().len() as u64;
        if let Some(params) = self.in_file.get(sequence) {
            return RowParams { seed, ..params.next_row(seed, history) };
        }
        let mask = self.mask.as_ref().map(|mask| mask.row(0));
        RowParams { seed, position, logprobs: self.logprobs, ..self.args.row(history, &self.stops, mask) }
    }

    /// Whether a token ends a sequence.
    pub(super) fn stops(&self, sequence: usize, token: u32) -> bool {
        let in_file = self.in_file.get(sequence).map(|params| &params.fields().stop_token_ids);
        in_file.unwrap_or(&self.stops).contains(&token)
    }

    /// The largest `logprobs` of all sequences; `None` if no sequence has any.
    pub(super) fn max_logprobs(&self) -> Option<u32> {
        let in_file = self.in_file.iter().filter_map(|params| params.fields().logprobs).max();
        in_file.or(self.logprobs)
    }

    /// Whether a sequence has log-probabilities in the output.
    pub(super) fn has_logprobs(&self, sequence: usize) -> bool {
        self.in_file.get(sequence).map_or(self.logprobs, |params| params.fields().logprobs).is_some()
    }
}
