//! All shards in one process.

use crate::error::ShardError;
use crate::local_shard::LocalShard;
use crate::merge::{RowMerger, ShardMerge};
use crate::options::ShardOptions;
use crate::shard_layout::{ShardInfo, ShardedVocab};
use flash_sampling_core::backend::{Batch, Driver, Request, RowSummary, Scan, check_call};
use flash_sampling_core::{Description, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples};

/// All shards of a vocabulary in one process, scanned one after the other.
///
/// Exact pathwise with [`ShardMerge::Winners`], in distribution with [`ShardMerge::LogMass`]. A shard without a finite
/// logit has no mass; the row is an error ([`NoFiniteLogit`](flash_sampling_core::RowError::NoFiniteLogit)) only if no
/// shard has one. A NaN or +inf on any shard is the error of the row, as for a sampler without shards.
///
/// ```
/// use flash_sampling_core::reference::{Reference, ReferenceVariant};
/// use flash_sampling_core::{Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
/// use flash_sampling_distributed::{ShardMerge, Sharded};
///
/// let weight: Vec<f32> = (0..600).map(|i| (i % 7) as f32).collect();
/// let head = Head::new(Matrix::new(&weight, 300, 2)?)?;
/// let tiled = |h| Reference::new(h, Plan::default(), ReferenceVariant::Tiled);
/// let shard = |h| Box::new(tiled(h)) as Box<dyn PerturbedArgmax + '_>;
/// let mut sharded = Sharded::new(head.split(&[0, 100, 250]).into_iter().map(shard).collect(), ShardMerge::Winners)?;
/// let mut out = Samples::new();
/// sharded.sample(Matrix::new(&[1.0f32, 0.5], 1, 2)?, &[RowParams { seed: 7, ..Default::default() }], &mut out)?;
/// println!("token {}", out.row(0)?.token());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sharded<'s> {
    group: LocalGroup<'s>,
    vocab: ShardedVocab,
    driver: Driver,
}

/// The shards as one scan.
#[derive(Debug)]
struct LocalGroup<'s> {
    shards: Vec<LocalShard<'s>>,
    merge: ShardMerge,
    merger: RowMerger,
}

impl<'s> Sharded<'s> {
    /// A sampler over shards in the order of their tokens. The shards must cover the vocabulary; they may have unequal
    /// sizes or be empty. The sampler has the plan of the shards.
    ///
    /// # Errors
    /// * [`ShardError::NoShards`], [`ShardError::Gap`], [`ShardError::Overlap`], [`ShardError::Beyond`]: the shards do
    ///   not form a vocabulary.
    /// * [`ShardError::Mismatch`], [`ShardError::Input`]: the shards differ, or take logits.
    /// * [`ShardError::NotPathwise`], [`ShardError::NoLogMass`], [`ShardError::Nested`]: the shards do not support
    ///   the merge.
    pub fn new(mut shards: Vec<Box<dyn PerturbedArgmax + 's>>, merge: ShardMerge) -> Result<Self, ShardError> {
        let (options, world) = (ShardOptions::new(merge), shards.len());
        let describe = |(rank, shard): (usize, &mut Box<dyn PerturbedArgmax + 's>)| {
            ShardInfo::of(&mut **shard, &options, rank, world)
        };
        let descriptions: Vec<_> = shards.iter_mut().enumerate().map(describe).collect();
        let mut backends = shards.iter().map(|s| s.capabilities().backend);
        let first = backends.next().ok_or(ShardError::NoShards)?;
        let backend = if backends.all(|b| b == first) { first } else { "mixed" };
        let mut vocab = ShardedVocab::of(&descriptions, backend)?;
        vocab.of.capabilities.shadow = shards.iter().any(|shard| shard.capabilities().shadow);
        let shards = shards.into_iter().map(LocalShard::new).collect();
        let group = LocalGroup { shards, merge, merger: RowMerger::default() };
        Ok(Sharded { group, vocab, driver: Driver::default() })
    }

    /// Restricts the plan, so that a row beyond it is refused. [`ShardMerge::LogMass`] needs shards with `max_logprobs`
    /// even if no row requests log-probabilities.
    ///
    /// # Errors
    /// [`ShardError::BeyondShards`] if `plan` exceeds the plan of the shards.
    pub fn with_plan(mut self, plan: Plan) -> Result<Self, ShardError> {
        self.vocab.restrict(plan).map(|()| self)
    }
}

impl Scan for LocalGroup<'_> {
    fn scan(
        &mut self,
        batch: &Batch<'_, '_>,
        requests: &[Request<'_>],
        out: &mut [RowSummary],
    ) -> Result<(), SampleError> {
        let LocalGroup { shards, merge, merger } = self;
        shards.iter_mut().try_for_each(|shard| shard.scan(batch, requests, *merge))?;
        for (r, (row, request)) in batch.rows.iter().zip(requests).enumerate() {
            let (Ok(row), false) = (row, *request == Request::Skip) else { continue };
            merger.begin(row, &mut out[r]);
            for (number, shard) in shards.iter_mut().enumerate() {
                let added = merger.add(*merge, row, request, (number, shard.summary(r)), &mut out[r]);
                added.map_err(|reason| ShardError::Answer { shard: number, row: r, reason })?;
                shard.trim(r, batch.rows.len());
            }
        }
        Ok(())
    }
}

impl PerturbedArgmax for Sharded<'_> {
    fn description(&self) -> Description {
        self.vocab.of.clone()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let Sharded { group, vocab, driver } = self;
        check_call(&input, rows, &vocab.of.shape, &vocab.of.plan)?;
        driver.sample(group, &vocab.of, input, rows, out)
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        let (shards, planned) = (&mut self.group.shards, self.vocab.shards_plan.max_rows);
        if let Some(failed) = shards.iter_mut().find_map(|shard| shard.replan(max_rows).err()) {
            // All shards have one plan.
            shards.iter_mut().try_for_each(|shard| shard.replan(planned))?;
            return Err(failed);
        }
        self.vocab.replan(max_rows);
        Ok(())
    }
}
