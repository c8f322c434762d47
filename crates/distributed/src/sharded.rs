//! All shards in one process.

use crate::error::ShardError;
use crate::filtered::{OpenRows, Overviews};
use crate::lists::Listed;
use crate::merge::{Merger, ShardMerge};
use crate::options::ShardOptions;
use crate::rows::{Batch, CheckedRows, surveyed};
use crate::shard::Shard;
use crate::tiling::{Description, Whole};
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Capabilities, MassHistogram, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape,
};

/// All shards of a vocabulary in one process, asked one after the other.
///
/// Exact pathwise with [`ShardMerge::Winners`], in distribution with [`ShardMerge::LogMass`]. A shard that answers
/// [`NoFiniteLogit`](flash_sampling_core::RowError::NoFiniteLogit) has no mass, which is an error of the row only if
/// every shard says so. A NaN or +inf on any shard is the row's error: that of a sampler without shards.
///
/// ```
/// use flash_sampling_core::reference::{Reference, Scheme};
/// use flash_sampling_core::{Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
/// use flash_sampling_distributed::{ShardMerge, Sharded};
///
/// let weight: Vec<f32> = (0..600).map(|i| (i % 7) as f32).collect();
/// let head = Head::new(Matrix::new(&weight, 300, 2)?)?;
/// let shard = |h| Box::new(Reference::new(h, Plan::default(), Scheme::Tiled)) as Box<dyn PerturbedArgmax + '_>;
/// let mut sharded = Sharded::new(head.split(&[0, 100, 250]).into_iter().map(shard).collect(), ShardMerge::Winners)?;
/// let mut out = Samples::new();
/// sharded.sample(Matrix::new(&[1.0f32, 0.5], 1, 2)?, &[RowParams { seed: 7, ..Default::default() }], &mut out)?;
/// println!("token {}", out.row(0)?.token());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sharded<'s> {
    shards: Vec<Shard<'s>>,
    whole: Whole,
    merger: Merger,
    open: OpenRows,
    checked: CheckedRows,
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
            Description::of(&mut **shard, &options, (rank, world))
        };
        let descriptions: Vec<_> = shards.iter_mut().enumerate().map(describe).collect();
        let mut backends = shards.iter().map(|s| s.capabilities().backend);
        let first = backends.next().ok_or(ShardError::NoShards)?;
        let backend = if backends.all(|b| b == first) { first } else { "mixed" };
        let whole = Whole::of(&descriptions, backend)?;
        Ok(Sharded {
            shards: shards.into_iter().map(Shard::new).collect(),
            whole,
            merger: Merger::default(),
            open: OpenRows::default(),
            checked: CheckedRows::default(),
        })
    }

    /// Restricts the plan, so that a row that asks for more is refused: [`ShardMerge::LogMass`] needs shards planned
    /// with `max_logprobs` even where no row will ask for log-probabilities.
    ///
    /// # Errors
    /// [`ShardError::BeyondShards`] when `plan` asks for more than the shards were planned for.
    pub fn with_plan(mut self, plan: Plan) -> Result<Self, ShardError> {
        self.whole.restrict(plan).map(|()| self)
    }

    /// Asks all shards and merges what they say.
    fn draw(&mut self, batch: &Batch<'_, '_>, out: &mut Samples) -> Result<(), SampleError> {
        let Sharded { shards, whole, merger, open, .. } = self;
        let Batch { input, params, rows } = *batch;
        open.begin(rows);
        for shard in &mut *shards {
            shard.summarize(batch, whole)?;
            let overviews = rows.iter().enumerate().filter(|(_, row)| surveyed(row).is_some());
            overviews.for_each(|(r, _)| open.add(r, shard.summary(r), shard.stage(r)));
        }
        let (count, vocab_size) = (shards.len(), whole.shape.vocab_size);
        open.decide(vocab_size, rows, count, &Told(shards))?;
        while open.next_pass(vocab_size) {
            open.inquire(rows.len(), |requests| {
                shards.iter_mut().try_for_each(|shard| shard.scan(input, params, requests))
            })?;
            open.settle(vocab_size, rows, count, |shard, row| shards[shard].summary(row));
            shards.iter_mut().for_each(|shard| shard.trim(rows.len()));
        }
        let told = |shard: usize, row| (shards[shard].summary(row).sample(), shards[shard].stage(row));
        merger.rows(whole, rows, count, told, open, out)?;
        if open.next_raw(rows, out) {
            open.inquire(rows.len(), |requests| {
                shards.iter_mut().try_for_each(|shard| shard.scan(input, params, requests))
            })?;
            open.note_raw(count, |shard, row| shards[shard].summary(row), out)?;
        }
        Ok(())
    }
}

impl PerturbedArgmax for Sharded<'_> {
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
        check_call(&input, rows, &self.whole.shape, &self.whole.plan)?;
        let checked = self.checked.check(&self.whole, rows);
        let drawn = self.draw(&Batch { input, params: rows, rows: &checked }, out);
        self.checked.keep(checked);
        drawn
    }
}

/// The overviews of all shards.
struct Told<'c, 's>(&'c [Shard<'s>]);

impl Overviews for Told<'_, '_> {
    fn listed(&self, shard: usize, row: usize, at: usize) -> Listed {
        match self.0[shard].summary(row).list.get(at) {
            Some(c) => Listed::Token { token: c.winner.token, logit: c.logit },
            None => Listed::End,
        }
    }

    fn add_masses(&self, shard: usize, row: usize, mass: &mut MassHistogram) -> Result<(), ShardError> {
        mass.merge(&self.0[shard].summary(row).mass);
        Ok(())
    }

    fn damaged(&self, shard: usize, row: usize) -> ShardError {
        ShardError::Answer { shard, row, reason: "a list out of order".into() }
    }
}
