//! After the first calls, a call of the CUDA samplers within the plan allocates nothing on the host and on the GPU. A
//! streamed plan does not allocate a hidden state per draw.
//!
//! The counts exclude allocations inside the driver's library, which do not use Rust's allocator.

mod backends;
mod counting;

use backends::GROUP;
use backends::gpu::Gpu;
use backends::gpu_memory::{Copied, copied};
use counting::{Counting, counted, rows};
use flash_sampling_conformance::logits::LogitShape;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::{DType, History, Matrix, PerturbedArgmax, Plan, RowParams, Samples, StreamHead};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::{
    CudaGrouped, CudaOnline, CudaStandalone, CudaStreamed, CudaTiled, Device, DeviceDraws, DeviceHead, DeviceMatrix,
    DeviceStandalone, DeviceTiled, RowFeatures, abi,
};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const ROWS: usize = 48;
/// The number of counted calls.
const CALLS: usize = 20;

/// Returns the free bytes of the GPU.
fn free() -> usize {
    let context = Device::new(0).unwrap().context().clone();
    context.synchronize().unwrap();
    context.mem_get_info().unwrap().0
}

/// Returns the sequence of rows with penalties.
fn past() -> History {
    History::new(&(0..300).map(|i| i * i % 701).collect::<Vec<u32>>())
}

/// Counts allocations during [`CALLS`] calls, after two uncounted calls.
fn allocations(name: &str, calls: &[Vec<RowParams<'_>>; 2], mut call: impl FnMut(&[RowParams<'_>])) -> usize {
    calls.iter().for_each(|rows| call(rows));
    let before = free();
    let ((), counted) = counted(|| (0..CALLS).for_each(|i| call(&calls[i % 2])));
    let taken = before.saturating_sub(free());
    println!("{name}: {} allocations; {taken} bytes of the GPU", counted.calls);
    assert_eq!(taken, 0, "{name}");
    counted.calls
}

/// Counts allocations during calls of a sampler.
fn of_sampler(name: &str, mut sampler: impl PerturbedArgmax, input: Matrix<'_>) -> usize {
    let (can, history, mut out) = (sampler.capabilities(), past(), Samples::new());
    allocations(name, &[0, 1].map(|seed| rows(ROWS, &can, &history, seed)), |rows| {
        sampler.sample(input, rows, &mut out).expect("the call is within the plan");
        assert!(out.iter().all(|row| row.is_ok()));
    })
}

#[test]
fn a_planned_call_allocates_nothing_after_the_first() {
    let Some(device) = Gpu::TILED.device() else { return };
    listed_rows_take_no_room_for_logits();
    let problem = Problem::gaussian(Size::new(ROWS, 1603, 64), DType::BF16, DType::BF16, 3);
    let plan = Plan { max_rows: ROWS, max_draws: 8, max_logprobs: Some(5), canonical: false };
    let (head, input) = (problem.head(), problem.input());
    let mut worst = 0;
    for canonical in [false, true] {
        let tiled = CudaTiled::new(head, Plan { canonical, ..plan }, &device).unwrap();
        worst = worst.max(of_sampler(&format!("tiled, canonical {canonical}"), tiled, input));
    }
    worst = worst.max(of_sampler("grouped", CudaGrouped::new(head, plan, GROUP, &device).unwrap(), input));
    worst = worst.max(of_sampler("online", CudaOnline::new(head, plan, GROUP, &device).unwrap(), input));
    let logits = Tensor::from_fn(DType::F32, ROWS, 1603, |r, t| ((r * 31 + t * 17) % 101) as f32 * 0.1);
    // Rows with gaps, so the sampler gathers them.
    let apart = Matrix::from_bytes(logits.matrix().bytes(), DType::F32, ROWS, 1600, 1603).unwrap();
    worst = worst.max(of_sampler("standalone", CudaStandalone::new(1600, plan, &device).unwrap(), apart));

    let weight = problem.weight.matrix();
    let described = StreamHead::new(weight.rows(), weight.cols(), weight.dtype());
    let mut streamed = CudaStreamed::online(described, plan, GROUP, 1 << 16, &device).unwrap();
    let (can, history, mut out) = (streamed.description().capabilities, past(), Samples::new());
    worst = worst.max(allocations("streamed", &[0, 1].map(|seed| rows(ROWS, &can, &history, seed)), |rows| {
        streamed.sample(&mut weight.bytes(), input, rows, &mut out).expect("the call is within the plan");
        assert!(out.iter().all(|row| row.is_ok()));
    }));

    let mut shared = Copied::new(head, plan).unwrap();
    let (_memory, hidden) = copied(input, &shared.stream);
    shared.stream.synchronize().unwrap();
    let (can, history) = (shared.capabilities(), past());
    worst = worst.max(allocations("shared", &[0, 1].map(|seed| rows(ROWS, &can, &history, seed)), |rows| {
        // SAFETY: the hidden states are on this device until the call returns, and the call waits for its launches.
        unsafe { shared.sampler.sample(&shared.stream, &hidden, rows, &mut out) }.expect("the call is within the plan");
        assert!(out.iter().all(|row| row.is_ok()));
    }));
    worst = worst.max(log_z(&device));
    assert_eq!(worst, 0);
    streamed_plans_grow_little_with_draws(&device);
}

