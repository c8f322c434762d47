//! Rows and draws of one call of the command, in portions of bounded memory.

use super::row::{Drawn, KeptTokens, RowOutcome, explain};
use crate::args::rows::MAX_DRAWS;
use crate::args::{ExchangeName, SampleArgs, ineffective_flags};
use crate::error::CommandError;
use crate::input::mask::Masks;
use crate::input::requests::{self, RequestKind, Requests};
use crate::interrupt::Interrupt;
use crate::output::line;
use crate::sampler::Support;
use flash_sampling::noise::POSITION_MAX;
use flash_sampling::{
    LogprobsMode, Matrix, PerturbedArgmax, Plan, RowError, RowParams, SampleError, Samples, SamplingParamsBuilder,
};
use indicatif::ProgressBar;
use std::ops::Range;

/// Rows of one call of the sampler.
const ROWS_PER_CALL: usize = 256;
/// Draws of one call of the sampler over all rows. On a large vocabulary a call takes about a second, and Ctrl-C is
/// checked between calls.
const DRAWS_PER_CALL: usize = 1 << 13;
/// Minimum of draws of one row in one call, because each call computes the logits.
const LEAST_DRAWS: usize = 1 << 8;
/// Draws held in memory before their rows are written; a single row may have up to 10^7.
const DRAWS_HELD: usize = 1 << 23;

/// All rows and their draws. Calls are split by rows and by draw numbers, so memory is bounded. The split changes no
/// draw.
#[derive(Debug)]
pub(super) struct Job<'a> {
    args: &'a SampleArgs,
    hidden: Matrix<'a>,
    masks: Option<Masks>,
    /// The parameters of the rows, from the flags or from `--params`.
    requests: Requests,
    support: Support<'a>,
    /// GPUs exchange only draws, so log-probabilities need a separate call.
    on_gpus: bool,
}

impl<'a> Job<'a> {
    pub(super) fn new(args: &'a SampleArgs, hidden: Matrix<'a>, vocab_size: u32) -> Result<Self, CommandError> {
        let (rows, flags) = (hidden.rows(), &args.rows);
        if let Some(seeds) = flags.seeds.as_ref().filter(|seeds| seeds.len() != rows) {
            let message =
                format!("--seeds has {} for {}", line::count(seeds.len(), "number"), line::count(rows, "row"));
            return Err(CommandError::usage(message));
        }
        let last_row = if flags.seeds.is_some() { 0 } else { rows as u64 - 1 };
        if flags.position.checked_add(last_row).is_none_or(|last| last > POSITION_MAX) {
            return Err(CommandError::usage(format!(
                "--position {} for {}: the position of the last row exceeds 2^56 - 1",
                flags.position,
                line::count(rows, "row")
            )));
        }
        if flags.without_replacement && flags.draws > vocab_size {
            let message =
                format!("--draws {} without replacement, but the vocabulary has size {vocab_size}", flags.draws);
            return Err(CommandError::usage(message));
        }
        let masks = flags.mask.as_ref().map(|path| Masks::open(path, rows, vocab_size as usize)).transpose()?;
        let requests = match &flags.params {
            None => Requests::shared(flags.request(Some(vocab_size))?),
            Some(path) => {
                let requests = requests::open(path, RequestKind::Row, rows, vocab_size)?;
                let seed = flags.seed.map(|_| "--seed").or(flags.seeds.as_ref().map(|_| "--seeds"));
                ineffective_flags::refuse_seed(seed, &requests)?;
                requests
            }
        };
        let (support, on_gpus) =
            (Support::new(&args.sampler, flags.canonical)?, args.transport.exchange() != ExchangeName::Host);
        let job = Job { args, hidden, masks, requests, support, on_gpus };
        match (0..rows).find(|row| job.draws(*row) > MAX_DRAWS) {
            Some(row) => {
                let message = format!("row {row}: n = {}, but a row has at most {MAX_DRAWS} draws", job.draws(row));
                Err(CommandError::usage(message))
            }
            None => Ok(job),
        }
    }

    /// Warns of parameters without effect, and of tokens of the sequence outside the vocabulary.
    pub(super) fn warn(&self, vocab_size: u32) {
        let flags = &self.args.rows;
        // The output always has log-probabilities of the drawn tokens, so `logprobs_mode` has an effect.
        let rows = self.requests.iter();
        let rows = rows.map(|r| RowParams { logprobs: Some(0), ..r.params.row(0, 0, r.history.as_ref()) });
        let file = flags.params.as_deref().map(|path| (path, RequestKind::Row));
        ineffective_flags::warn(file, &self.support, vocab_size, rows);
    }

    fn fields(&self, row: usize) -> &SamplingParamsBuilder {
        self.requests.of(row).params.fields()
    }

    pub(super) fn draws(&self, row: usize) -> u32 {
        self.fields(row).n
    }

    pub(super) fn without_replacement(&self, row: usize) -> bool {
        self.fields(row).without_replacement
    }

    /// Listed log-probabilities of a row.
    fn logprobs(&self, row: usize) -> u32 {
        self.fields(row).logprobs.unwrap_or(0)
    }

    fn max_draws(&self) -> u32 {
        self.requests.iter().map(|request| request.params.fields().n).max().unwrap_or(0)
    }

    fn rows_per_call(&self) -> usize {
        (DRAWS_HELD / self.max_draws().max(1) as usize).clamp(1, ROWS_PER_CALL).min(self.hidden.rows())
    }

