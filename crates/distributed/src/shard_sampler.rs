//! One rank of a group of shards.

use crate::error::ShardError;
use crate::merge::{Merger, ShardMerge};
use crate::received::Received;
use crate::shard::Shard;
use crate::summary;
use crate::tiling::{Description, Whole};
use crate::transport::Transport;
use core::ops::Range;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{Capabilities, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape};

/// One rank: a local shard, one exchange of summaries per call, and the merge that every rank makes for itself.
///
/// Every rank of the group makes the same calls with the same hidden states and row parameters, and gets the same
/// samples, as [`Sharded`](crate::Sharded) would give them. Each call makes exactly one
/// [`all_gather`](Transport::all_gather), whatever goes wrong on this rank, so that a failure here is an error on the
/// other ranks and not a hang. All ranks merge the same bytes, so they agree to the last bit.
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
    message: Vec<u8>,
    messages: Vec<Vec<u8>>,
    received: Vec<Received>,
    words: Vec<u64>,
}

impl<'s, T: Transport> ShardSampler<'s, T> {
    /// This rank's sampler, from its shard of the vocabulary. A collective call: every rank of the group makes it, and
    /// they learn one another's tokens, plans and capabilities.
    ///
    /// # Errors
    /// Those of [`Sharded::new`](crate::Sharded::new), [`ShardError::Merge`] when ranks ask for different merges, and
    /// what can go wrong in an exchange. Every rank gets the same error about the shards.
    pub fn new(local: Box<dyn PerturbedArgmax + 's>, mut transport: T, merge: ShardMerge) -> Result<Self, ShardError> {
        let (mut message, mut messages) = (Vec::new(), Vec::new());
        Description::of(&*local, merge).encode(&mut message);
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
            message,
            received: messages.iter().map(|_| Received::default()).collect(),
            messages,
            transport,
            words: Vec::new(),
        })
    }

    /// Restricts the plan, so that a row that asks for more is refused. Every rank must do the same.
    ///
    /// # Errors
    /// [`ShardError::BeyondShards`] when `plan` asks for more than the shards were planned for.
    pub fn with_plan(mut self, plan: Plan) -> Result<Self, ShardError> {
        self.whole.restrict(plan).map(|()| self)
    }

    /// The local summaries of a call, as the message to the other ranks.
    fn summarize(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>]) -> Result<(), SampleError> {
        check_call(&input, rows, &self.whole.shape, &self.whole.plan)?;
        self.local.ask(input, rows, self.whole.merge)?;
        summary::begin(&mut self.message, rows.len());
        for (r, params) in rows.iter().enumerate() {
            match by_mass(&self.whole, params) {
                None => summary::encode_not_asked(&mut self.message, params),
                Some(by_mass) => {
                    let summary = self.local.summary(r);
                    summary::encode_row(&mut self.message, &mut self.words, params, by_mass, &summary);
                }
            }
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
        let local = self.summarize(input, rows);
        if let Err(error) = &local {
            summary::encode_failure(&mut self.message, &error.to_string());
        }
        let exchanged = exchange(&mut self.transport, &self.message, &mut self.messages);
        local?;
        exchanged?;
        let ShardSampler { whole, merger, tokens, messages, received, .. } = self;
        for (shard, ((received, bytes), tokens)) in received.iter_mut().zip(&*messages).zip(&*tokens).enumerate() {
            received.decode(bytes, shard, tokens, rows, |params| by_mass(whole, params))?;
        }
        Ok(merger.rows(whole, rows, tokens.len(), |shard, row| received[shard].row(row), out)?)
    }
}

/// Whether a row's shard is drawn by log-mass; nothing when the row's parameters are invalid.
fn by_mass(whole: &Whole, params: &RowParams<'_>) -> Option<bool> {
    let row = params.check(&whole.capabilities, &whole.plan, whole.shape.vocab_size).ok()?;
    Some(whole.merge.draws_by_mass(&row))
}

fn exchange(transport: &mut impl Transport, mine: &[u8], all: &mut Vec<Vec<u8>>) -> Result<(), ShardError> {
    transport.all_gather(mine, all)?;
    let (expected, found) = (transport.world(), all.len());
    if found == expected { Ok(()) } else { Err(ShardError::World { expected, found }) }
}
