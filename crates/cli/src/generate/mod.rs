//! `flash-sampling generate`: text, token by token.
//!
//! The layers run on the CPU, the head and the draw on any backend. Sequence i of a batch has seed SEED + i, and the token
//! at a place of a sequence has the noise of (seed, place), so a sequence is what it would be alone, on any number of
//! threads and by any variant that is exact pathwise.

mod batch;
mod draft;
mod engine;
mod load;
mod output;
mod progress;
mod report;
mod requests;
mod sequence;
mod text;

use crate::args::{GenerateArgs, Work};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::line;
use crate::{idle, sampler};
use batch::Batch;
use draft::Draft;
use engine::Engine;
use flash_sampling::Plan;
use load::{Language, Weights};
use output::Writer;
use progress::Progress;
use report::Report;
use requests::Requests;
use std::io::Write;
use std::path::Path;

/// Tokens that a small model draws ahead, without `--draft-tokens`.
const AHEAD: u32 = 4;

/// Writes text. The exit code is 1 when a sequence failed.
///
/// # Errors
/// Bad flags and files, a backend that fails, Ctrl-C.
pub fn run(args: &GenerateArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    args.sampler.check_for(Work::Text)?;
    args.check()?;
    sampler::check_knobs(&args.sampler, args.draws.canonical, &args.row(idle::written(), &[], None))?;
    args.tell_idle();
    let weights = Weights::open(args.text.model.as_deref())?;
    let language = Language::open(&weights)?;
    let model = weights.model(args.sampler.isa)?;
    let head = weights.head(&language, model.vocab_size())?;
    check(args, head.vocab_size())?;
    weights.check_eos(head.vocab_size())?;
    let requests = Requests::open(args, &model.config().eos, head.vocab_size())?;
    weights.read(interrupt)?;
    let (max_logprobs, canonical) = (requests.most_logprobs(), args.draws.canonical);
    let plan = |max_rows| Plan { max_rows, max_logprobs, canonical, ..Plan::default() };
    let prompt = language.encode(&args.text.prompt, model.config())?;
    let pool = args.sampler.threads.map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build());
    let pool = pool.transpose().map_err(|error| CommandError::usage(format!("--threads: {error}")))?;
    let (rows, ahead) = (args.text.num_sequences as usize, args.text.draft_tokens.unwrap_or(AHEAD) as usize);

    let small = args.text.draft.as_deref().map(|folder| open_draft(folder, &language, interrupt)).transpose()?;
    let small_model = small.as_ref().map(|small| small.model(args.sampler.isa)).transpose()?;
    let mut draft = None;
    if let (Some(small), Some(small_model)) = (&small, &small_model) {
        // It proposes what both can read.
        let embeddings = model.vocab_size().min(small_model.vocab_size());
        let parts = (small, small_model, small.head(&language, embeddings)?);
        let engine = Engine::new(args, parts, plan(rows), pool.as_ref())?;
        draft = Some(Draft::start(args, engine, &requests, &prompt, ahead)?);
    }
    let rows = if draft.is_some() { rows * (1 + ahead) } else { rows };
    let engine = Engine::new(args, (&weights, &model, head), plan(rows), pool.as_ref())?;
    let mut report = Report::new(prompt.len());
    let mut writer = Writer::new(args, &language, &requests, out);
    let mut batch = Batch::start(args, &language, (engine, &requests), &prompt, &mut report)?.with_draft(draft);
    let limit = model.config().max_positions;
    let progress = Progress::new(args, limit - prompt.len());
    while batch.is_going() {
        let step = interrupt.check().and_then(|()| batch.step(&mut report));
        step.inspect_err(|_| writer.break_off())?;
        progress.beside(|| writer.go_on(batch.sequences()))?;
        progress.tell(batch.sequences());
    }
    progress.end();
    let cut = batch.sequences().iter().filter(|sequence| sequence.is_cut(args.text.max_tokens, limit)).count();
    if cut > 0 {
        let (all, limit) = (line::count(args.text.num_sequences, "sequence"), line::count(limit, "position"));
        tracing::warn!("{cut} of {all} ended before --max-tokens: the model has {limit}");
    }
    let failed = writer.finish(batch.sequences(), args.report.then_some(&report))?;
    Ok(u8::from(failed))
}

/// The model of `--draft`: one that has the same tokens.
fn open_draft(folder: &Path, language: &Language, interrupt: &Interrupt) -> Result<Weights, CommandError> {
    let weights = Weights::open(Some(folder))?;
    if Language::open(&weights)?.has_tokens_of(language) {
        weights.read(interrupt)?;
        return Ok(weights);
    }
    let message = format!("--draft {}: its tokenizer has other tokens than the model's", folder.display());
    Err(CommandError::usage(message))
}

/// What the flags ask of the vocabulary, and of seeds.
fn check(args: &GenerateArgs, vocab_size: u32) -> Result<(), CommandError> {
    let last_bias = args.draws.logit_bias.as_deref().and_then(<[_]>::last);
    if let Some((token, _)) = last_bias.filter(|(token, _)| *token >= vocab_size) {
        return Err(CommandError::usage(sampler::beyond("--logit-bias", *token, vocab_size)));
    }
    match args.draws.seed.unwrap_or(0).checked_add(u64::from(args.text.num_sequences) - 1) {
        Some(_) => Ok(()),
        None => Err(CommandError::usage("--seed and --num-sequences: the last seed would pass 2^64 - 1")),
    }
}
