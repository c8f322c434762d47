//! One rank of a group of shards.

use crate::call::{Call, Standing, begin, encode_waited, is_same_call};
use crate::error::ShardError;
use crate::filtered::{OpenRows, Overviews};
use crate::lists::Listed;
use crate::merge::Merger;
use crate::options::ShardOptions;
use crate::received::{Expected, Received};
use crate::rows::{Batch, Checked, CheckedRows};
use crate::shard::Shard;
use crate::tiling::{Description, Whole};
use crate::transport::Transport;
use crate::{check, differ, summary, surveyed};
use core::ops::Range;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Capabilities, MassHistogram, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape,
};

/// One rank: a local shard, one exchange of summaries per call, and the merge that every rank makes for itself.
///
/// Every rank of the group makes the same calls with the same hidden states and row parameters, and gets the same
/// samples, as [`Sharded`](crate::Sharded) would give them. Each call makes one [`all_gather`](Transport::all_gather) of
/// summaries (and one more for each further pass that rows with filters take, one for raw log-probabilities, and one to
/// name what differs where ranks were called with different parameters), whatever goes wrong on this rank, so that a failure
/// here is an error on the other ranks and not a hang. A call with a row that has a bad logit asks the local shard once more,
/// for such rows alone: whether a raw logit was bad. All ranks merge the same bytes, so they agree to the last bit.
///
/// ```
/// use flash_sampling_core::reference::{Reference, Scheme};
/// use flash_sampling_core::{Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
/// use flash_sampling_distributed::{Loopback, ShardMerge, ShardSampler};
///
/// let weight: Vec<f32> = (0..600).map(|i| (i % 7) as f32).collect();
/// let head = Head::new(Matrix::new(&weight, 300, 2)?)?;
/// let rank = |(shard, transport)| {
///     let local = Box::new(Reference::new(shard, Plan::default(), Scheme::Tiled));
///     let mut sampler = ShardSampler::new(local, transport, ShardMerge::Winners).unwrap();
///     let (mut out, rows) = (Samples::new(), [RowParams { seed: 7, ..Default::default() }]);
///     sampler.sample(Matrix::new(&[1.0f32, 0.5], 1, 2).unwrap(), &rows, &mut out).unwrap();
///     out.row(0).unwrap().token()
/// };
/// let tokens: Vec<u32> = std::thread::scope(|scope| {
///     let ranks = head.split(&[0, 100, 250]).into_iter().zip(Loopback::group(3));
///     let threads: Vec<_> = ranks.map(|rank_of| scope.spawn(move || rank(rank_of))).collect();
///     threads.into_iter().map(|thread| thread.join().unwrap()).collect()
/// });
/// assert!(tokens[0] == tokens[1] && tokens[1] == tokens[2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShardSampler<'s, T> {
    local: Shard<'s>,
    transport: T,
    whole: Whole,
    /// The tokens of each rank.
    tokens: Vec<Range<u32>>,
    merger: Merger,
    open: OpenRows,
    message: Vec<u8>,
    messages: Vec<Vec<u8>>,
    received: Vec<Received>,
    checked: CheckedRows,
    options: ShardOptions,
    /// Calls that were begun, whatever way they go.
    calls: u64,
}

impl<'s, T: Transport> ShardSampler<'s, T> {
    /// This rank's sampler, from its shard of the vocabulary; a [`ShardMerge`](crate::ShardMerge) alone stands for its
    /// [`ShardOptions`]. A collective call: every rank of the group makes it, and in this handshake they learn one another's
    /// ranks, tokens, plans, options and capabilities.
    ///
    /// # Errors
    /// Those of [`Sharded::new`](crate::Sharded::new), [`ShardError::Merge`], [`ShardError::CheckTokens`],
    /// [`ShardError::Type`] and [`ShardError::Rank`] when ranks differ in these, and what can go wrong in an exchange. Every
    /// rank gets the same error about the shards.
    pub fn new(
        mut local: Box<dyn PerturbedArgmax + 's>,
        mut transport: T,
        options: impl Into<ShardOptions>,
    ) -> Result<Self, ShardError> {
        let options = options.into();
        let (mut message, mut messages) = (Vec::new(), Vec::new());
        let rank = (transport.rank(), transport.world());
        Description::of(&mut *local, &options, rank).encode(&mut message);
        exchange(&mut transport, &message, &mut messages)?;
        let description = |(shard, bytes): (usize, &Vec<u8>)| {
            Description::decode(bytes).map_err(|source| ShardError::Message { shard, source })
        };
        let descriptions = messages.iter().enumerate().map(description).collect::<Result<Vec<_>, _>>()?;
        let whole = Whole::of(&descriptions, local.capabilities().backend)?;
        Ok(ShardSampler {
            local: Shard::new(local),
            whole,
            tokens: descriptions.into_iter().map(|d| d.tokens).collect(),
            merger: Merger::default(),
            open: OpenRows::default(),
            message,
            received: messages.iter().map(|_| Received::default()).collect(),
            messages,
            transport,
            checked: CheckedRows::default(),
            options,
            calls: 0,
        })
    }

