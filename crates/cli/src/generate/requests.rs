//! The parameters of each sequence: from the flags, or from `--params`.

use crate::args::{GenerateArgs, ineffective_flags, values};
use crate::error::CommandError;
use crate::input::requests::{self, Request, RequestKind};
use crate::sampler::Support;
use flash_sampling::{History, RowParams, SamplingParams};

/// The parameters of every sequence.
#[derive(Debug)]
pub(super) struct Requests {
    /// `--seed`.
    seed: u64,
    /// One object for every sequence, or one for each, with the model's end-of-sequence tokens added.
    each: Vec<SamplingParams>,
}

impl Requests {
    /// Reads `--params` or the flags, and checks tokens against the vocabulary.
    pub(super) fn open(args: &GenerateArgs, eos: &[u32], vocab_size: u32) -> Result<Self, CommandError> {
        let file = args.draws.params.as_deref().map(|path| (path, RequestKind::Sequence));
        let placeholder = ineffective_flags::placeholder_history();
        let each = match file {
            Some((path, kind)) => {
                let requests = requests::open(path, kind, args.text.num_sequences as usize, vocab_size)?;
                ineffective_flags::refuse_seed(args.draws.seed.map(|_| "--seed"), &requests)?;
                let usage = |reason: String| CommandError::usage(format!("--params {}: {reason}", path.display()));
                let of_sequence = |(at, request)| {
                    let params = sequence(request, args.text.max_tokens, eos, vocab_size);
                    params.map_err(|reason| usage(format!("sequence {at}: {reason}")))
                };
                let each = requests.iter().enumerate().map(of_sequence).collect::<Result<Vec<_>, _>>()?;
                let of = |at: usize| each.get(at).unwrap_or(&each[0]);
                let is_equal = |at: &usize| of(*at).fields().seed.is_some() && of(*at) == of(at + 1);
                if let Some(at) = (0..args.text.num_sequences as usize - 1).find(is_equal) {
                    let same = format!("sequences {at} and {} are equal: they have the same seed", at + 1);
                    return Err(usage(same));
                }
                each
            }
            None => {
                let mut fields = args.fields();
                fields.stop_token_ids.extend_from_slice(eos);
                let params = values::build(fields, Some(vocab_size))?;
                ineffective_flags::refuse(&ineffective_flags::knobs(&params.row(0, 0, Some(&placeholder))))?;
                vec![params]
            }
        };
        let rows = each.iter().map(|params| params.row(0, 0, Some(&placeholder)));
        let support = Support::new(&args.sampler, args.draws.canonical)?;
        rows.clone().try_for_each(|row| support.refuse(&row))?;
        ineffective_flags::warn(file, &support, vocab_size, rows);
        Ok(Requests { seed: args.draws.seed.unwrap_or(0), each })
    }

    fn of(&self, sequence: usize) -> &SamplingParams {
        self.each.get(sequence).unwrap_or(&self.each[0])
    }

    /// The seed of a sequence: of its object, or `--seed` plus its number.
    pub(super) fn seed(&self, sequence: usize) -> u64 {
        self.of(sequence).fields().seed.unwrap_or(self.seed + sequence as u64)
    }

    /// The parameters of the token after `history`.
    pub(super) fn row<'a>(&'a self, sequence: usize, seed: u64, history: &'a History) -> RowParams<'a> {
        self.of(sequence).next_row(seed, history)
    }

    /// Whether a token ends a sequence.
    pub(super) fn stops(&self, sequence: usize, token: u32) -> bool {
        self.of(sequence).fields().stop_token_ids.contains(&token)
    }

    /// The largest `logprobs` of all sequences; `None` if no sequence has any.
    pub(super) fn max_logprobs(&self) -> Option<u32> {
        self.each.iter().filter_map(|params| params.fields().logprobs).max()
    }

    /// Whether a sequence has log-probabilities in the output.
    pub(super) fn has_logprobs(&self, sequence: usize) -> bool {
        self.of(sequence).fields().logprobs.is_some()
    }
}

/// The parameters of an object of the file, with the model's end-of-sequence tokens.
fn sequence(request: &Request, max_tokens: u32, eos: &[u32], vocab_size: u32) -> Result<SamplingParams, String> {
    let mut fields = request.params.fields().clone();
    let wrong = [
        (request.history.is_some(), "prompt_token_ids and output_token_ids are not supported by generate"),
        (fields.n != 1, "n is not supported by generate; use --num-sequences"),
        (fields.without_replacement, "without_replacement is not supported by generate"),
        (fields.kept, "kept is not supported by generate"),
        (fields.ranks, "ranks is not supported by generate"),
        (!fields.logprob_token_ids.is_empty(), "logprob_token_ids is not supported by generate"),
    ];
    if let Some((_, reason)) = wrong.into_iter().find(|(is_wrong, _)| *is_wrong) {
        return Err(reason.into());
    }
    let least = fields.min_tokens;
    if least > max_tokens {
        return Err(format!("min_tokens is {least}, but --max-tokens is {max_tokens}"));
    }
    fields.stop_token_ids.extend_from_slice(eos);
    fields.build(vocab_size).map_err(|error| error.to_string())
}
