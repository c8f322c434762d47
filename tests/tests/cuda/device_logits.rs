//! Samplers of existing logits in device memory.

use super::backends::assert_same;
use super::backends::gpu::Gpu;
use super::backends::gpu_columns::{Arrays, Results, VOCAB, histories, mask, rows};
use super::backends::gpu_memory::captured;
use flash_sampling_conformance::data::normal;
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::{DType, Order, PerturbedArgmax, Plan, RowError, RowParams, SampleError, Samples};
use flash_sampling_cpu::{CpuOptions, Isa, Standalone};
use flash_sampling_cuda::abi::{RowColumns, TokenColumns, status};
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_cuda::{CudaError, DeviceAddress, DeviceMatrix, DeviceSampler};
use std::sync::Arc;

pub(super) const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Logits of standard deviation 2, with a few far above.
pub(super) fn logits(dtype: DType, rows: usize, vocab: usize, seed: u64) -> Tensor {
    Tensor::from_fn(dtype, rows, vocab, |r, t| {
        let z = 2.0 * normal(seed, (r * vocab + t) as u64);
        (z + if (t + r) % 977 == 5 { 6.0 } else { 0.0 }) as f32
    })
}

/// Copies logits to device memory, `lead` elements after its start and with `gap` NaNs after each row.
pub(super) fn placed(
    logits: &Tensor,
    (lead, gap): (usize, usize),
    stream: &Arc<CudaStream>,
) -> (CudaSlice<u8>, DeviceMatrix) {
    let (matrix, size) = (logits.matrix(), logits.matrix().dtype().block_bytes());
    let row = |r| matrix.row_bytes(r).iter().copied().chain(std::iter::repeat_n(0xff, gap * size));
    let bytes: Vec<u8> = std::iter::repeat_n(0xff, lead * size).chain((0..matrix.rows()).flat_map(row)).collect();
    let memory = stream.clone_htod(&bytes).unwrap();
    let address = DeviceAddress::of(&memory, stream).add(lead * size);
    let (rows, cols, dtype) = (matrix.rows(), matrix.cols(), matrix.dtype());
    (memory, DeviceMatrix { address, dtype, rows, cols, row_stride: cols + gap })
}

/// The results of the CPU.
fn of_cpu(logits: &Tensor, plan: Plan, rows: &[RowParams<'_>]) -> Samples {
    let options = CpuOptions { isa: Some(Isa::Portable), threads: Some(1) };
    let (mut cpu, mut out) = (Standalone::new(logits.matrix().cols(), plan, &options).unwrap(), Samples::new());
    cpu.sample(logits.matrix(), rows, &mut out).unwrap();
    out
}

/// Rows with filters, and with requests beyond draws.
fn filtered_rows(count: usize, is_kept: bool) -> Vec<RowParams<'static>> {
    let row = |r: usize| {
        let base = RowParams { seed: 7 + r as u64, position: r as u64, kept: is_kept, ..RowParams::default() };
        match r % 9 {
            0 => RowParams { top_k: 40, ..base },
            1 => RowParams { top_p: 0.9, draws: 3, ..base },
            2 => RowParams { min_p: 0.02, ..base },
            3 => RowParams { top_k: 50, top_p: 0.7, temperature: 0.6, ..base },
            // More tokens than the kernels keep as candidates.
            4 => RowParams { temperature: 30.0, min_p: 0.3, top_p: 0.8, ..base },
            // A filter of the host, more than the kernels' top-k, and another order.
            5 => RowParams { top_n_sigma: 1.5, ..base },
            6 => RowParams { top_k: 1500, temperature: 4.0, ..base },
            7 => RowParams { order: Order::LlamaCpp, top_k: 60, min_p: 0.05, draws: 2, ..base },
            _ => RowParams { kept: false, draws: 2, ..base },
        }
    };
    (0..count).map(row).collect()
}