    /// Restricts the plan, so that a row that asks for more is refused. Every rank must do the same.
    ///
    /// # Errors
    /// [`ShardError::BeyondShards`] when `plan` asks for more than the shards were planned for.
    pub fn with_plan(mut self, plan: Plan) -> Result<Self, ShardError> {
        self.whole.restrict(plan).map(|()| self)
    }

    /// The transport, whose exchanges are this sampler's.
    pub fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Counts a call that goes another way. Every rank does so when it begins one: a rank that comes too late for a call, and
    /// goes on to the next, is then told from one that was called with something else.
    pub fn begin_elsewhere(&mut self) {
        self.calls += 1;
    }

    /// Tells the other ranks, before or after a call that goes another way, how this one stands to it. A collective call.
    /// After an error no rank makes the call; the one that cannot has its own.
    ///
    /// # Errors
    /// [`ShardError::Failed`] where another rank cannot; [`ShardError::Late`] where ranks went on from a call that another
    /// gave up; [`ShardError::Type`], [`ShardError::Rows`] and [`ShardError::Params`] where ranks are called with different
    /// parameters; what can go wrong in an exchange.
    pub fn can_call(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        standing: Standing<'_>,
    ) -> Result<(), ShardError> {
        let call = Call::of(self.calls, rows, input.dtype());
        match standing {
            Standing::Can => begin(&mut self.message, call),
            Standing::Cannot(reason) => summary::encode_failure(&mut self.message, reason),
            Standing::Waited { ranks, limit } => encode_waited(&mut self.message, call, ranks, limit),
        }
        exchange(&mut self.transport, &self.message, &mut self.messages)?;
        if matches!(standing, Standing::Cannot(_)) { Ok(()) } else { self.compare(call, rows) }
    }

