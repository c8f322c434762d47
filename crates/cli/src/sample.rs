//! `flash-sampling sample`.

use crate::args::rows::MAX_DRAWS;
use crate::args::values::known_logprobs;
use crate::args::{ExchangeName, Format, RowArgs, SampleArgs, Work};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::load::mask::Masks;
use crate::load::requests::{self, Of, Request};
use crate::output::line;
use crate::output::{Drawn, KeptTokens, RowFailure, RowOutcome, write_json, write_text};
use crate::source::Source;
use crate::{progress, sampler};
use flash_sampling::noise::POSITION_MAX;
use flash_sampling::{
    Head, History, Knob, LogprobsMode, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples,
};
use indicatif::ProgressBar;
use std::io::Write;
use std::ops::Range;

/// Rows of one call of the sampler.
const ROWS_PER_CALL: usize = 256;
/// Draws of one call of the sampler, all rows together: about a second of work on a large vocabulary, after which
/// Ctrl-C is heard.
const DRAWS_PER_CALL: usize = 1 << 13;
/// Draws of one row in one call, at the least: each call computes the logits anew.
const LEAST_DRAWS: usize = 1 << 8;
/// Draws kept before their rows are written; a single row may have up to 10^7.
const DRAWS_KEPT: usize = 1 << 23;

/// Draws, and writes row by row. The exit code is 1 when a row failed.
///
/// # Errors
/// Bad flags and files, a backend that fails, ranks that disagree or are gone, Ctrl-C.
pub fn run(args: &SampleArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    args.transport.check_built(args.sampler.backend)?;
    args.sampler.check_for(if args.transport.transport.is_some() { Work::Ranks } else { Work::Draws })?;
    args.transport.check(&args.sampler)?;
    args.rows.check()?;
    sampler::check_knobs(&args.sampler, args.rows.canonical, &args.rows.row(None, None))?;
    args.rows.tell_idle();
    match args.transport.transport {
        #[cfg(feature = "cuda")]
        Some(transport) if transport.is_of_gpus() => return crate::gpus::run(args, out, interrupt),
        #[cfg(feature = "mpi")]
        Some(_) => return crate::ranks::run(args, out, interrupt),
        _ => {}
    }
    let source = Source::open(&args.head)?;
    draw(args, &source, |head, plan| sampler::build(head, &args.sampler, plan), (out, 0), interrupt)
}

/// Draws by the sampler that `build` makes, as a rank: the first shows how far it is.
pub(crate) fn draw<'s>(
    args: &SampleArgs,
    source: &'s Source,
    build: impl FnOnce(Head<'s>, Plan) -> Result<Box<dyn PerturbedArgmax + 's>, CommandError>,
    (out, rank): (&mut dyn Write, usize),
    interrupt: &Interrupt,
) -> Result<u8, CommandError> {
    let (head, hidden) = (source.head()?, source.hidden()?);
    let by_gpus = args.transport.exchange() != ExchangeName::Host;
    let job = Job { by_gpus, ..Job::new(args, hidden, head.vocab_size())? };
    let mut sampler = build(head, job.plan())?;
    let can = sampler.capabilities();
    if args.rows.without_replacement && !can.without_replacement {
        let instead = sampler::instead(&args.sampler, Knob::WithoutReplacement);
        let refusal = "--without-replacement is not possible with this variant".into();
        return Err(CommandError::usage(sampler::with_instead(refusal, instead)));
    }
    tracing::debug!("{can:?}");
    let bar = match rank {
        0 => progress::bar("drawing", (0..hidden.rows()).map(|row| u64::from(job.draws(row))).sum()),
        _ => ProgressBar::hidden(),
    };
    let mut failed = 0;
    for batch in job.batches() {
        let outcomes = job.draw(&mut *sampler, batch.clone(), &bar, interrupt)?;
        // Rows and bar may share a terminal.
        failed += bar.suspend(|| write(args, &job, batch, outcomes, out))?;
    }
    bar.finish_and_clear();
    if failed > 0 {
        let have = if failed == 1 { "has" } else { "have" };
        let rows = line::count(hidden.rows(), "row");
        tracing::warn!("{failed} of {rows} {have} no draw: an error stands in place of the draws");
    }
    Ok(u8::from(failed > 0))
}

