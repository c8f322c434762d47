//! Factories of the CPU backend and of shards over it, shared by the test files.
#![allow(dead_code)] // each test file uses its part

pub(crate) mod gpu;
pub(crate) mod gpu_columns;
pub(crate) mod gpu_logprobs;
pub(crate) mod gpu_memory;
pub(crate) mod gpu_ranks;
pub(crate) mod gpu_rows;
pub(crate) mod quantised;
pub(crate) mod rank_tests;
pub(crate) mod ranks;
pub(crate) mod referee;
pub(crate) mod shadow;
pub(crate) mod shadow_draws;

use flash_sampling_conformance::factory::FromLogits;
use flash_sampling_conformance::laws::uneven_starts;
use flash_sampling_conformance::problem::Problem;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{
    Description, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, StreamError, StreamHead,
};
use flash_sampling_cpu::{CpuOptions, Grouped, Isa, Online, OnlineStream, Standalone, Tiled};
use flash_sampling_distributed::{ShardMerge, Sharded};
use std::io::Read;

/// The tokens of a group, as in `vectors/value_stability.txt`.
pub(crate) const GROUP: u32 = 512;

/// A variant of the CPU backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Tiled,
    Standalone,
    Grouped,
    Online,
    /// The online variant over a reader.
    Stream,
}

/// The CPU backend with one variant, instruction set and number of threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cpu {
    kind: Kind,
    isa: Isa,
    threads: Option<usize>,
}

impl Cpu {
    pub(crate) const fn new(kind: Kind, isa: Isa) -> Self {
        Cpu { kind, isa, threads: None }
    }

    pub(crate) const fn with_threads(self, threads: usize) -> Self {
        Cpu { threads: Some(threads), ..self }
    }
}

/// Returns the draws of the reference.
pub(crate) fn reference(problem: &Problem, plan: Plan, variant: ReferenceVariant, rows: &[RowParams<'_>]) -> Samples {
    let mut out = Samples::new();
    Reference::new(problem.head(), plan, variant).sample(problem.input(), rows, &mut out).unwrap();
    out
}

/// Asserts that rows have the same bits.
pub(crate) fn assert_same(found: &Samples, want: &Samples, what: &str) {
    assert_eq!(found.len(), want.len(), "{what}");
    for (r, (found, want)) in RowBits::all(found).iter().zip(&RowBits::all(want)).enumerate() {
        assert_eq!(found, want, "{what}, row {r}");
    }
}

/// Asserts that two calls of a sampler give the bits of `want`, so a call leaves no state in the scratch.
pub(crate) fn assert_twice(
    factory: &dyn SamplerFactory,
    problem: &Problem,
    plan: Plan,
    rows: &[RowParams<'_>],
    want: &Samples,
    what: &str,
) {
    let mut sampler = factory.build(problem.head(), plan).unwrap();
    let mut found = Samples::new();
    for _ in 0..2 {
        sampler.sample(problem.input(), rows, &mut found).unwrap();
        assert_same(&found, want, what);
    }
}

/// Asserts that rows have the same bits in batches of many sizes, at several places. Returns these bits.
pub(crate) fn same_in_batches(
    factory: &dyn SamplerFactory,
    problem: &Problem,
    plan: Plan,
    rows: &[RowParams<'_>],
) -> Vec<RowBits> {
    let mut sampler = factory.build(problem.head(), plan).unwrap();
    let mut out = Samples::new();
    sampler.sample(problem.input(), rows, &mut out).unwrap();
    let all = RowBits::all(&out);
    for batch in [1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 200, 255] {
        for first in [0, 1, rows.len() - batch] {
            let part = first..first + batch;
            sampler.sample(problem.input().row_range(part.clone()), &rows[part.clone()], &mut out).unwrap();
            assert_eq!(RowBits::all(&out), all[part], "{}: rows {first}.. in a batch of {batch}", factory.name());
        }
    }
    all
}

pub(crate) fn boxed<'w, S: PerturbedArgmax + 'w, E: core::error::Error>(
    sampler: Result<S, E>,
) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
    match sampler {
        Ok(sampler) => Ok(Box::new(sampler)),
        Err(e) => Err(BuildError(e.to_string())),
    }
}

impl SamplerFactory for Cpu {
    fn name(&self) -> String {
        format!("cpu/{:?}/{}", self.kind, self.isa).to_lowercase()
    }

    fn unavailable(&self) -> Option<String> {
        (!self.isa.is_available()).then(|| format!("this machine has no {}", self.isa))
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(match self.kind {
            Kind::Tiled | Kind::Standalone => ReferenceVariant::Tiled,
            Kind::Grouped => ReferenceVariant::Grouped(GROUP),
            Kind::Online | Kind::Stream => ReferenceVariant::Online(GROUP),
        })
    }

    fn pace(&self) -> usize {
        8
    }

    // A streamed weight begins at the vocabulary's first token.
    fn takes_shards(&self) -> bool {
        self.kind != Kind::Stream
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let options = CpuOptions { isa: Some(self.isa), threads: self.threads };
        match self.kind {
            Kind::Tiled => boxed(Tiled::new(head, plan, &options)),
            Kind::Grouped => boxed(Grouped::new(head, plan, GROUP, &options)),
            Kind::Online => boxed(Online::new(head, plan, GROUP, &options)),
            Kind::Stream => Ok(Box::new(streamed(head, plan, &options)?)),
            Kind::Standalone => {
                let sampler = Standalone::new(head.vocab_size() as usize, plan, &options);
                boxed(sampler.map(|sampler| FromLogits::new(head, sampler)))
            }
        }
    }
}

/// Returns a head without its weight.
pub(crate) fn described<'w>(head: &Head<'w>) -> StreamHead<'w> {
    let weight = head.weight();
    StreamHead {
        vocab_size: head.tokens().len(),
        bias: head.bias(),
        soft_cap: head.soft_cap(),
        scale: head.scale(),
        ..StreamHead::new(weight.rows(), weight.cols(), weight.dtype())
    }
}

