//! Memory beyond the inputs is bounded: no `[rows, vocab]` array anywhere in the fused variants. Measured with two
//! threads; each further one adds its tile of logits and its summaries, 1.4 MiB at 256 rows.

mod backends;
mod counting;

use backends::{Cpu, Kind};
use counting::{Counting, counted};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::suite::runs;
use flash_sampling_core::{DType, Head, Matrix, Plan, RowParams, Samples};
use flash_sampling_cpu::Isa;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROWS: usize = 256;
const VOCAB: usize = 151_936;
/// At 256 rows and 152k tokens, sampler and results together. The logits alone would be 148 MiB.
const LIMIT: usize = 16 << 20;

/// The peak of building a sampler and making one call, over a head of zeros (whose pages cost nothing to hold).
fn peak(factory: &Cpu, weight: &[u8], hidden: usize, logprobs: Option<u32>) -> usize {
    let weight = Matrix::from_bytes(weight, DType::BF16, VOCAB, hidden, hidden).expect("the bytes are VOCAB rows");
    let head = Head::new(weight).expect("a valid head");
    let input = vec![0u8; 2 * ROWS * hidden];
    let input = Matrix::from_bytes(&input, DType::BF16, ROWS, hidden, hidden).expect("the bytes are ROWS rows");
    let rows: Vec<RowParams<'_>> =
        (0..ROWS as u64).map(|seed| RowParams { seed, logprobs, ..RowParams::default() }).collect();
    let plan = Plan { max_rows: ROWS, max_logprobs: logprobs, ..Plan::default() };
    let (drawn, counted) = counted(|| {
        let mut out = Samples::new();
        let mut sampler = factory.build(head, plan).expect("the head and plan are valid");
        sampler.sample(input, &rows, &mut out).expect("the call is within the plan");
        out.iter().filter(Result::is_ok).count()
    });
    assert_eq!(drawn, ROWS);
    println!("{}, hidden {hidden}, logprobs {logprobs:?}: {:.2} MiB", factory.name(), counted.peak as f64 / 1048576.0);
    counted.peak
}

#[test]
fn memory_beyond_the_inputs_is_at_most_16_mib() {
    let weight = vec![0u8; 2 * VOCAB * 4096];
    let mut worst = 0;
    for kind in [Kind::Tiled, Kind::Grouped, Kind::GroupedReuse, Kind::Online] {
        for isa in Isa::ALL {
            let factory = Cpu::new(kind, isa).with_threads(2);
            if runs(&factory.name(), factory.unavailable(), 1) {
                for logprobs in [None, Some(20)] {
                    worst = worst.max(peak(&factory, &weight[..2 * VOCAB * 64], 64, logprobs));
                }
            }
        }
        let best = Cpu::new(kind, Isa::best_for(DType::BF16, DType::BF16)).with_threads(2);
        worst = worst.max(peak(&best, &weight[..2 * VOCAB * 1024], 1024, Some(20)));
    }
    let best = Cpu::new(Kind::Tiled, Isa::best_for(DType::BF16, DType::BF16)).with_threads(2);
    worst = worst.max(peak(&best, &weight, 4096, None));
    assert!(worst <= LIMIT, "{worst} bytes");
}
