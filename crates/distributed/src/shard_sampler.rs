//! One rank of a group of shards.

use crate::codec::call::{
    Call, CallStatus, begin, begin_pass, digest_of, encode_failure, encode_waited, header, is_same_call, pass_header,
};
use crate::codec::summary::{Layout, decode_row, encode_row};
use crate::codec::wire::Reader;
use crate::error::ShardError;
use crate::local_shard::LocalShard;
use crate::merge::{RowMerger, ShardMerge};
use crate::mismatch;
use crate::options::ShardOptions;
use crate::shard_layout::{ShardInfo, ShardedVocab};
use crate::transport::Transport;
use core::ops::Range;
use flash_sampling_core::backend::{Batch, CheckedRow, Driver, Request, RowSummary, Scan, check_call};
use flash_sampling_core::{Description, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples};

/// One rank of a group: a local shard, one exchange of summaries per pass, and a merge on every rank.
///
/// Every rank of the group makes the same calls with the same hidden states and row parameters, and gets the same
/// samples, equal to those of [`Sharded`](crate::Sharded). All ranks merge the same bytes, so they agree to the last
/// bit.
///
/// Each call makes one [`all_gather`](Transport::all_gather) of summaries. Further exchanges follow for each further
/// pass of rows with filters, for raw log-probabilities, and to name a mismatch of parameters. A rank that fails sends
/// its failure in the next exchange, so the other ranks get an error and do not hang.
///
/// ```
/// use flash_sampling_core::reference::{Reference, ReferenceVariant};
/// use flash_sampling_core::{Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
/// use flash_sampling_distributed::{Loopback, ShardMerge, ShardSampler};
///
/// let weight: Vec<f32> = (0..600).map(|i| (i % 7) as f32).collect();
/// let head = Head::new(Matrix::new(&weight, 300, 2)?)?;
/// let rank = |(shard, transport)| {
///     let local = Box::new(Reference::new(shard, Plan::default(), ReferenceVariant::Tiled));
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
    group: RankGroup<'s, T>,
    vocab: ShardedVocab,
    driver: Driver,
    /// The number of calls begun, on any transport.
    calls: u64,
}

/// The shards of all ranks as one scan: this rank's own, and one exchange of summaries.
#[derive(Debug)]
struct RankGroup<'s, T> {
    local: LocalShard<'s>,
    transport: T,
    merge: ShardMerge,
    tokens: Vec<Range<u32>>,
    /// The call, before its first pass.
    call: Option<Call>,
    message: Vec<u8>,
    messages: Vec<Vec<u8>>,
    /// The number of bytes read from each message.
    read: Vec<usize>,
    /// The summary of one row from one rank.
    received: RowSummary,
    merger: RowMerger,
}

impl<'s, T: Transport> ShardSampler<'s, T> {
    /// This rank's sampler, from its shard of the vocabulary. A [`ShardMerge`] converts to
    /// [`ShardOptions`].
    ///
    /// A collective call: every rank of the group makes it. In this handshake, ranks exchange their ranks, tokens,
    /// plans, options and capabilities.
    ///
    /// # Errors
    /// The errors of [`Sharded::new`](crate::Sharded::new), [`ShardError::Rank`], and the errors of an exchange. Every
    /// rank gets the same error about the shards.
    pub fn new(
        mut local: Box<dyn PerturbedArgmax + 's>,
        mut transport: T,
        options: impl Into<ShardOptions>,
    ) -> Result<Self, ShardError> {
        let options = options.into();
        let (mut message, mut messages) = (Vec::new(), Vec::new());
        let rank = (transport.rank(), transport.world());
        ShardInfo::of(&mut *local, &options, rank.0, rank.1).encode(&mut message);
        exchange(&mut transport, &message, &mut messages)?;
        let shard_info = |(shard, bytes): (usize, &Vec<u8>)| {
            ShardInfo::decode(bytes).map_err(|source| ShardError::Message { shard, source })
        };
        let shards = messages.iter().enumerate().map(shard_info).collect::<Result<Vec<_>, _>>()?;
        let mut vocab = ShardedVocab::of(&shards, local.capabilities().backend)?;
        vocab.of.capabilities.shadow = local.capabilities().shadow;
        let group = RankGroup {
            local: LocalShard::new(local),
            transport,
            merge: options.merge,
            tokens: shards.into_iter().map(|d| d.tokens).collect(),
            call: None,
            message,
            messages,
            read: Vec::new(),
            received: RowSummary::default(),
            merger: RowMerger::default(),
        };
        Ok(ShardSampler { group, vocab, driver: Driver::default(), calls: 0 })
    }

