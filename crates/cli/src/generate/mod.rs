//! `flash-sampling generate`: text, token by token.
//!
//! The layers run on the CPU, the head and the draw on any backend. Sequence i of a batch has seed SEED + i, and the noise
//! of a token depends only on (seed, position). So a sequence is independent of the batch, the number of threads, and the
//! variant, if the variant is exact pathwise.

mod batch;
mod draft;
mod engine;
mod report;
mod requests;
mod sequence;
mod text_stream;
mod tokenizer;
mod weights;
mod writer;

use crate::args::GenerateArgs;
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::line;
use batch::Batch;
use draft::Draft;
use engine::Engine;
use flash_sampling::{CpuOptions, Plan};
use report::Report;
use requests::Requests;
use std::io::Write;
use std::path::Path;
use tokenizer::TextTokenizer;
use weights::Weights;
use writer::Writer;

/// Draft tokens per step without `--draft-tokens`.
const DRAFT_TOKENS: u32 = 4;

/// Writes text. The exit code is 1 if a sequence failed.
///
/// # Errors
/// Bad flags and files, a backend that fails, Ctrl-C.
pub fn run(args: &GenerateArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    args.check()?;
    let CpuOptions { isa, threads } = args.sampler.cpu();
    if let Some(threads) = threads {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
        pool.map_err(|error| CommandError::usage(format!("--backend: {error}")))?;
    }
    let mut weights = Weights::open(args.text.model.as_deref())?;
    weights.head.load_shadow(&args.sampler)?;
    let tokenizer = &weights.tokenizer;
    let model = weights.model(isa)?;
    let head = weights.sampled_head(model.vocab_size())?;
    if args.draws.seed.unwrap_or(0).checked_add(u64::from(args.text.num_sequences) - 1).is_none() {
        return Err(CommandError::usage("--seed and --num-sequences: the last seed exceeds 2^64 - 1"));
    }
    weights.check_eos(head.vocab_size())?;
    let requests = Requests::open(args, &model.config().eos, head.vocab_size())?;
    let (max_logprobs, canonical) = (requests.max_logprobs(), args.draws.canonical);
    let plan = |max_rows| Plan { max_rows, max_logprobs, canonical, ..Plan::default() };
    let prompt = tokenizer.encode(&args.text.prompt, model.config())?;
    let (rows, ahead) = (args.text.num_sequences as usize, args.text.draft_tokens.unwrap_or(DRAFT_TOKENS) as usize);

    let draft_weights = args.text.draft.as_deref().map(|folder| open_draft(folder, tokenizer)).transpose()?;
    let draft_model = draft_weights.as_ref().map(|weights| weights.model(isa)).transpose()?;
    let mut draft = None;
    if let (Some(weights), Some(draft_model)) = (&draft_weights, &draft_model) {
        // The draft model proposes only tokens that both models can read.
        let embeddings = model.vocab_size().min(draft_model.vocab_size());
        let parts = (weights, draft_model, weights.sampled_head(embeddings)?);
        let engine = Engine::new(args, parts, plan(rows))?;
        draft = Some(Draft::start(args, engine, &requests, &prompt, ahead)?);
    }
    let rows = if draft.is_some() { rows * (1 + ahead) } else { rows };
    let engine = Engine::new(args, (&weights, &model, head), plan(rows))?;
    weights.head.log();
    let mut report = Report::new(prompt.len(), args.sampler.shadow.is_some());
    let mut writer = Writer::new(args, tokenizer, &requests, out);
    let mut batch = Batch::start(args, tokenizer, (engine, draft, &requests), &prompt, &mut report)?;
    let limit = model.config().max_positions;
    while batch.is_active() {
        let step = interrupt.check().and_then(|()| batch.step(&mut report));
        step.inspect_err(|_| writer.end_line())?;
        writer.write_new(batch.sequences())?;
    }
    let cut = batch.sequences().iter().filter(|sequence| sequence.is_cut(args.text.max_tokens, limit)).count();
    if cut > 0 {
        let (all, limit) = (line::count(args.text.num_sequences, "sequence"), line::count(limit, "position"));
        tracing::warn!("{cut} of {all} ended before --max-tokens: the model has {limit}");
    }
    let failed = writer.finish(batch.sequences(), args.report.then_some(&report))?;
    Ok(u8::from(failed))
}

/// Opens the model of `--draft`, which must have the same tokens.
fn open_draft(path: &Path, tokenizer: &TextTokenizer) -> Result<Weights, CommandError> {
    let weights = Weights::open(Some(path))?;
    if weights.tokenizer.has_tokens_of(tokenizer) {
        return Ok(weights);
    }
    let message = format!("--draft {}: its tokenizer has different tokens from the model's", path.display());
    Err(CommandError::usage(message))
}