/// Counts allocations of draws over device memory: with log Z, for rows of both kinds, and from existing logits.
fn log_z(device: &Arc<Device>) -> usize {
    let problem = Problem::integers(Size::new(ROWS, 5003, 64), DType::BF16, DType::BF16, 4);
    let stream = device.context().new_stream().unwrap();
    let ((_weight, weight), (_hidden, hidden)) =
        (copied(problem.weight.matrix(), &stream), copied(problem.input(), &stream));
    let logits = stream.alloc_zeros::<f32>(ROWS * 5003).unwrap();
    let row = abi::Row { inv_temperature: 1.0, ..abi::Row::default() };
    let there = stream.clone_htod(&vec![row; ROWS]).unwrap();
    let (draws, log_z_memory) =
        (stream.alloc_zeros::<abi::Draw>(ROWS).unwrap(), stream.alloc_zeros::<f64>(ROWS).unwrap());
    let (rows, draws) = (DeviceAddress::of(&there, &stream), DeviceAddress::of(&draws, &stream));
    let log_z = DeviceAddress::of(&log_z_memory, &stream);
    let address = DeviceAddress::of(&logits, &stream).cast();
    let logits = DeviceMatrix { address, dtype: DType::F32, rows: ROWS, cols: 5003, row_stride: 5003 };
    let request = DeviceDraws { count: ROWS, rows, sources: None, draws };
    let head = DeviceHead::of(weight);
    // SAFETY: the weight is on this device, and is dropped after the sampler and after a wait for its calls.
    let mut tiled = unsafe { DeviceTiled::new(head, ROWS, device) }.unwrap();
    let mut standalone = DeviceStandalone::new(0..5003, DType::F32, ROWS, device).unwrap();
    allocations("log Z", &[vec![], vec![]], |_| {
        // SAFETY: all memory is on this device until this function ends; all work uses one stream, and a wait follows.
        unsafe {
            for kinds in [RowFeatures::Bare, RowFeatures::Any] {
                tiled.launch_with_log_z(&stream, &hidden, rows, draws, log_z, kinds).unwrap();
            }
            standalone.launch(&stream, &logits, &request).unwrap();
        }
        stream.synchronize().unwrap();
    })
}

/// Checks that a call decided by lists allocates 32 KiB per row, and no room for logits (156 MB here).
///
/// This check runs first, because later calls could reuse memory that earlier samplers have freed.
fn listed_rows_take_no_room_for_logits() {
    const MANY: usize = 256;
    let problem = Problem::of_logits(&LogitShape::LlmLike.logits(151_936, 5), 1);
    let weight = Tensor::from_fn(DType::BF16, 151_936, 8, |t, k| if k < 2 { problem.weight.row(t)[k] } else { 0.0 });
    let hidden = Tensor::from_fn(DType::BF16, MANY, 8, |_, k| if k < 2 { 1.0 } else { 0.0 });
    let problem = Problem::new(weight, hidden);
    let base = RowParams::default();
    let calls = [base, RowParams { min_p: 0.05, ..base }, RowParams { top_p: 0.9, ..base }];
    let bytes_of = |problem: &Problem| {
        let mut shared = Copied::new(problem.head(), Plan { max_rows: MANY, ..Plan::default() }).unwrap();
        let (_memory, hidden) = copied(problem.input(), &shared.stream);
        let mut out = Samples::new();
        calls.map(|row| {
            let rows: Vec<_> = (0..MANY as u64).map(|position| RowParams { position, ..row }).collect();
            let before = free();
            // SAFETY: the hidden states are on this device until the call returns, and the call waits for its launches.
            let sampled = unsafe { shared.sampler.sample(&shared.stream, &hidden, &rows, &mut out) };
            sampled.expect("the call is within the plan");
            assert!(out.iter().all(|row| row.is_ok()));
            before.saturating_sub(free())
        })
    };
    // This call loads the kernels.
    bytes_of(&Problem::integers(Size::new(MANY, 5003, 8), DType::BF16, DType::BF16, 6));
    let taken = bytes_of(&problem);
    println!("a call without filters, the first with min-p, the first with top-p take {taken:?} bytes of the GPU");
    let is_hopper = Device::new(0).unwrap().capability() == (9, 0);
    assert!(taken[1] < 48 << 20 || !is_hopper, "{taken:?}");
    assert!(taken[1] + taken[2] > 96 << 20, "{taken:?}");
}

/// Checks that a streamed plan allocates per draw 120 bytes and no hidden state. 20,000 hidden states of 8192 would be
/// 328 MB in bf16.
fn streamed_plans_grow_little_with_draws(device: &Arc<Device>) {
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
