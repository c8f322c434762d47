//! A head with exact dot products, its shards, ranks in threads, and a comparison of every bit.

use core::error::Error;
use flash_sampling_core::backend::MassHistogram;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Draw, Head, Matrix, PerturbedArgmax, Plan, RowError, RowParams, SampleError, Samples};
use flash_sampling_distributed::{Loopback, ShardError, ShardMerge, ShardOptions, ShardSampler};
use std::sync::LazyLock;
use std::thread;

pub(crate) const VOCAB: usize = 1000;
pub(crate) const HIDDEN: usize = 24;
pub(crate) const PLAN: Plan = Plan { max_rows: 16, max_draws: 12, max_logprobs: Some(6), canonical: false };

pub(crate) const MERGES: [ShardMerge; 2] = [ShardMerge::Winners, ShardMerge::LogMass];

/// Shards of very different sizes, three of them empty.
pub(crate) const STARTS: [u32; 8] = [0, 0, 3, 4, 500, 500, 940, 1000];

/// Pseudo-random small integers.
pub(crate) fn integers(n: usize, salt: u64) -> Vec<f32> {
    let mut state = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 7) as f32 - 3.0
    };
    (0..n).map(|_| next()).collect()
}

/// A head over integers. Its scale keeps the logits within about twenty nats.
pub(crate) fn head(weight: &[f32]) -> Head<'_> {
    Head::new(Matrix::new(weight, weight.len() / HIDDEN, HIDDEN).unwrap()).unwrap().with_scale(0.125).unwrap()
}

/// The head of most tests.
pub(crate) fn integer_head() -> Head<'static> {
    static WEIGHT: LazyLock<Vec<f32>> = LazyLock::new(|| integers(VOCAB * HIDDEN, 1));
    head(&WEIGHT)
}

pub(crate) fn reference<'w>(head: Head<'w>, plan: Plan, scheme: ReferenceVariant) -> Box<dyn PerturbedArgmax + 'w> {
    Box::new(Reference::new(head, plan, scheme))
}

pub(crate) fn shards<'w>(head: &Head<'w>, starts: &[u32], plan: Plan) -> Vec<Box<dyn PerturbedArgmax + 'w>> {
    head.split(starts).into_iter().map(|shard| reference(shard, plan, ReferenceVariant::Tiled)).collect()
}

/// Runs each rank in a thread, and returns the ranks' results.
pub(crate) fn group<R: Send>(world: usize, rank: impl Fn(usize, Loopback) -> R + Sync) -> Vec<R> {
    let rank = &rank;
    thread::scope(|scope| {
        let ranks = Loopback::group(world).into_iter().enumerate();
        let threads: Vec<_> = ranks.map(|(r, transport)| scope.spawn(move || rank(r, transport))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// [`group`] with each rank's sampler of its shard.
pub(crate) fn samplers<R: Send>(
    head: &Head<'_>,
    starts: &[u32],
    plan: Plan,
    options: impl Into<ShardOptions>,
    rank: impl Fn(usize, &mut ShardSampler<'_, Loopback>) -> R + Sync,
) -> Vec<R> {
    let options = options.into();
    group(starts.len(), |r, transport| {
        let local = shards(head, starts, plan).swap_remove(r);
        rank(r, &mut ShardSampler::new(local, transport, options).unwrap())
    })
}

/// The error of the shards in an error of a call.
pub(crate) fn source(error: &SampleError) -> &ShardError {
    error.source().and_then(|e| e.downcast_ref()).unwrap()
}

/// One row of every kind; `mask` allows tokens 2, 3 and 999.
pub(crate) fn rows<'a>(mask: &'a [u32], none: &'a [u32]) -> Vec<RowParams<'a>> {
    let row = RowParams { seed: 11, position: 70, ..RowParams::default() };
    vec![
        row,
        RowParams { seed: 12, temperature: 0.6, draws: 9, first_draw: 5, ..row },
        RowParams { temperature: 0.0, logprobs: Some(6), ..row },
        RowParams { logprobs: Some(0), draws: 2, ..row },
        RowParams { position: 3, logprobs: Some(6), logit_bias: &[(4, 2.5), (941, f32::NEG_INFINITY)], ..row },
        RowParams { mask: Some(mask), logprobs: Some(6), ..row },
        RowParams { mask: Some(none), ..row },
        RowParams { temperature: f32::NAN, ..row },
        RowParams { draws: 13, ..row },
        RowParams { logit_bias: &[(1000, 1.0)], ..row },
        RowParams { top_p: 0.0, ..row },
    ]
}

/// Rows with lists without replacement: within a shard's support, across several shards, beyond the whole support.
pub(crate) fn lists<'a>(mask: &'a [u32]) -> Vec<RowParams<'a>> {
    let row = RowParams { seed: 21, without_replacement: true, ..RowParams::default() };
    vec![
        RowParams { draws: 12, logprobs: Some(2), ..row },
        RowParams { draws: 1, ..row },
        RowParams { draws: 3, mask: Some(mask), first_draw: 2, logprobs: Some(6), ..row },
        RowParams { draws: 2, mask: Some(mask), ..row },
        RowParams { draws: 4, mask: Some(mask), ..row },
        RowParams { draws: 5, temperature: 0.0, ..row },
    ]
}

pub(crate) fn mask_of(tokens: &[u32]) -> Vec<u32> {
    let mut mask = vec![0; VOCAB.div_ceil(32)];
    tokens.iter().for_each(|&t| mask[t as usize / 32] |= 1 << (t % 32));
    mask
}

pub(crate) fn hidden(rows: usize) -> Vec<f32> {
    integers(rows * HIDDEN, 5)
}

pub(crate) fn sample(sampler: &mut dyn PerturbedArgmax, hidden: &[f32], rows: &[RowParams<'_>]) -> Samples {
    let mut out = Samples::new();
    sampler.sample(Matrix::new(hidden, rows.len(), hidden.len() / rows.len()).unwrap(), rows, &mut out).unwrap();
    out
}

/// All results of a row.
pub(crate) type Row = Result<(Vec<Draw>, Option<u64>, Vec<(u32, f32)>, Option<MassHistogram>), RowError>;

pub(crate) fn all(samples: &Samples) -> Vec<Row> {
    let row = |at: usize| {
        let row = samples.row(at)?;
        Ok((row.draws.to_vec(), row.log_z.map(f64::to_bits), row.top.to_vec(), samples.mass(at).cloned()))
    };
    (0..samples.len()).map(row).collect()
}

pub(crate) fn tokens(samples: &Samples) -> Vec<Result<Vec<u32>, RowError>> {
    samples.iter().map(|r| r.map(|r| r.draws.iter().map(|d| d.token).collect())).collect()
}
