//! All shards in one process.

use crate::error::ShardError;
use crate::local_shard::LocalShard;
use crate::merge::{RowMerger, ShardMerge};
use crate::options::ShardOptions;
use crate::shard_layout::{ShardInfo, ShardedVocab};
use flash_sampling_core::backend::{Batch, Driver, Request, RowSummary, Scan};
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{Capabilities, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape};

/// All shards of a vocabulary in one process, asked one after the other.
///
/// Exact pathwise with [`ShardMerge::Winners`], in distribution with [`ShardMerge::LogMass`]. A shard that answers
/// [`NoFiniteLogit`](flash_sampling_core::RowError::NoFiniteLogit) has no mass, which is an error of the row only if
/// every shard says so. A NaN or +inf on any shard is the row's error: that of a sampler without shards.
///
/// ```
/// use flash_sampling_core::reference::{Reference, ReferenceVariant};
/// use flash_sampling_core::{Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
/// use flash_sampling_distributed::{ShardMerge, Sharded};
///
/// let weight: Vec<f32> = (0..600).map(|i| (i % 7) as f32).collect();
/// let head = Head::new(Matrix::new(&weight, 300, 2)?)?;
/// let shard = |h| Box::new(Reference::new(h, Plan::default(), ReferenceVariant::Tiled)) as Box<dyn PerturbedArgmax + '_>;
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

/// All shards as one scan.
#[derive(Debug)]
struct LocalGroup<'s> {
    shards: Vec<LocalShard<'s>>,
    merge: ShardMerge,
    merger: RowMerger,
}

impl<'s> Sharded<'s> {
    /// A sampler over shards in the order of their tokens, which must cover the vocabulary; shards may be of unequal
    /// size or empty. It is planned for what the shards were planned for.
    ///
    /// # Errors
    /// * [`ShardError::NoShards`], [`ShardError::Gap`], [`ShardError::Overlap`], [`ShardError::Beyond`]: they are not a
    ///   vocabulary.
    /// * [`ShardError::VocabSize`], [`ShardError::Hidden`], [`ShardError::Plan`], [`ShardError::Input`]: they differ.
    /// * [`ShardError::NotPathwise`], [`ShardError::NoLogMass`], [`ShardError::Nested`]: the merge cannot be done with
    ///   them.
    pub fn new(mut shards: Vec<Box<dyn PerturbedArgmax + 's>>, merge: ShardMerge) -> Result<Self, ShardError> {
        let (options, world) = (ShardOptions::new(merge), shards.len());
        let describe = |(rank, shard): (usize, &mut Box<dyn PerturbedArgmax + 's>)| {
            ShardInfo::of(&mut **shard, &options, (rank, world))
        };
        let descriptions: Vec<_> = shards.iter_mut().enumerate().map(describe).collect();
        let mut backends = shards.iter().map(|s| s.capabilities().backend);
        let first = backends.next().ok_or(ShardError::NoShards)?;
        let backend = if backends.all(|b| b == first) { first } else { "mixed" };
        let vocab = ShardedVocab::of(&descriptions, backend)?;
        let shards = shards.into_iter().map(LocalShard::new).collect();
        let group = LocalGroup { shards, merge, merger: RowMerger::default() };
        Ok(Sharded { group, vocab, driver: Driver::default() })
    }

    /// Restricts the plan, so that a row that asks for more is refused: [`ShardMerge::LogMass`] needs shards planned
    /// with `max_logprobs` even where no row will ask for log-probabilities.
    ///
    /// # Errors
    /// [`ShardError::BeyondShards`] when `plan` asks for more than the shards were planned for.
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
    fn capabilities(&self) -> Capabilities {
        self.vocab.capabilities
    }

    fn shape(&self) -> Shape {
        self.vocab.shape.clone()
    }

    fn plan(&self) -> Plan {
        self.vocab.plan
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let Sharded { group, vocab, driver } = self;
        check_call(&input, rows, &vocab.shape, &vocab.plan)?;
        driver.sample(group, vocab.driver_args(), input, rows, out)
    }
}
