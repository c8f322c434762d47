//! A factory of ranks over a transport: all ranks as one sampler, with a thread per rank and call.

use super::{assert_same, boxed, shard_plan, shard_starts};
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{Description, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples};
use flash_sampling_distributed::{Loopback, ShardError, ShardMerge, ShardSampler, Transport};
use std::thread;

/// A transport of any kind.
pub(crate) type BoxedTransport = Box<dyn Transport>;

/// A function that makes the transports of a group of the given number of ranks.
pub(crate) type Transports = dyn Fn(usize) -> Result<Vec<BoxedTransport>, BuildError> + Sync;

/// Makes the transports of a group of threads.
pub(crate) fn loopback(world: usize) -> Result<Vec<BoxedTransport>, BuildError> {
    Ok(Loopback::group(world).into_iter().map(|rank| Box::new(rank) as BoxedTransport).collect())
}

/// A factory of ranks with one shard each, which exchange summaries over a transport.
pub(crate) struct Ranks<'f> {
    pub(crate) name: &'static str,
    pub(crate) merge: ShardMerge,
    pub(crate) local: &'f dyn SamplerFactory,
    /// The number of equal shards; `None`: four unequal shards, one of them empty.
    pub(crate) equal: Option<u32>,
    pub(crate) transports: &'f Transports,
}

impl SamplerFactory for Ranks<'_> {
    fn name(&self) -> String {
        format!("sharded/{}", self.name)
    }

    fn unavailable(&self) -> Option<String> {
        let world = self.equal.unwrap_or(2) as usize;
        self.local.unavailable().or_else(|| (self.transports)(world).err().map(|error| error.to_string()))
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        match self.merge {
            ShardMerge::Winners => Some(ReferenceVariant::Tiled),
            _ => Some(ReferenceVariant::Sharded(shard_starts(head, self.equal))),
        }
    }

    fn pace(&self) -> usize {
        self.local.pace()
    }

    // The noise of shards depends on the rank, and the shards must cover the whole vocabulary.
    fn takes_shards(&self) -> bool {
        false
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let shard_plan = shard_plan(self.merge, plan);
        let merge = self.merge;
        let heads = head.split(&shard_starts(&head, self.equal));
        let transports = (self.transports)(heads.len())?;
        let locals = heads.into_iter().map(|head| self.local.build(head, shard_plan)).collect::<Result<Vec<_>, _>>()?;
        // The handshake is a collective call.
        let ranks: Result<Vec<_>, ShardError> = thread::scope(|scope| {
            let join =
                |(local, transport)| scope.spawn(move || ShardSampler::new(local, transport, merge)?.with_plan(plan));
            let threads: Vec<_> = locals.into_iter().zip(transports).map(join).collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect()
        });
        boxed(ranks.map(|ranks| Group { ranks }))
    }
}

/// All ranks of a group as one sampler. Every rank must have the same results.
struct Group<'w> {
    ranks: Vec<ShardSampler<'w, BoxedTransport>>,
}

impl PerturbedArgmax for Group<'_> {
    fn description(&self) -> Description {
        self.ranks[0].description()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let Some((first, others)) = self.ranks.split_first_mut() else { return Ok(()) };
        thread::scope(|scope| {
            let sample = |rank: &mut ShardSampler<'_, BoxedTransport>| {
                let mut theirs = Samples::new();
                rank.sample(input, rows, &mut theirs).map(|()| theirs)
            };
            let threads: Vec<_> = others.iter_mut().map(|rank| scope.spawn(move || sample(rank))).collect();
            let mine = first.sample(input, rows, out);
            let theirs: Vec<_> =
                threads.into_iter().map(|thread| thread.join().expect("a rank does not panic")).collect();
            mine?;
            for theirs in theirs {
                assert_same(&theirs?, out, "ranks must agree");
            }
            Ok(())
        })
    }
}
