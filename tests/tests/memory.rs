//! Bounds of the memory beyond the inputs.
//!
//! The fused variants have no array of size `[rows, vocab]`, also if filters keep nearly all tokens of every row. The
//! test uses two threads. Each further thread adds a tile of logits and summaries, 1.4 MiB at 256 rows. All threads
//! share up to 20 MiB of cached logits above cutoffs.

mod backends;
mod counting;

use backends::{Cpu, Kind, Shards};
use counting::{Counting, counted};
use flash_sampling_conformance::suite::{effort, runs};
use flash_sampling_conformance::{Effort, SamplerFactory};
use flash_sampling_core::{DType, Head, Matrix, Plan, RowParams, Samples};
use flash_sampling_cpu::Isa;
use flash_sampling_distributed::ShardMerge;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROWS: usize = 256;
const VOCAB: usize = 151_936;
/// The limit in bytes of a sampler and its results at 256 rows and 152k tokens. The logits alone would be 148 MiB.
const LIMIT: usize = 16 << 20;

/// The limit in bytes with kept tokens, which are lists of all tokens (1.7 MiB per row). It covers the lists of a few
/// rows at a time, and the bitmaps (5 MiB) twice.
const LISTED: usize = 96 << 20;

/// Returns the peak in bytes of building a sampler and making one call. The head is zeros, so its pages use no memory
/// and all logits are equal.
fn peak(factory: &dyn SamplerFactory, weight: Matrix<'_>, rows: usize, params: RowParams<'_>) -> usize {
    let (logprobs, asks) = (params.logprobs, (params.logprobs, params.top_p, params.kept));
    let (dtype, hidden) = (weight.dtype(), weight.cols());
    let head = Head::new(weight).expect("a valid head");
    let input = vec![0u8; 2 * rows * hidden];
    let input = Matrix::from_bytes(&input, DType::BF16, rows, hidden, hidden).expect("the bytes are `rows` rows");
    let params: Vec<RowParams<'_>> = (0..rows as u64).map(|seed| RowParams { seed, ..params }).collect();
    let plan = Plan { max_rows: rows, max_logprobs: logprobs, ..Plan::default() };
    let (drawn, counted) = counted(|| {
        let mut out = Samples::new();
        let mut sampler = factory.build(head, plan).expect("the head and plan are valid");
        sampler.sample(input, &params, &mut out).expect("the call is within the plan");
        out.iter().filter(Result::is_ok).count()
    });
    assert_eq!(drawn, rows);
    println!(
        "{}, {}, {rows} rows, hidden {hidden}, {asks:?}: {:.2} MiB",
        factory.name(),
        dtype.name(),
        counted.peak as f64 / 1048576.0
    );
    counted.peak
}

#[test]
fn memory_beyond_the_inputs_is_at_most_16_mib() {
    let bytes = vec![0u8; 2 * VOCAB * 4096];
    let weight = |dtype: DType, hidden: usize| {
        let bytes = &bytes[..dtype.bytes(VOCAB * hidden).expect("a number of bytes")];
        Matrix::from_bytes(bytes, dtype, VOCAB, hidden, hidden).expect("the bytes are VOCAB rows")
    };
    let [narrow, wide] = [64, 1024].map(|hidden| weight(DType::BF16, hidden));
    let mut worst = 0;
    let plain = RowParams::default();
    for kind in [Kind::Tiled, Kind::Grouped, Kind::Online] {
        for isa in Isa::ALL {
            let factory = Cpu::new(kind, isa).with_threads(2);
            if runs(&factory.name(), factory.unavailable(), 1) {
                // In a sample, one instruction set has log-probabilities.
                let has_logprobs = effort() != Effort::Sample || isa == Isa::best_for(DType::BF16, DType::BF16);
                for logprobs in [None].into_iter().chain(has_logprobs.then_some(Some(20))) {
                    let params = RowParams { logprobs, ..plain };
                    worst = worst.max(peak(&factory, narrow, ROWS, params));
                }
            }
        }
        let best = Cpu::new(kind, Isa::best_for(DType::BF16, DType::BF16)).with_threads(2);
        let params = RowParams { logprobs: Some(20), ..plain };
        worst = worst.max(peak(&best, wide, ROWS, params));
    }
    let best = Cpu::new(Kind::Tiled, Isa::best_for(DType::BF16, DType::BF16)).with_threads(2);
    worst = worst.max(peak(&best, weight(DType::BF16, 4096), ROWS, plain));
    for dtype in [DType::Q8_0, DType::Q6_K, DType::Q4_K, DType::I8, DType::F8_E4M3] {
        for rows in [1, 16, 64, ROWS] {
            worst = worst.max(peak(&best, weight(dtype, 256), rows, plain));
        }
    }
    worst = worst.max(peak(&best, weight(DType::Q8_0, 4096), 64, plain));
    let top_p = RowParams { top_p: 0.95, ..plain };
    worst = worst.max(peak(&best, narrow, ROWS, top_p));
    // With 64 rows, the logits above cutoffs are cached.
    worst = worst.max(peak(&best, narrow, 64, top_p));
    let listed = peak(&best, narrow, ROWS, RowParams { kept: true, ..top_p });
    assert!(listed <= LISTED, "{listed} bytes where all tokens are listed");
    // Lists of one pass share 16 MiB in each shard's scan and in the merge, and are freed afterwards.
    let shards = Shards { name: "winners", merge: ShardMerge::Winners, shards: &[&best], equal: Some(2) };
    let listed = peak(&shards, narrow, ROWS, RowParams { kept: true, ..top_p });
    assert!(listed <= LISTED, "{listed} bytes where all tokens are listed, over shards");
    assert!(worst <= LIMIT, "{worst} bytes");
}