/// Writes what became of a batch of rows; how many failed.
fn write(
    args: &SampleArgs,
    job: &Job<'_>,
    batch: Range<usize>,
    outcomes: Vec<RowOutcome>,
    out: &mut dyn Write,
) -> Result<usize, CommandError> {
    let mut failed = 0;
    for (row, outcome) in batch.zip(outcomes) {
        // What the flags ask, they ask of every row, so nothing is written yet.
        if let (None, Err(RowFailure::Row(error))) = (&args.rows.params, &outcome)
            && let Some(refusal) = sampler::refusal(&args.sampler, args.rows.canonical, error)
        {
            return Err(refusal);
        }
        let outcome = outcome.map_err(|failure| advised(failure, args));
        failed += usize::from(outcome.is_err());
        let written = match args.format {
            Format::Text => write_text(out, row, &outcome, job.without_replacement(row)),
            Format::Json => write_json(out, row, &outcome),
        };
        written.map_err(CommandError::write("to standard output"))?;
    }
    // Ctrl-C may end a call that is long, but not take rows that are done.
    out.flush().map_err(CommandError::write("to standard output"))?;
    Ok(failed)
}

/// A row's failure, with the flags to take instead where there are some.
fn advised(failure: RowFailure, args: &SampleArgs) -> RowFailure {
    match failure {
        RowFailure::Row(error) => sampler::advised(&args.sampler, args.rows.canonical, error).into(),
        failure => failure,
    }
}

/// What is to be drawn, and in which portions. Memory is bounded whatever the number of rows and draws: calls are
/// split by rows and by draw numbers, which leaves every draw as it would be in one call.
#[derive(Debug)]
struct Job<'a> {
    args: &'a RowArgs,
    hidden: Matrix<'a>,
    masks: Option<Masks>,
    /// What the flags ask for of log-probabilities.
    logprobs: u32,
    /// What the flags say of the sequence so far.
    history: Option<History>,
    /// Parameters from a file, one a row.
    requests: Option<Vec<Request>>,
    /// GPUs exchange draws alone: log-probabilities are asked for in a call of their own.
    by_gpus: bool,
}

impl<'a> Job<'a> {
    fn new(args: &'a SampleArgs, hidden: Matrix<'a>, vocab_size: u32) -> Result<Self, CommandError> {
        let (rows, lacks) = (hidden.rows(), sampler::lacks(&args.sampler, args.rows.canonical));
        let args = &args.rows;
        if let Some(seeds) = args.seeds.as_ref().filter(|seeds| seeds.len() != rows) {
            let message =
                format!("--seeds has {} for {}", line::count(seeds.len(), "number"), line::count(rows, "row"));
            return Err(CommandError::usage(message));
        }
        let last_row = if args.seeds.is_some() { 0 } else { rows as u64 - 1 };
        if args.position.checked_add(last_row).is_none_or(|last| last > POSITION_MAX) {
            return Err(CommandError::usage(format!(
                "--position {} for {}: the last row would pass 2^56 - 1",
                args.position,
                line::count(rows, "row")
            )));
        }
        if args.without_replacement && args.draws > vocab_size {
            let there_are = line::there_are(vocab_size, "token");
            let message = format!("--draws {} without replacement, but {there_are}", args.draws);
            return Err(CommandError::usage(message));
        }
        let logprobs = known_logprobs(args.logprobs, vocab_size)?;
        let last_bias = args.logit_bias.as_deref().and_then(<[_]>::last);
        if let Some((token, _)) = last_bias.filter(|(token, _)| *token >= vocab_size) {
            return Err(CommandError::usage(sampler::beyond("--logit-bias", *token, vocab_size)));
        }
        let sequence = &args.sequence;
        for (flag, tokens) in
            [("--prompt-tokens", &sequence.prompt_tokens), ("--output-tokens", &sequence.output_tokens)]
        {
            // Not refused: places of images or sound have such numbers.
            if let Some(&token) = tokens.iter().flat_map(|tokens| tokens.iter()).find(|&&token| token >= vocab_size) {
                tracing::warn!("{}: no penalty is of it", sampler::beyond(flag, token, vocab_size));
            }
        }
        sampler::known("--banned-token-ids", args.sequence.banned_token_ids.as_deref(), vocab_size)?;
        sampler::known("--stop-token-ids", args.sequence.stop_token_ids.as_deref(), vocab_size)?;
        let beyond = |token| CommandError::usage(sampler::beyond("--allowed-token-ids", token, vocab_size));
        let masks = match (&args.mask, &args.allowed_token_ids) {
            (Some(path), _) => Some(Masks::open(path, rows, vocab_size as usize)?),
            (None, Some(tokens)) => Some(Masks::of_tokens(tokens, vocab_size).map_err(beyond)?),
            (None, None) => None,
        };
        let mut requests = None;
        if let Some(path) = &args.params {
            let of_file = requests::open(path, Of::Rows, rows, vocab_size)?;
            let flag = args.seed.map(|_| "--seed").or(args.seeds.as_ref().map(|_| "--seeds"));
            requests::needs_seed(&of_file, flag)?;
            // Log-probabilities of the drawn tokens are always told, so the mode is of use.
            let rows = of_file
                .iter()
                .map(|request| RowParams { logprobs: Some(0), ..request.params.row(0, 0, request.history.as_ref()) });
            requests::tell_idle(path, Of::Rows, lacks, rows);
            requests::tell_beyond(path, &of_file, vocab_size);
            requests = Some(of_file);
        }
        let job = Job { args, hidden, masks, logprobs, history: args.sequence.history(), requests, by_gpus: false };
        for row in 0..rows {
            if job.draws(row) > MAX_DRAWS {
                let message = format!("row {row}: n = {}, but a row has {MAX_DRAWS} draws at most", job.draws(row));
                return Err(CommandError::usage(message));
            }
        }
        Ok(job)
    }