    /// Restricts the plan, so that a row beyond it is refused. Every rank must do the same.
    ///
    /// # Errors
    /// [`ShardError::BeyondShards`] if `plan` exceeds the plan of the shards.
    pub fn with_plan(mut self, plan: Plan) -> Result<Self, ShardError> {
        self.vocab.restrict(plan).map(|()| self)
    }

    /// The transport of this sampler.
    pub fn transport(&mut self) -> &mut T {
        &mut self.group.transport
    }

    /// Counts a call that is exchanged outside the transport. Every rank does so at the begin of such a call.
    ///
    /// The count distinguishes a late rank, which makes the next call, from a rank with other parameters.
    pub fn count_call(&mut self) {
        self.calls += 1;
    }

    /// Sends this rank's status to the other ranks, before or after a call that is exchanged outside the transport. A
    /// collective call.
    ///
    /// After an error no rank makes the call. A rank that sends [`CallStatus::Failed`] gets no error here.
    ///
    /// # Errors
    /// [`ShardError::Failed`] if another rank cannot make the call; [`ShardError::Late`] if ranks passed a call that
    /// another rank gave up; [`ShardError::Mismatch`] and [`ShardError::Params`] if ranks have different calls; the
    /// errors of an exchange.
    pub fn can_call(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        status: CallStatus<'_>,
    ) -> Result<(), ShardError> {
        let call = Call::of(self.calls, rows, input.dtype());
        let group = &mut self.group;
        match status {
            CallStatus::Ready => begin(&mut group.message, call),
            CallStatus::Failed(reason) => encode_failure(&mut group.message, reason),
            CallStatus::TimedOut { ranks, limit } => encode_waited(&mut group.message, call, ranks, limit),
        }
        group.exchange()?;
        if matches!(status, CallStatus::Failed(_)) { Ok(()) } else { group.compare(call, rows) }
    }
}