/// A streamed sampler over a weight in memory.
struct Streamed<'w> {
    head: Head<'w>,
    stream: OnlineStream<'w>,
}

fn streamed<'w>(head: Head<'w>, plan: Plan, options: &CpuOptions) -> Result<Streamed<'w>, BuildError> {
    let stream = OnlineStream::new(described(&head), plan, GROUP, options).map_err(|e| BuildError(e.to_string()))?;
    Ok(Streamed { head, stream })
}

impl PerturbedArgmax for Streamed<'_> {
    fn description(&self) -> Description {
        self.stream.description()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        let weight = self.head.weight();
        let mut reader = Trickle((0..weight.rows()).flat_map(move |row| weight.row_bytes(row)).copied());
        self.stream.sample(&mut reader, input, rows, out).map_err(|e| match e {
            StreamError::Call(e) => e,
            e => SampleError::Backend { backend: "cpu", source: Box::new(e) },
        })
    }
}

/// A reader that yields at most 1000 bytes per read, like a pipe.
pub(crate) struct Trickle<I>(pub(crate) I);

impl<I: Iterator<Item = u8>> Read for Trickle<I> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let mut read = 0;
        for (slot, byte) in buffer.iter_mut().take(1000).zip(&mut self.0) {
            *slot = byte;
            read += 1;
        }
        Ok(read)
    }
}

/// Returns the starts of `equal` equal shards of a head; with `None`, of four unequal shards, one of them empty.
pub(crate) fn shard_starts(head: &Head<'_>, equal: Option<u32>) -> Vec<u32> {
    let tokens = head.tokens();
    match equal {
        None => uneven_starts(tokens.start, tokens.end),
        Some(n) => (0..n).map(|k| tokens.start + (tokens.len() as u64 * u64::from(k) / u64::from(n)) as u32).collect(),
    }
}

/// Returns the plan of a shard. A merge by log-mass needs the shard's log Z.
pub(crate) fn shard_plan(merge: ShardMerge, plan: Plan) -> Plan {
    match merge {
        ShardMerge::LogMass => Plan { max_logprobs: Some(plan.max_logprobs.unwrap_or(0)), ..plan },
        _ => plan,
    }
}

/// A factory of sharded samplers, whose shards use the given factories in turn.
pub(crate) struct Shards<'f> {
    pub(crate) name: &'static str,
    pub(crate) merge: ShardMerge,
    pub(crate) shards: &'f [&'f dyn SamplerFactory],
    /// The number of equal shards; `None`: four unequal shards, one of them empty.
    pub(crate) equal: Option<u32>,
}

impl SamplerFactory for Shards<'_> {
    fn name(&self) -> String {
        format!("sharded/{}", self.name)
    }

    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant> {
        let pathwise = self.shards.iter().all(|f| f.reference_variant(head) == Some(ReferenceVariant::Tiled));
        match self.merge {
            ShardMerge::Winners => Some(ReferenceVariant::Tiled),
            _ => pathwise.then(|| ReferenceVariant::Sharded(shard_starts(head, self.equal))),
        }
    }

    fn pace(&self) -> usize {
        self.shards.iter().map(|f| f.pace()).min().unwrap_or(1)
    }

    // The noise of shards depends on the rank, and the shards must cover the whole vocabulary.
    fn takes_shards(&self) -> bool {
        false
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let shard_plan = shard_plan(self.merge, plan);
        let heads = head.split(&shard_starts(&head, self.equal)).into_iter();
        let shards = heads.zip(self.shards.iter().cycle()).map(|(head, f)| f.build(head, shard_plan));
        let shards = shards.collect::<Result<_, _>>()?;
        boxed(Sharded::new(shards, self.merge).and_then(|sharded| sharded.with_plan(plan)))
    }
}