    /// Compares this rank's call with those of all messages, and names what differs.
    fn compare(&mut self, call: Call, params: &[RowParams<'_>]) -> Result<(), ShardError> {
        if is_same_call(&self.messages, call)? {
            return Ok(());
        }
        differ::encode(params, &mut self.message);
        exchange(&mut self.transport, &self.message, &mut self.messages)?;
        Err(differ::what(&self.message, &self.messages))
    }

    /// Compares a call and its results, which came by another way, with those of all other ranks. A collective call.
    ///
    /// # Errors
    /// [`ShardError::Inputs`], [`ShardError::Params`], [`ShardError::Disagree`]; [`ShardError::Failed`] and
    /// [`ShardError::Late`] where another rank failed the call or gave it up; what can go wrong in an exchange.
    pub fn check_tokens(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &Samples) -> Result<(), ShardError> {
        check::encode(input, rows, out, &mut self.message);
        exchange(&mut self.transport, &self.message, &mut self.messages)?;
        check::compare(&self.message, &self.messages)
    }

    /// Asks the local shard.
    fn ask(&mut self, batch: &Batch<'_, '_>) -> Result<(), SampleError> {
        check_call(&batch.input, batch.params, &self.whole.shape, &self.whole.plan)?;
        self.local.summarize(batch, &self.whole)
    }

    /// Gathers the summaries and merges them. `failure` is why this rank has none.
    fn gather(
        &mut self,
        call: Call,
        batch: &Batch<'_, '_>,
        failure: Option<&SampleError>,
        out: &mut Samples,
    ) -> Result<(), ShardError> {
        let Batch { params, rows, .. } = *batch;
        match failure {
            Some(error) => summary::encode_failure(&mut self.message, &error.to_string()),
            None => self.summarize(call, rows),
        }
        exchange(&mut self.transport, &self.message, &mut self.messages)?;
        if failure.is_some() {
            return Ok(());
        }
        self.compare(call, params)?;
        self.overview(rows)?;
        let vocab_size = self.whole.shape.vocab_size;
        while self.open.next_pass(vocab_size) {
            self.pass(batch)?;
            let ShardSampler { local, open, tokens, received, .. } = self;
            open.settle(vocab_size, rows, tokens.len(), |shard, row| received[shard].survey(row));
            received.iter_mut().for_each(|received| received.trim(rows.len()));
            local.trim(rows.len());
        }
        let ShardSampler { whole, merger, open, tokens, received, .. } = self;
        let told = |shard: usize, row| (received[shard].row(row), received[shard].stage(row));
        merger.rows(whole, rows, tokens.len(), told, open, out)?;
        if self.open.next_raw(rows, out) {
            self.pass(batch)?;
            let ShardSampler { open, tokens, received, .. } = self;
            open.note_raw(tokens.len(), |shard, row| received[shard].survey(row), out)?;
        }
        Ok(())
    }

    /// Reads the summaries of all ranks, and decides what their overviews tell.
    fn overview(&mut self, rows: &[Checked<'_>]) -> Result<(), ShardError> {
        let ShardSampler { whole, open, tokens, messages, received, .. } = self;
        open.begin(rows);
        for (shard, ((received, bytes), tokens)) in received.iter_mut().zip(&*messages).zip(&*tokens).enumerate() {
            received.decode(bytes, shard, tokens, rows.iter().map(|row| expected(whole, row)), open)?;
        }
        open.decide(whole.shape.vocab_size, rows, tokens.len(), &Told { received, messages, tokens })
    }

    /// One more pass, for rows that are not decided or whose raw logits are asked for: the same rows on every rank, as all
    /// have merged the same surveys.
    fn pass(&mut self, batch: &Batch<'_, '_>) -> Result<(), ShardError> {
        let ShardSampler { local, open, tokens, transport, message, messages, received, .. } = self;
        let Batch { input, params, .. } = *batch;
        let looked = open.inquire(params.len(), |requests| local.scan(input, params, requests));
        match &looked {
            Err(error) => summary::encode_failure(message, &error.to_string()),
            Ok(()) => {
                surveyed::begin_pass(message, open.asked().count());
                open.asked().for_each(|(r, i)| surveyed::encode_told(message, r, &i, local.summary(r)));
            }
        }
        exchange(transport, message, messages)?;
        for (shard, ((received, bytes), tokens)) in received.iter_mut().zip(&*messages).zip(&*tokens).enumerate() {
            received.decode_pass(bytes, shard, tokens, open.asked())?;
        }
        Ok(())
    }

    /// The local summaries of a call, as the message to the other ranks.
    fn summarize(&mut self, call: Call, rows: &[Checked<'_>]) {
        let ShardSampler { local, whole, message, .. } = self;
        begin(message, call);
        for (r, row) in rows.iter().enumerate() {
            let Some(Expected { row, by_mass }) = expected(whole, row) else {
                summary::encode_not_asked(message);
                continue;
            };
            if row.filters.is_some() {
                summary::encode_survey(message, row, local.summary(r), local.stage(r));
            } else {
                summary::encode_row(message, row, by_mass, &local.summary(r).sample(), local.stage(r));
            }
            if row.raw_logprobs.is_some() {
                surveyed::encode_raw(message, local.summary(r));
            }
        }
    }

    /// The exchanges of a call, after the local shard was asked.
    fn draw_together(
        &mut self,
        batch: &Batch<'_, '_>,
        failure: Option<&SampleError>,
        out: &mut Samples,
    ) -> Result<(), ShardError> {
        let Batch { input, params, .. } = *batch;
        let call = Call::of(self.calls, params, input.dtype());
        self.gather(call, batch, failure, out)?;
        if self.options.check_tokens && failure.is_none() {
            self.check_tokens(input, params, out)?;
        }
        Ok(())
    }
}

impl<T: Transport> PerturbedArgmax for ShardSampler<'_, T> {
    fn capabilities(&self) -> Capabilities {
        self.whole.capabilities
    }

    fn shape(&self) -> Shape {
        self.whole.shape.clone()
    }

    fn plan(&self) -> Plan {
        self.whole.plan
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        self.calls += 1;
        let checked = self.checked.check(&self.whole, rows);
        let batch = Batch { input, params: rows, rows: &checked };
        let failure = self.ask(&batch).err();
        let drawn = self.draw_together(&batch, failure.as_ref(), out);
        self.checked.keep(checked);
        if failure.is_some() || drawn.is_err() {
            out.clear();
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(drawn?),
        }
    }
}

/// The overviews of all ranks, in their messages.
struct Told<'m> {
    received: &'m [Received],
    messages: &'m [Vec<u8>],
    tokens: &'m [Range<u32>],
}

impl Overviews for Told<'_> {
    fn listed(&self, shard: usize, row: usize, at: usize) -> Listed {
        self.received[shard].places(row).listed(&self.messages[shard], &self.tokens[shard], at)
    }

    fn add_masses(&self, shard: usize, row: usize, mass: &mut MassHistogram) -> Result<(), ShardError> {
        let added = self.received[shard].places(row).add_masses(&self.messages[shard], &self.tokens[shard], mass);
        added.map_err(|source| ShardError::Message { shard, source })
    }

    fn damaged(&self, shard: usize, row: usize) -> ShardError {
        ShardError::Message { shard, source: self.received[shard].places(row).damaged() }
    }
}

/// What a shard is asked for a row; nothing when the row's parameters are invalid.
fn expected<'r, 'a>(whole: &Whole, row: &'r Checked<'a>) -> Option<Expected<'r, 'a>> {
    let row = row.as_ref().ok()?;
    Some(Expected { row, by_mass: whole.merge.draws_by_mass(row) })
}

fn exchange(transport: &mut impl Transport, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), ShardError> {
    transport.all_gather(mine, all)?;
    let (expected, found) = (transport.world(), all.len());
    if found == expected { Ok(()) } else { Err(ShardError::World { expected, found }) }
}