impl<T: Transport> RankGroup<'_, T> {
    /// Gathers the messages of all ranks.
    fn exchange(&mut self) -> Result<(), ShardError> {
        exchange(&mut self.transport, &self.message, &mut self.messages)
    }

    /// Compares this rank's call with all messages, and names a mismatch.
    fn compare(&mut self, call: Call, params: &[RowParams<'_>]) -> Result<(), ShardError> {
        if is_same_call(&self.messages, self.transport.rank(), call)? {
            return Ok(());
        }
        mismatch::encode(params, &mut self.message);
        self.exchange()?;
        Err(mismatch::first_mismatch(&self.message, &self.messages))
    }

    /// Sends this rank's failure to the other ranks, in the next exchange.
    fn fail(&mut self, error: &SampleError) -> Result<(), ShardError> {
        self.call = None;
        encode_failure(&mut self.message, &error.to_string());
        self.exchange()
    }

    /// Writes the summaries of the local shard.
    fn encode(&mut self, call: Option<Call>, rows: &[CheckedRow<'_>], requests: &[Request<'_>]) {
        let RankGroup { local, merge, message, .. } = self;
        match call {
            Some(call) => begin(message, call),
            None => begin_pass(message, requests),
        }
        for (r, (row, request)) in rows.iter().zip(requests).enumerate() {
            if let Some(layout) = layout(*merge, row, request) {
                encode_row(message, layout, local.summary(r));
                local.trim(r, rows.len());
            }
        }
    }

    /// Reads and merges the summaries of all ranks.
    fn merge(
        &mut self,
        is_first: bool,
        rows: &[CheckedRow<'_>],
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), ShardError> {
        let RankGroup { local, merge, tokens, messages, read, received, merger, .. } = self;
        let digest = digest_of(requests);
        read.clear();
        for (shard, bytes) in messages.iter().enumerate() {
            let mut reader = Reader::new(bytes);
            if is_first {
                header(&mut reader, shard).map(drop)?
            } else {
                pass_header(&mut reader, shard, digest)?
            }
            read.push(reader.at());
        }
        for (r, (row, request)) in rows.iter().zip(requests).enumerate() {
            let Some(layout) = layout(*merge, row, request) else { continue };
            merger.begin(layout.row, &mut out[r]);
            out[r].is_fallback = local.summary(r).is_fallback;
            for (shard, ((bytes, at), tokens)) in messages.iter().zip(&mut *read).zip(&*tokens).enumerate() {
                let answer = |reason| ShardError::Answer { shard, row: r, reason };
                let mut reader = Reader::from(bytes, *at);
                let is_drawn = request.is_overview() && layout.row.filters.is_none();
                if is_drawn {
                    received.begin(layout.row);
                }
                let decoded = decode_row(&mut reader, tokens, layout, if is_drawn { received } else { &mut out[r] });
                decoded.map_err(|source| ShardError::Message { shard, source })?.map_err(answer)?;
                *at = reader.at();
                if is_drawn {
                    merger.add(*merge, layout.row, request, (shard, &*received), &mut out[r]).map_err(answer)?;
                }
            }
        }
        for (shard, (bytes, at)) in messages.iter().zip(read).enumerate() {
            Reader::from(bytes, *at).finish().map_err(|source| ShardError::Message { shard, source })?;
        }
        Ok(())
    }
}

impl<T: Transport> Scan for RankGroup<'_, T> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        if let Err(error) = self.local.scan(batch, requests, self.merge) {
            // The caller gets the cause, even if the exchange fails too.
            self.fail(&error).ok();
            return Err(error);
        }
        let call = self.call.take();
        self.encode(call, batch.rows, requests);
        self.exchange()?;
        if let Some(call) = call {
            self.compare(call, batch.params)?;
        }
        Ok(self.merge(call.is_some(), batch.rows, requests, out)?)
    }
}

impl<T: Transport> PerturbedArgmax for ShardSampler<'_, T> {
    fn description(&self) -> Description {
        self.vocab.of.clone()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        self.calls += 1;
        let ShardSampler { group, vocab, driver, .. } = self;
        if let Err(error) = check_call(&input, rows, &vocab.of.shape, &vocab.of.plan) {
            group.fail(&error).ok();
            return Err(error);
        }
        group.call = Some(Call::of(self.calls, rows, input.dtype()));
        driver.sample(group, &vocab.of, input, rows, out)
    }

    /// Every rank does the same before its next call.
    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.group.local.replan(max_rows)?;
        self.vocab.replan(max_rows);
        Ok(())
    }
}

/// The parts of a row's summary; `None` if the row is skipped or its parameters are invalid.
fn layout<'r, 'a>(merge: ShardMerge, row: &'r CheckedRow<'a>, request: &'r Request<'r>) -> Option<Layout<'r, 'a>> {
    let row = row.as_ref().ok().filter(|_| *request != Request::Skip)?;
    Some(Layout { row, request, by_mass: merge.draws_by_mass(row) })
}

fn exchange(transport: &mut impl Transport, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), ShardError> {
    transport.all_gather(mine, all)?;
    let (expected, found) = (transport.world(), all.len());
    if found == expected { Ok(()) } else { Err(ShardError::World { expected, found }) }
}
