//! Log-probabilities and kept tokens of `DeviceSampler::enqueue`, against those of calls that wait.

use super::backends::gpu::Gpu;
use super::backends::gpu_columns::{Arrays, histories, mask, rows};
use super::backends::gpu_logprobs::{GIVEN, Results};
use super::backends::gpu_memory::{Copied, captured, copied, part};
use super::device_logits::{TYPES, logits, placed};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, LogprobsMode, Plan, RowParams, Samples};
use flash_sampling_cuda::abi::RowColumns;
use flash_sampling_cuda::cudarc::driver::CudaStream;
use flash_sampling_cuda::{DeviceAddress, DeviceMatrix, DeviceSampler};
use std::sync::Arc;

const TOP_N: usize = 20;

/// Returns the results of calls that wait, in both laws.
fn waited(
    sampler: &mut DeviceSampler,
    input: &DeviceMatrix,
    rows: &[RowParams<'_>],
    stream: &CudaStream,
) -> [Samples; 2] {
    [LogprobsMode::Processed, LogprobsMode::Raw].map(|logprobs_mode| {
        let (mut rows, mut out) = (rows.to_vec(), Samples::new());
        for row in &mut rows {
            (row.logprobs, row.logprobs_mode, row.ranks) = (Some(TOP_N as u32), logprobs_mode, true);
            row.logprob_token_ids = &GIVEN;
            row.kept = row.temperature > 0.0 && (row.top_k > 0 || row.top_p < 1.0 || row.min_p > 0.0);
        }
        // SAFETY: the input is on this device, and this call waits.
        unsafe { sampler.sample(stream, input, &rows, &mut out) }.unwrap();
        out
    })
}

/// Compares a call that does not wait with calls that do.
fn check(
    sampler: &mut DeviceSampler,
    input: &DeviceMatrix,
    (rows, vocab): (&[RowParams<'_>], usize),
    stream: &Arc<CudaStream>,
    what: &str,
) {
    let want = waited(sampler, input, rows, stream);
    let arrays = Arrays::of(rows, vocab, stream);
    let mut capacity = vocab * rows.len();
    // First with room for all kept tokens, then for half of them.
    for _ in 0..2 {
        let results = Results::new(rows.len(), TOP_N, capacity.max(1), stream);
        let out = results.columns(stream);
        sampler.prepare_enqueue(&arrays.columns, &out, 256).unwrap();
        // SAFETY: all arrays are on this device, with their elements, and live until the results are compared.
        unsafe { sampler.enqueue(stream, input, &arrays.columns, &out) }.unwrap();
        capacity = results.check(&want, stream, what) / 2;
    }
}

/// The Hopper kernel stores raw logits. The plain kernel, for float32, stores them on request.
#[test]
fn log_probabilities_and_kept_tokens_are_those_of_calls_that_wait() {
    let Some(_) = Gpu::TILED.device() else { return };
    // Summaries of three blocks.
    let vocab = 20_003;
    let (mask, histories) = (mask(vocab), histories());
    let none = vec![0; mask.len()];
    for (dtype, count) in [(DType::BF16, 300), (DType::F32, 40)] {
        let problem = Problem::gaussian(Size::new(count, vocab, 136), dtype, dtype, 23);
        let plan = Plan { max_rows: count, max_logprobs: Some(TOP_N as u32), ..Plan::default() };
        let mut there = Copied::new(problem.head(), plan).unwrap();
        let (_memory, hidden) = copied(problem.input(), &there.stream);
        let mut all = rows(count, &mask, &histories);
        // Rows without a draw.
        (all[11].mask, all[12].top_p) = (Some(&none[..]), 2.0);
        // One row per kind of `rows`, so that calls have few arrays.
        for which in [0..count, 0..17].into_iter().chain((0..11).map(|r| r..r + 1)) {
            let rows = &all[which.clone()];
            let what = format!("{which:?}, {}", dtype.name());
            check(&mut there.sampler, &part(&hidden, which.clone()), (rows, vocab), &there.stream, &what);
        }
        drop_outside_captures(there);
    }
}

#[test]
fn log_probabilities_of_logits_in_device_memory_are_those_of_calls_that_wait() {
    let Some((device, stream)) = Gpu::TILED.with_stream() else { return };
    // More rows than a launch has.
    let (count, vocab) = (270, 20_003);
    let (mask, histories) = (mask(vocab), histories());
    let all = rows(count, &mask, &histories);
    let plan = Plan { max_rows: count, max_logprobs: Some(TOP_N as u32), ..Plan::default() };
    for (dtype, place) in TYPES.into_iter().zip([(1, 2), (3, 5), (0, 5)]) {
        let logits = logits(dtype, count, vocab, 90);
        let (_memory, there) = placed(&logits, place, &stream);
        let mut sampler = DeviceSampler::for_logits(vocab, plan, &device).unwrap();
        // All kinds of `rows`, then rows without filters alone.
        for which in [0..count, 0..2, 5..6] {
            let what = format!("{which:?}, {}", dtype.name());
            check(&mut sampler, &part(&there, which.clone()), (&all[which], vocab), &stream, &what);
        }
        drop_outside_captures(sampler);
    }
}

#[test]
fn a_captured_call_with_log_probabilities_reads_its_parameters_when_it_runs() {
    let Some((device, stream)) = Gpu::TILED.with_stream() else { return };
    let vocab = 20_003;
    let problem = Problem::gaussian(Size::new(9, vocab, 136), DType::BF16, DType::BF16, 24);
    let plan = Plan { max_rows: 9, max_logprobs: Some(TOP_N as u32), ..Plan::default() };
    let mut there = Copied::on(&device, stream.clone(), problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &stream);
    let mut positions = stream.alloc_zeros::<u64>(9).unwrap();
    let (mut top_k, mut top_p) = (stream.alloc_zeros::<i32>(9).unwrap(), stream.alloc_zeros::<f32>(9).unwrap());
    let columns = RowColumns {
        position: DeviceAddress::of(&positions, &stream),
        top_k: DeviceAddress::of(&top_k, &stream),
        top_p: DeviceAddress::of(&top_p, &stream),
        ..RowColumns::default()
    };
    let mut results = Results::new(9, TOP_N, 9 * vocab, &stream);
    let out = results.columns(&stream);
    there.sampler.prepare_enqueue(&columns, &out, 0).unwrap();
    stream.synchronize().unwrap();
    let sampler = &mut there.sampler;
    // SAFETY: all arrays are on this device, with their elements, and outlive the graph.
    let graph = captured(&stream, || unsafe { sampler.enqueue(&stream, &hidden, &columns, &out) });
    for step in 0..4u32 {
        let row = |r: u32| RowParams {
            position: u64::from(100 * step + r),
            top_k: [0, 10, 900, 1][((r + step) % 4) as usize],
            top_p: [1.0, 0.9, 0.5][((r + 2 * step) % 3) as usize],
            ..RowParams::default()
        };
        let rows: Vec<_> = (0..9).map(row).collect();
        stream.memcpy_htod(&rows.iter().map(|row| row.position).collect::<Vec<_>>(), &mut positions).unwrap();
        stream.memcpy_htod(&rows.iter().map(|row| row.top_k as i32).collect::<Vec<_>>(), &mut top_k).unwrap();
        stream.memcpy_htod(&rows.iter().map(|row| row.top_p).collect::<Vec<_>>(), &mut top_p).unwrap();
        // The lists of the last step may be longer.
        stream.memcpy_htod(&vec![-7; 9 * vocab], &mut results.kept).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        let want = waited(&mut there.sampler, &hidden, &rows, &stream);
        results.check(&want, &stream, &format!("step {step}"));
    }
    drop(graph);
    drop_outside_captures(there);
}
