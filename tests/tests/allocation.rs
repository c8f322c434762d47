//! A call within the plan allocates nothing, once it has been made before.
//!
//! On the caller's thread that is exact. A pool's queue of jobs, rayon's, takes a new block every few dozen jobs and
//! collects old ones; that is allowed for, at less than one allocation a pass: rows with filters may take three more.

mod backends;
mod counting;

use backends::{Cpu, Kind, Shards};
use counting::{Counting, counted};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::{SamplerFactory, Trial};
use flash_sampling_core::{Capabilities, DType, History, LogprobsMode, Plan, RowParams, Samples};
use flash_sampling_cpu::Isa;
use flash_sampling_distributed::ShardMerge;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROWS: usize = 48;
/// Calls that are counted.
const CALLS: usize = 100;

/// Rows that use what a row can ask for, in turns; plain ones instead of those that the sampler refuses.
fn rows<'a>(can: &Capabilities, history: &'a History, seed: u64) -> Vec<RowParams<'a>> {
    (0..ROWS as u64)
        .map(|r| {
            let row = RowParams { seed, position: r, ..RowParams::default() };
            let list = Some(5);
            let asked = match r % 12 {
                0 => RowParams { logprobs: Some(5), ..row },
                1 => RowParams { temperature: 0.0, ..row },
                2 => RowParams { draws: 8, without_replacement: can.without_replacement, temperature: 0.8, ..row },
                3 => RowParams { logit_bias: &[(3, 1.0)], ..row },
                4 => RowParams { min_p: 0.05, ..row },
                5 => RowParams { top_k: 20, ..row },
                6 => RowParams { top_p: 0.95, draws: 3, ..row },
                7 => RowParams { top_p: 0.8, kept: true, ..row },
                8 => RowParams { typical_p: 0.5, logprobs: list, ..row },
                9 => RowParams { repetition_penalty: 1.2, dry_multiplier: 0.5, history: Some(history), ..row },
                10 => RowParams { logprobs: list, logprobs_mode: LogprobsMode::Raw, ..row },
                _ => RowParams { top_n_sigma: 2.0, xtc_probability: 0.5, xtc_threshold: 0.01, ..row },
            };
            if asked.enabled().without(can.knobs).is_empty() { asked } else { row }
        })
        .collect()
}

/// Calls of the allocator during [`CALLS`] calls of the sampler, after two.
fn allocations(factory: &dyn SamplerFactory, canonical: bool) -> usize {
    let problem = Problem::gaussian(Size::new(ROWS, 1603, 64), DType::BF16, DType::BF16, 3);
    let plan = Plan { max_rows: ROWS, max_draws: 8, max_logprobs: Some(5), canonical };
    let capabilities = Trial::new(factory).capabilities().expect("a small head can be built");
    if canonical && !capabilities.canonical {
        return 0;
    }
    let mut sampler = factory.build(problem.head(), plan).expect("the head and plan are valid");
    let can = sampler.capabilities();
    let history = History::new(&(0..300).map(|i| i * i % 701).collect::<Vec<u32>>());
    let calls: Vec<Vec<RowParams<'_>>> = (0..CALLS as u64 + 2).map(|i| rows(&can, &history, i % 2)).collect();
    let mut out = Samples::new();
    for call in &calls[..2] {
        sampler.sample(problem.input(), call, &mut out).expect("the call is within the plan");
    }
    let ((), counted) = counted(|| {
        for call in &calls[2..] {
            sampler.sample(problem.input(), call, &mut out).expect("the call is within the plan");
        }
    });
    println!("{}, canonical {canonical}: {} allocations", factory.name(), counted.calls);
    counted.calls
}

#[test]
fn a_planned_call_allocates_nothing_after_the_first() {
    let (mut worst, mut pooled) = (0, 0);
    let mut present = Vec::new();
    for kind in [Kind::Tiled, Kind::Grouped, Kind::GroupedReuse, Kind::Online] {
        for isa in Isa::ALL {
            let factory = Cpu::new(kind, isa);
            if runs(&factory.name(), factory.unavailable(), 1) {
                present.push(factory);
            }
        }
    }
    for factory in &present {
        let alone = factory.with_threads(1);
        worst = worst.max(allocations(&alone, false)).max(allocations(&alone, true));
    }
    let tiled = Cpu::new(Kind::Tiled, Isa::Portable).with_threads(1);
    for merge in [ShardMerge::Winners, ShardMerge::LogMass] {
        let shards = Shards { name: "allocation", merge, shards: &[&tiled], equal: None };
        worst = worst.max(allocations(&shards, false));
    }
    // Last: the threads of a pool outlive it for a moment, and what they allocate when they end is counted too.
    for factory in &present {
        pooled = pooled.max(allocations(&factory.with_threads(2), false));
    }
    assert_eq!(worst, 0);
    assert!(pooled < 4 * CALLS, "{pooled} allocations in {CALLS} calls");
}
