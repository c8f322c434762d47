//! A call of the CUDA samplers within the plan allocates nothing, on the host and on the GPU, once it has been made
//! before; and what a streamed plan takes does not hold a hidden state for each draw.
//!
//! What the driver's library allocates for itself is not seen by Rust's allocator.

mod backends;
mod counting;

use backends::gpu::Gpu;
use counting::{Counting, counted};
use flash_sampling_conformance::SamplerFactory;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::{DType, GroupDraw, Matrix, PerturbedArgmax, Plan, RowParams, Samples, StreamHead};
use flash_sampling_cuda::{CudaGrouped, CudaOnline, CudaStandalone, CudaStreamed, CudaTiled, Device};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROWS: usize = 48;
/// Calls that are counted.
const CALLS: usize = 20;
const GROUP: u32 = 512;

/// Rows that use what a row can ask for.
fn rows(lists: bool, logprobs: Option<u32>, seed: u64) -> Vec<RowParams<'static>> {
    const MASK: [u32; 60] = [0xfeed_beef; 60];
    let row = |r: u64| {
        let row = RowParams { seed, position: r, ..RowParams::default() };
        match r % 5 {
            0 => RowParams { logprobs, ..row },
            1 => RowParams { temperature: 0.0, ..row },
            2 => RowParams { draws: 8, without_replacement: lists, temperature: 0.8, ..row },
            3 => RowParams { mask: Some(&MASK), draws: 3, ..row },
            _ => RowParams { logit_bias: &[(3, 1.0), (17, -2.0)], ..row },
        }
    };
    (0..ROWS as u64).map(row).collect()
}

/// Free bytes of the GPU.
fn free() -> usize {
    let context = Device::new(0).unwrap().context().clone();
    context.synchronize().unwrap();
    context.mem_get_info().unwrap().0
}

/// Calls of the allocator during [`CALLS`] calls, after two.
fn allocations(name: &str, calls: &[Vec<RowParams<'_>>; 2], mut call: impl FnMut(&[RowParams<'_>])) -> usize {
    calls.iter().for_each(|rows| call(rows));
    let before = free();
    let ((), counted) = counted(|| (0..CALLS).for_each(|i| call(&calls[i % 2])));
    let taken = before.saturating_sub(free());
    println!("{name}: {} allocations; {taken} bytes of the GPU", counted.calls);
    assert_eq!(taken, 0, "{name}");
    counted.calls
}

/// The same of a sampler.
fn of_sampler(name: &str, mut sampler: impl PerturbedArgmax, input: Matrix<'_>) -> usize {
    let lists = sampler.capabilities().without_replacement;
    let mut out = Samples::new();
    allocations(name, &[0, 1].map(|seed| rows(lists, Some(5), seed)), |rows| {
        sampler.sample(input, rows, &mut out).expect("the call is within the plan");
        assert!(out.iter().all(|row| row.is_ok()));
    })
}

#[test]
fn a_planned_call_allocates_nothing_after_the_first() {
    if !runs(&Gpu::Tiled.name(), Gpu::Tiled.unavailable(), 1) {
        return;
    }
    let device = Device::new(0).unwrap();
    let problem = Problem::gaussian(Size::new(ROWS, 1603, 64), DType::BF16, DType::BF16, 3);
    let plan = Plan { max_rows: ROWS, max_draws: 8, max_logprobs: Some(5), canonical: false };
    let (head, input) = (problem.head(), problem.input());
    let mut worst = 0;
    for canonical in [false, true] {
        let tiled = CudaTiled::new(head, Plan { canonical, ..plan }, &device).unwrap();
        worst = worst.max(of_sampler(&format!("tiled, canonical {canonical}"), tiled, input));
    }
    for draw in [GroupDraw::Fresh, GroupDraw::Reuse] {
        let grouped = CudaGrouped::new(head, plan, GROUP, draw, &device).unwrap();
        worst = worst.max(of_sampler(&format!("grouped, {draw:?}"), grouped, input));
    }
    worst = worst.max(of_sampler("online", CudaOnline::new(head, plan, GROUP, &device).unwrap(), input));
    let logits = Tensor::from_fn(DType::F32, ROWS, 1603, |r, t| ((r * 31 + t * 17) % 101) as f32 * 0.1);
    // Rows apart, so that they are gathered.
    let apart = Matrix::from_bytes(logits.matrix().bytes(), DType::F32, ROWS, 1600, 1603).unwrap();
    worst = worst.max(of_sampler("standalone", CudaStandalone::new(1600, plan, &device).unwrap(), apart));

    let weight = problem.weight.matrix();
    let described = StreamHead::new(weight.rows(), weight.cols(), weight.dtype());
    let mut streamed = CudaStreamed::online(described, plan, GROUP, 1 << 16, &device).unwrap();
    let mut out = Samples::new();
    worst = worst.max(allocations("streamed", &[0, 1].map(|seed| rows(false, Some(5), seed)), |rows| {
        streamed.sample(&mut weight.bytes(), input, rows, &mut out).expect("the call is within the plan");
        assert!(out.iter().all(|row| row.is_ok()));
    }));
    assert_eq!(worst, 0);
    streamed_plans_grow_little_with_draws(&device);
}

/// 20,000 hidden states of 8192 would be 328 MB in bf16; the draws themselves take 120 bytes each.
fn streamed_plans_grow_little_with_draws(device: &std::sync::Arc<Device>) {
    let problem = Problem::gaussian(Size::new(4, 600, 8192), DType::BF16, DType::BF16, 3);
    let described = StreamHead::new(600, 8192, DType::BF16);
    let mut taken = [0; 2];
    for (taken, draws) in taken.iter_mut().zip([1, 5000]) {
        let rows: Vec<_> = (0..4).map(|r| RowParams { position: r, draws, ..RowParams::default() }).collect();
        let plan = Plan { max_rows: 4, max_draws: draws, ..Plan::default() };
        let (before, mut out) = (free(), Samples::new());
        let mut stream = CudaStreamed::online(described, plan, GROUP, 1 << 22, device).unwrap();
        stream.sample(&mut problem.weight.matrix().bytes(), problem.input(), &rows, &mut out).unwrap();
        assert!(out.iter().all(|row| row.unwrap().draws.len() == draws as usize));
        *taken = before.saturating_sub(free());
    }
    println!("a streamed plan of 1 and of 5000 draws a row takes {taken:?} bytes of the GPU");
    assert!(taken[1] < taken[0] + (72 << 20), "{taken:?}");
}