    fn draws_per_call(&self) -> u32 {
        // A list without replacement is one draw of the noise.
        let has_list = self.requests.iter().any(|request| request.params.fields().without_replacement);
        let most = if has_list { usize::MAX } else { (DRAWS_PER_CALL / self.rows_per_call()).max(LEAST_DRAWS) };
        most.min(self.max_draws() as usize) as u32
    }

    pub(super) fn plan(&self) -> Plan {
        Plan {
            max_rows: self.rows_per_call(),
            max_draws: self.draws_per_call(),
            max_logprobs: Some((0..self.hidden.rows()).map(|row| self.logprobs(row)).max().unwrap_or(0)),
            canonical: self.args.rows.canonical,
        }
    }

    pub(super) fn batches(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (step, rows) = (self.rows_per_call(), self.hidden.rows());
        (0..rows).step_by(step).map(move |first| first..(first + step).min(rows))
    }

    fn params(&self, row: usize, draws: Range<u32>) -> RowParams<'_> {
        let flags = &self.args.rows;
        let (seed, position) = match &flags.seeds {
            Some(seeds) => (seeds[row], flags.position),
            None => (flags.seed.unwrap_or(0), flags.position + row as u64),
        };
        let request = self.requests.of(row);
        let params = request.params.row(seed, position, request.history.as_ref());
        let mask = self.masks.as_ref().map_or(params.mask, |masks| Some(masks.row(row)));
        // Every portion of a row's draws has the same log Z, largest logits and given tokens, but other raw logits and ranks.
        let logprobs = match params.logprobs_mode {
            _ if self.has_separate_logprobs(&params) => None,
            _ if draws.start == 0 => Some(params.logprobs.unwrap_or(0)),
            _ if params.ranks => Some(0),
            LogprobsMode::Raw => Some(0),
            _ => None,
        };
        let logprob_token_ids = if draws.start == 0 { params.logprob_token_ids } else { &[] };
        // While other rows are unfinished, a finished row makes one more draw, which is dropped.
        let count = draws.end.min(self.draws(row)).saturating_sub(draws.start).max(1);
        // Every portion keeps the same tokens.
        let kept = params.kept && draws.start == 0;
        RowParams { first_draw: draws.start, draws: count, logprobs, logprob_token_ids, kept, mask, ..params }
    }

    /// The error of a row on one line.
    fn failure(&self, error: &RowError, hidden: Matrix<'_>, (row, params): (usize, &RowParams<'_>)) -> String {
        match error {
            RowError::Unsupported { .. } => {
                self.support.message(params, str::to_owned).unwrap_or_else(|| error.to_string())
            }
            _ => explain(error, hidden, row, params.mask),
        }
    }

    /// Whether a row's log-probabilities need a separate call.
    fn has_separate_logprobs(&self, params: &RowParams<'_>) -> bool {
        let has_tokens = params.ranks || !params.logprob_token_ids.is_empty();
        self.on_gpus && params.logprobs_mode != LogprobsMode::Raw && !params.without_replacement && !has_tokens
    }

    /// Adds log Z and the largest logits to rows of [`Job::has_separate_logprobs`]. The call repeats the first draw of
    /// such a row, which must be the same.
    fn add_logprobs(
        &self,
        sampler: &mut dyn PerturbedArgmax,
        batch: Range<usize>,
        outcomes: &mut [RowOutcome],
    ) -> Result<(), CommandError> {
        let is_separate = |row: usize| self.has_separate_logprobs(&self.params(row, 0..1));
        if !batch.clone().any(is_separate) {
            return Ok(());
        }
        let row_params = |row: usize| match is_separate(row) {
            true => RowParams { logprobs: Some(self.logprobs(row)), ..self.params(row, 0..1) },
            false => RowParams { draws: 1, ..RowParams::default() },
        };
        let params: Vec<_> = batch.clone().map(row_params).collect();
        let mut samples = Samples::new();
        sampler.sample(self.hidden.row_range(batch.clone()), &params, &mut samples)?;
        for ((row, outcome), sample) in batch.zip(outcomes).zip(samples.iter()) {
            let (true, Ok(drawn), Ok(sample)) = (is_separate(row), outcome, sample) else { continue };
            let repeated = sample.draws.first().map(|draw| (draw.token, draw.score.to_bits()));
            let first = drawn.tokens.first().copied().zip(drawn.scores.first().map(|score| score.to_bits()));
            if repeated != first {
                let source = format!("row {row}: the draw on the GPUs differs from the draw over the transport").into();
                return Err(SampleError::Backend { backend: "cuda", source }.into());
            }
            drawn.log_z = sample.log_z.unwrap_or(f64::NAN);
            drawn.top.extend_from_slice(sample.top);
        }
        Ok(())
    }

    /// All draws of a batch of rows.
    pub(super) fn draw(
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
                        drawn.ranks.extend_from_slice(row.ranks);
                        drawn.given.extend_from_slice(row.token_logits);
                        drawn.kept = row.kept.map(KeptTokens::of).or(drawn.kept.take());
                    }
                    (Ok(_), Err(error)) => *outcome = Err(self.failure(&error, input, (at, &params[at]))),
                    (Err(_), _) => {}
                }
            }
            let drawn = |row: usize| u64::from(next.min(self.draws(row)).saturating_sub(done));
            bar.inc(batch.clone().map(drawn).sum());
            done = next;
        }
        self.add_logprobs(sampler, batch, &mut outcomes)?;
        Ok(outcomes)
    }
}
