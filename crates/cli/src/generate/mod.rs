//! `flash-sampling generate`: text, token by token.
//!
//! The layers run on the CPU, the head and the draw on any backend. Sequence i of a batch has seed SEED + i, and the token
//! at a place of a sequence has the noise of (seed, place), so a sequence is what it would be alone, on any number of
//! threads and by any variant that is exact pathwise.

mod batch;
mod load;
mod output;
mod report;
mod sequence;
mod text;

use crate::args::GenerateArgs;
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::sampler;
use batch::{Batch, Context};
use flash_sampling::Plan;
use load::{Language, Weights};
use output::Writer;
use report::Report;
use std::io::Write;

/// Writes text. The exit code is 1 when a sequence failed.
///
/// # Errors
/// Bad flags and files, a backend that fails, Ctrl-C.
pub fn run(args: &GenerateArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    args.sampler.check()?;
    let weights = Weights::open(args.text.model.as_deref(), interrupt)?;
    let language = Language::open(&weights)?;
    let model = weights.model(args.sampler.isa)?;
    let head = weights.head.head()?;
    let head = head.with_vocab_size(language.tokens.clamp(1, head.vocab_size() as usize))?;
    check(args, head.vocab_size())?;
    let prompt = language.encode(&args.text.prompt, model.config())?;
    let plan = Plan {
        max_rows: args.text.num_sequences as usize,
        max_logprobs: args.draws.logprobs,
        canonical: args.draws.canonical,
        ..Plan::default()
    };
    let mut sampler = sampler::build(head, &args.sampler, plan)?;
    tracing::debug!("{:?}", sampler.capabilities());

    let pool = args.sampler.threads.map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build());
    let pool = pool.transpose().map_err(|error| CommandError::usage(format!("--threads: {error}")))?;
    let context = Context { args, weights: &weights, model: &model, language: &language, pool: pool.as_ref() };
    let mut report = Report::new(prompt.len());
    let mut writer = Writer::new(args, &language, out);
    let mut batch = Batch::start(context, &prompt, &mut report)?;
    while batch.is_going() {
        interrupt.check()?;
        batch.step(&mut *sampler, &mut report)?;
        writer.go_on(batch.sequences())?;
    }
    let failed = writer.finish(batch.sequences(), args.report.then_some(&report))?;
    Ok(u8::from(failed))
}

/// What the flags ask of the vocabulary, and of seeds.
fn check(args: &GenerateArgs, vocab_size: u32) -> Result<(), CommandError> {
    let last_bias = args.draws.logit_bias.as_deref().and_then(<[_]>::last);
    if let Some((token, _)) = last_bias.filter(|(token, _)| *token >= vocab_size) {
        let message = format!("--logit-bias names token {token}, but there are {vocab_size} tokens");
        return Err(CommandError::usage(message));
    }
    if let Some(logprobs) = args.draws.logprobs.filter(|n| *n > vocab_size) {
        return Err(CommandError::usage(format!("--logprobs {logprobs}, but there are {vocab_size} tokens")));
    }
    match args.draws.seed.checked_add(u64::from(args.text.num_sequences) - 1) {
        Some(_) => Ok(()),
        None => Err(CommandError::usage("--seed and --num-sequences: the last seed would pass 2^64 - 1")),
    }
}