#[test]
fn rows_with_filters_have_the_bits_and_the_kept_tokens_of_the_cpu() {
    let Some((device, stream)) = Gpu::SharedLogits.with_stream() else { return };
    // The last size has more draws than a launch with filters.
    for (i, (count, vocab)) in
        [(9usize, 61usize), (9, 2051), (18, 50_257), (9, 151_936), (300, 640)].into_iter().enumerate()
    {
        for (dtype, place) in TYPES.into_iter().zip([(0, 0), (3, 5), (0, 8)]) {
            let logits = logits(dtype, count, vocab, 60 + i as u64);
            let plan = Plan { max_rows: count, max_draws: 3, ..Plan::default() };
            let (_memory, there) = placed(&logits, place, &stream);
            let mut sampler = DeviceSampler::for_logits(vocab, plan, &device).unwrap();
            for is_kept in [false, true] {
                let rows = filtered_rows(count, is_kept);
                let want = of_cpu(&logits, plan, &rows);
                let mut found = Samples::new();
                for _ in 0..2 {
                    // SAFETY: the logits are on this device, and this call waits.
                    unsafe { sampler.sample(&stream, &there, &rows, &mut found) }.unwrap();
                    let kept = |samples: &Samples| -> Vec<Option<Vec<u32>>> {
                        samples.iter().map(|row| row.unwrap().kept.map(|kept| kept.tokens.to_vec())).collect()
                    };
                    assert_eq!(kept(&found), kept(&want), "{count} x {vocab}, {dtype:?}");
                    assert_same(&found, &want, &format!("{count} x {vocab}, {dtype:?}, kept {is_kept}"));
                }
            }
            drop_outside_captures(sampler);
        }
    }
}

#[test]
fn calls_that_do_not_wait_have_the_bits_of_the_cpu() {
    let Some((device, stream)) = Gpu::SharedLogits.with_stream() else { return };
    let (mask, histories) = (mask(VOCAB), histories());
    // More rows than a launch has.
    let count = 300;
    let plan = Plan { max_rows: count, ..Plan::default() };
    let all = rows(count, &mask, &histories);
    for (dtype, place) in TYPES.into_iter().zip([(1, 2), (3, 5), (0, 7)]) {
        let logits = logits(dtype, count, VOCAB, 70);
        let want = of_cpu(&logits, plan, &all);
        let (_memory, there) = placed(&logits, place, &stream);
        let mut sampler = DeviceSampler::for_logits(VOCAB, plan, &device).unwrap();
        let arrays = Arrays::of(&all, VOCAB, &stream);
        sampler.prepare_enqueue(&arrays.columns, &TokenColumns::default(), 256).unwrap();
        for _ in 0..2 {
            let results = Results::new(count, &stream);
            // SAFETY: all arrays are on this device, with an element a row, and live until the results are compared.
            unsafe { sampler.enqueue(&stream, &there, &arrays.columns, &results.columns(&stream)) }.unwrap();
            results.check(&want, &stream, &format!("{dtype:?}"));
        }
        drop_outside_captures(sampler);
    }
}

#[test]
fn a_captured_call_reads_logits_and_parameters_when_it_runs() {
    let Some((device, stream)) = Gpu::SharedLogits.with_stream() else { return };
    for dtype in TYPES {
        let plan = Plan { max_rows: 4, ..Plan::default() };
        let (mut memory, there) = placed(&logits(dtype, 4, VOCAB, 80), (0, 0), &stream);
        let mut sampler = DeviceSampler::for_logits(VOCAB, plan, &device).unwrap();
        let mut positions = stream.alloc_zeros::<u64>(4).unwrap();
        let top_p = stream.clone_htod(&[0.9f32, 1.0, 0.5, 0.99]).unwrap();
        let top_k = stream.clone_htod(&[0i32, 3, 0, 40]).unwrap();
        let columns = RowColumns {
            position: DeviceAddress::of(&positions, &stream),
            top_p: DeviceAddress::of(&top_p, &stream),
            top_k: DeviceAddress::of(&top_k, &stream),
            ..RowColumns::default()
        };
        let results = Results::new(4, &stream);
        let out = results.columns(&stream);
        sampler.prepare_enqueue(&columns, &out, 0).unwrap();
        stream.synchronize().unwrap();
        // SAFETY: all arrays are on this device, with an element a row, and outlive the graph.
        let graph = captured(&stream, || unsafe { sampler.enqueue(&stream, &there, &columns, &out) });
        for step in 0..3u64 {
            let logits = logits(dtype, 4, VOCAB, 81 + step);
            let params = [(0.9, 0), (1.0, 3), (0.5, 0), (0.99, 40)].into_iter().zip(100 * step..);
            let row = |((top_p, top_k), position)| RowParams { position, top_p, top_k, ..RowParams::default() };
            let rows: Vec<_> = params.map(row).collect();
            stream.memcpy_htod(logits.matrix().bytes(), &mut memory).unwrap();
            stream.memcpy_htod(&rows.iter().map(|row| row.position).collect::<Vec<_>>(), &mut positions).unwrap();
            graph.launch().unwrap();
            stream.synchronize().unwrap();
            results.check(&of_cpu(&logits, plan, &rows), &stream, &format!("{dtype:?}, step {step}"));
        }
        drop(graph);
        drop_outside_captures(sampler);
    }
}