    /// Draws of a row.
    fn draws(&self, row: usize) -> u32 {
        self.requests.as_ref().map_or(self.args.draws, |requests| requests[row].params.fields().n)
    }

    fn without_replacement(&self, row: usize) -> bool {
        let of = |requests: &Vec<Request>| requests[row].params.fields().without_replacement;
        self.requests.as_ref().map_or(self.args.without_replacement, of)
    }

    /// The most draws of a row.
    fn most_draws(&self) -> u32 {
        (0..self.hidden.rows()).map(|row| self.draws(row)).max().unwrap_or(1)
    }

    /// The most log-probabilities that a row lists.
    fn most_logprobs(&self) -> u32 {
        let of =
            |requests: &Vec<Request>| requests.iter().filter_map(|r| r.params.fields().logprobs).max().unwrap_or(0);
        self.requests.as_ref().map_or(self.logprobs, of)
    }

    fn rows_per_call(&self) -> usize {
        (DRAWS_KEPT / self.most_draws() as usize).clamp(1, ROWS_PER_CALL).min(self.hidden.rows())
    }

    fn draws_per_call(&self) -> u32 {
        // A list without replacement is one draw of the noise.
        let most = if (0..self.hidden.rows()).any(|row| self.without_replacement(row)) {
            usize::MAX
        } else {
            (DRAWS_PER_CALL / self.rows_per_call()).max(LEAST_DRAWS)
        };
        most.min(self.most_draws() as usize) as u32
    }

    fn plan(&self) -> Plan {
        Plan {
            max_rows: self.rows_per_call(),
            max_draws: self.draws_per_call(),
            max_logprobs: Some(self.most_logprobs()),
            canonical: self.args.canonical,
        }
    }

    fn batches(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (step, rows) = (self.rows_per_call(), self.hidden.rows());
        (0..rows).step_by(step).map(move |first| first..(first + step).min(rows))
    }