#[test]
fn bad_logits_are_errors_of_their_rows() {
    let Some((device, stream)) = Gpu::SharedLogits.with_stream() else { return };
    for dtype in TYPES {
        let logits = Tensor::from_fn(dtype, 4, VOCAB, |r, t| match (r, t) {
            (1, 2000) => f32::NAN,
            (2, 7) => f32::INFINITY,
            (3, _) => f32::NEG_INFINITY,
            _ => (t % 50) as f32 * 0.25,
        });
        let plan = Plan { max_rows: 4, ..Plan::default() };
        let rows: Vec<_> = (0..4).map(|seed| RowParams { seed, top_p: 0.9, ..RowParams::default() }).collect();
        let want = of_cpu(&logits, plan, &rows);
        let (_memory, there) = placed(&logits, (0, 1), &stream);
        let mut sampler = DeviceSampler::for_logits(VOCAB, plan, &device).unwrap();
        let mut found = Samples::new();
        // SAFETY: the logits are on this device, and this call waits.
        unsafe { sampler.sample(&stream, &there, &rows, &mut found) }.unwrap();
        assert_same(&found, &want, &format!("{dtype:?}"));
        assert_eq!(found.row(1).err(), Some(RowError::NaN { token: 2000 }));
        let (arrays, results) = (Arrays::of(&rows, VOCAB, &stream), Results::new(4, &stream));
        // SAFETY: all arrays are on this device, with an element a row, and live until the results are read.
        unsafe { sampler.enqueue(&stream, &there, &arrays.columns, &results.columns(&stream)) }.unwrap();
        let found: Vec<_> = results.read(&stream).into_iter().map(|(status, token, ..)| (status, token)).collect();
        let drawn = (status::DRAWN, i64::from(want.row(0).unwrap().token()));
        let failed = [status::NAN, status::POSITIVE_INFINITY, status::NO_FINITE_LOGIT].map(|status| (status, -1));
        assert_eq!(found, [&[drawn][..], &failed].concat());
        drop_outside_captures(sampler);
    }
}

#[test]
fn wrong_calls_are_typed_errors() {
    let Some((device, stream)) = Gpu::SharedLogits.with_stream() else { return };
    let plan = Plan { max_rows: 2, ..Plan::default() };
    let canonical = DeviceSampler::for_logits(VOCAB, Plan { canonical: true, ..plan }, &device);
    assert!(matches!(canonical, Err(CudaError::Unsupported { .. })), "{canonical:?}");
    let mut sampler = DeviceSampler::for_logits(VOCAB, plan, &device).unwrap();
    assert!(sampler.head().is_none());
    let (_memory, there) = placed(&logits(DType::F32, 3, VOCAB, 90), (0, 0), &stream);
    let (rows, mut out) = ([RowParams::default(); 3], Samples::new());
    let mut sample = |there: DeviceMatrix, rows: &[RowParams<'_>]| {
        // SAFETY: the logits are on this device, and this call waits; a wrong matrix is not read.
        unsafe { sampler.sample(&stream, &there, rows, &mut out) }
    };
    let narrow = DeviceMatrix { rows: 2, cols: VOCAB - 1, ..there };
    assert!(matches!(sample(narrow, &rows[..2]), Err(SampleError::Hidden { .. })));
    assert!(matches!(sample(there, &rows), Err(SampleError::TooManyRows { .. })));
    assert!(matches!(sample(DeviceMatrix { rows: 2, ..there }, &rows), Err(SampleError::RowCount { .. })));
    let within = DeviceMatrix { address: DeviceAddress::new(there.address.get() + 2), rows: 1, ..there };
    assert!(matches!(sample(within, &rows[..1]), Err(SampleError::Backend { .. })));
    let (arrays, results) = (Arrays::of(&rows, VOCAB, &stream), Results::new(3, &stream));
    // SAFETY: all arrays are on this device, with an element a row; nothing is enqueued.
    let enqueued = unsafe { sampler.enqueue(&stream, &there, &arrays.columns, &results.columns(&stream)) };
    assert!(matches!(enqueued, Err(CudaError::TooLarge { what: "rows", .. })), "{enqueued:?}");
    drop_outside_captures(sampler);
}