    fn params(&self, row: usize, draws: Range<u32>) -> RowParams<'_> {
        let (seed, position) = match &self.args.seeds {
            Some(seeds) => (seeds[row], self.args.position),
            None => (self.args.seed.unwrap_or(0), self.args.position + row as u64),
        };
        let params = match &self.requests {
            Some(requests) => requests[row].params.row(seed, position, requests[row].history.as_ref()),
            None => {
                let mask = self.masks.as_ref().map(|masks| masks.row(row));
                let row = self.args.row(self.history.as_ref(), mask);
                RowParams { seed, position, logprobs: Some(self.logprobs), ..row }
            }
        };
        // Log Z and the largest are the same for every portion of a row's draws; their raw logits are not.
        let logprobs = match params.logprobs_mode {
            _ if self.is_apart(&params) => None,
            _ if draws.start == 0 => Some(params.logprobs.unwrap_or(0)),
            LogprobsMode::Raw => Some(0),
            _ => None,
        };
        // A row that is done draws once more beside those that are not; nobody looks at that draw.
        let count = draws.end.min(self.draws(row)).saturating_sub(draws.start).max(1);
        // What is kept is the same for every portion too.
        let kept = params.kept && draws.start == 0;
        RowParams { first_draw: draws.start, draws: count, logprobs, kept, ..params }
    }

    /// Whether log-probabilities of a row are asked for in a call of their own.
    fn is_apart(&self, params: &RowParams<'_>) -> bool {
        self.by_gpus && params.logprobs_mode != LogprobsMode::Raw && !params.without_replacement
    }

    /// Log Z and the largest logits of the rows whose draws come without; their first draw, made again, must be the same.
    fn tell(
        &self,
        sampler: &mut dyn PerturbedArgmax,
        batch: Range<usize>,
        outcomes: &mut [RowOutcome],
    ) -> Result<(), CommandError> {
        let most = |row: usize| match &self.requests {
            Some(requests) => requests[row].params.fields().logprobs.unwrap_or(0),
            None => self.logprobs,
        };
        let is_apart: Vec<bool> = batch.clone().map(|row| self.is_apart(&self.params(row, 0..1))).collect();
        if !is_apart.contains(&true) {
            return Ok(());
        }
        let asked = |(row, is_apart): (usize, &bool)| match is_apart {
            true => RowParams { logprobs: Some(most(row)), ..self.params(row, 0..1) },
            false => RowParams { draws: 1, ..RowParams::default() },
        };
        let params: Vec<_> = batch.clone().zip(&is_apart).map(asked).collect();
        let mut samples = Samples::new();
        sampler.sample(self.hidden.row_range(batch.clone()), &params, &mut samples)?;
        for ((row, outcome), (told, is_apart)) in batch.zip(outcomes).zip(samples.iter().zip(is_apart)) {
            let (true, Ok(drawn), Ok(told)) = (is_apart, outcome, told) else { continue };
            let again = told.draws.first().map(|draw| (draw.token, draw.score.to_bits()));
            let drawn_first = drawn.tokens.first().copied().zip(drawn.scores.first().map(|score| score.to_bits()));
            if again != drawn_first {
                let source = format!("row {row}: the GPUs drew another token than their shards tell").into();
                return Err(SampleError::Backend { backend: "cuda", source }.into());
            }
            drawn.log_z = told.log_z.unwrap_or(f64::NAN);
            drawn.top.extend_from_slice(told.top);
        }
        Ok(())
    }

    /// All draws of a batch of rows.
    fn draw(
        &self,
        sampler: &mut dyn PerturbedArgmax,
        batch: Range<usize>,
        bar: &ProgressBar,
        interrupt: &Interrupt,
    ) -> Result<Vec<RowOutcome>, CommandError> {
        let mut outcomes: Vec<RowOutcome> = vec![Ok(Drawn::default()); batch.len()];
        let input = self.hidden.row_range(batch.clone());
        let mut samples = Samples::new();
        let mut done = 0;
        let most = batch.clone().map(|row| self.draws(row)).max().unwrap_or(0);
        while done < most {
            interrupt.check()?;
            let next = done + self.draws_per_call().min(most - done);
            let params: Vec<_> = batch.clone().map(|row| self.params(row, done..next)).collect();
            sampler.sample(input, &params, &mut samples)?;
            for (at, (outcome, row)) in outcomes.iter_mut().zip(samples.iter()).enumerate() {
                match (&mut *outcome, row) {
                    (Ok(_), _) if self.draws(batch.start + at) <= done => {}
                    (Ok(drawn), Ok(row)) => {
                        drawn.extend(row.draws, row.raw_logits);
                        drawn.log_z = row.log_z.unwrap_or(drawn.log_z);
                        drawn.top.extend_from_slice(row.top);
                        drawn.kept = row.kept.map(KeptTokens::of).or(drawn.kept.take());
                    }
                    (Ok(_), Err(error)) => *outcome = Err(RowFailure::of(error, input, at, params[at].mask)),
                    (Err(_), _) => {}
                }
            }
            let drawn = |row: usize| u64::from(next.min(self.draws(row)).saturating_sub(done));
            bar.inc(batch.clone().map(drawn).sum());
            done = next;
        }
        self.tell(sampler, batch, &mut outcomes)?;
        Ok(outcomes)
    }
}
