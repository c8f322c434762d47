//! The suite on the CUDA sampler over existing logits, and tests of this sampler only.

mod backends;

use backends::assert_same;
use backends::gpu::Gpu;
use backends::gpu_memory::{POISON, captured};
use flash_sampling_conformance::data::normal;
use flash_sampling_conformance::suite;
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::reference::tiled;
use flash_sampling_core::{DType, LogprobsMode, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cpu::{CpuOptions, Isa, Standalone};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::{CudaStandalone, DeviceDraws, DeviceMatrix, DeviceStandalone, abi};

suite!(standalone, Gpu::Standalone);
suite!(shared, Gpu::SharedLogits);

/// Returns rows that differ in all parameters.
fn rows(count: usize, logprobs: Option<u32>) -> Vec<RowParams<'static>> {
    const MASK: [u32; 40] = [0xdead_beef; 40];
    let row = |r: usize| {
        let base = RowParams { seed: 7 + r as u64 / 3, position: (1 << 40) + r as u64, ..RowParams::default() };
        let raw = LogprobsMode::Raw;
        match r % 10 {
            0 => base,
            1 => RowParams { temperature: 0.0, draws: 2, ..base },
            2 => RowParams { temperature: 0.6, draws: 3, first_draw: 9, ..base },
            3 => RowParams { logit_bias: &[(1, 4.0), (9, f32::NEG_INFINITY), (60, -1.0)], ..base },
            4 => RowParams { mask: Some(&MASK), draws: 2, ..base },
            5 => RowParams { temperature: 1000.0, logprobs, ..base },
            6 => RowParams { draws: 3, without_replacement: true, logprobs, ..base },
            7 => RowParams { draws: 2, without_replacement: true, temperature: 0.0, ..base },
            8 => RowParams { temperature: 0.3, draws: 2, logprobs, logprobs_mode: raw, ..base },
            _ => RowParams { mask: Some(&MASK), logprobs, logprobs_mode: raw, ..base },
        }
    };
    (0..count).map(row).collect()
}

#[test]
fn logits_of_every_type_and_width_have_the_bits_of_the_cpu() {
    same_as_the_cpu(&[
        (17, 3),
        (9, 61),
        (8, 255),
        (8, 256),
        (8, 257),
        (16, 1000),
        (8, 50_257),
        (8, 151_936),
        (300, 640),
    ]);
}

/// Uses rows of three blocks of masses, small enough for the sanitizers.
#[test]
fn logits_of_several_blocks_have_the_bits_of_the_cpu() {
    same_as_the_cpu(&[(10, 20_003)]);
}

/// Compares samplers of the given rows and tokens with the CPU.
fn same_as_the_cpu(sizes: &[(usize, usize)]) {
    let Some(device) = Gpu::Standalone.device() else { return };
    let options = CpuOptions { isa: Some(Isa::Portable), threads: Some(1) };
    for (i, (count, vocab)) in sizes.iter().copied().enumerate() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            // Standard deviation 3, and a few logits far above.
            let logits = Tensor::from_fn(dtype, count, vocab, |r, t| {
                let z = normal(90 + i as u64, (r * vocab + t) as u64);
                (3.0 * z + if (t + r) % 977 == 5 { 9.0 } else { 0.0 }) as f32
            });
            let plan = Plan { max_rows: count, max_draws: 3, max_logprobs: Some(3), canonical: false };
            let mut rows = rows(count, Some(3));
            if vocab <= 60 {
                rows.iter_mut().for_each(|row| row.logit_bias = &[]);
            }
            let (mut want, mut found) = (Samples::new(), Samples::new());
            Standalone::new(vocab, plan, &options).unwrap().sample(logits.matrix(), &rows, &mut want).unwrap();
            let mut sampler = CudaStandalone::new(vocab, plan, &device).unwrap();
            // Two calls, so state that a call leaves in the scratch changes the result.
            for _ in 0..2 {
                sampler.sample(logits.matrix(), &rows, &mut found).unwrap();
                assert_same(&found, &want, &format!("{count} x {vocab}, {}", dtype.name()));
            }
        }
    }
}

#[test]
fn long_lists_without_replacement_have_the_bits_of_the_cpu() {
    let Some(device) = Gpu::Standalone.device() else { return };
    let options = CpuOptions { isa: Some(Isa::Portable), threads: Some(1) };
    let vocab = 120_001;
    // Row 0 has few different logits, so greedy lists end among ties.
    let logits = Tensor::from_fn(DType::F32, 2, vocab, |r, t| {
        let z = normal(97, (r * vocab + t) as u64) as f32;
        if r == 0 { (2.0 * z).round() * 0.5 } else { z }
    });
    for (draws, temperature) in [(1, 1.0), (2000, 1.0), (2000, 0.0), (100_000, 1.0), (vocab as u32, 1.0)] {
        let plan = Plan { max_rows: 2, max_draws: draws, ..Plan::default() };
        let row =
            RowParams { seed: 3, position: 8, draws, temperature, without_replacement: true, ..RowParams::default() };
        let mut found = Samples::new();
        CudaStandalone::new(vocab, plan, &device).unwrap().sample(logits.matrix(), &[row; 2], &mut found).unwrap();
        let can = Standalone::new(vocab, plan, &options).unwrap().capabilities();
        let checked = row.check(&[], &can, &plan, vocab as u32).unwrap();
        for r in 0..2 {
            let mut want: Vec<(f32, u32)> = logits
                .row(r)
                .iter()
                .zip(0..)
                .map(|(&logit, token)| {
                    let noise = checked.noise.gumbel(flash_sampling_core::Domain::Token, 0, token);
                    (if temperature == 0.0 { logit } else { logit + noise }, token)
                })
                .collect();
            want.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let list = found.row(r).unwrap().draws;
            assert_eq!(list.len(), draws as usize);
            for (at, (found, want)) in list.iter().zip(&want).enumerate() {
                let found_bits = (found.score.to_bits(), found.token);
                assert_eq!(found_bits, ((want.0 + 0.0).to_bits(), want.1), "row {r}, place {at} of {draws}");
            }
        }
    }
}

/// Replays graphs of calls over device memory of several strides and addresses, on the caller's stream. Calls have
/// shards of the tokens, several draws per row, new positions in each replay, and poisoned outputs.
#[test]
fn a_captured_call_draws_from_strided_logits_with_fresh_positions() {
    let Some((device, stream)) = Gpu::Standalone.with_stream() else { return };
    for (first, count, stride, lead) in [(0u32, 3000u32, 3008usize, 0usize), (70, 2001, 2003, 3), (1021, 515, 515, 1)] {
        let rows = 3usize;
        let values: Vec<f32> = (0..lead + rows * stride).map(|i| (2.0 * normal(98, i as u64)) as f32).collect();
        let there = stream.clone_htod(&values).unwrap();
        let tokens = first..first + count;
        let sources: Vec<u32> = vec![2, 0, 1, 1, 2];
        let sources_there = stream.clone_htod(&sources).unwrap();
        let mut rows_there = stream.alloc_zeros::<abi::Row>(5).unwrap();
        let mut draws_there = stream.clone_htod(&[POISON; 5]).unwrap();
        let logits = DeviceMatrix {
            address: DeviceAddress::of(&there, &stream).add(lead).cast(),
            dtype: DType::F32,
            rows,
            cols: count as usize,
            row_stride: stride,
        };
        let draws = DeviceDraws {
            count: 5,
            rows: DeviceAddress::of(&rows_there, &stream),
            sources: Some(DeviceAddress::of(&sources_there, &stream)),
            draws: DeviceAddress::of(&draws_there, &stream),
        };
        stream.synchronize().unwrap();
        let mut sampler = DeviceStandalone::new(tokens, DType::F32, 5, &device).unwrap();
        // SAFETY: logits, rows, sources and draws are on this device and outlive the graph; one stream is used.
        let graph = captured(&stream, || unsafe { sampler.launch(&stream, &logits, &draws) });
        let can = CudaStandalone::new(4, Plan::default(), &device).unwrap().capabilities();
        for position in 0..4 {
            let params: Vec<RowParams<'_>> =
                (0..5).map(|seed| RowParams { seed, position, temperature: 0.7, ..RowParams::default() }).collect();
            let row = |p: &RowParams<'_>| abi::Row {
                seed: p.seed,
                position: p.position,
                inv_temperature: 1.0 / 0.7,
                draw: 3,
                ..abi::Row::default()
            };
            stream.memcpy_htod(&params.iter().map(row).collect::<Vec<_>>(), &mut rows_there).unwrap();
            stream.memcpy_htod(&[POISON; 5], &mut draws_there).unwrap();
            graph.launch().unwrap();
            let found = stream.clone_dtoh(&draws_there).unwrap();
            stream.synchronize().unwrap();
            for (i, (found, params)) in found.iter().zip(&params).enumerate() {
                let row = params.check(&[], &can, &Plan::default(), u32::MAX - 1).unwrap();
                let from = lead + sources[i] as usize * stride;
                let mut transformed = values[from..from + count as usize].to_vec();
                row.transform.apply(first, &mut transformed);
                let want = tiled(&row, 3, &transformed, first);
                assert_eq!((found.status, found.token), (abi::status::DRAWN, want.winner.token), "draw {i}");
                let bits = (found.score.to_bits(), found.logit.to_bits());
                assert_eq!(bits, (want.winner.score.to_bits(), want.logit.to_bits()), "draw {i}");
            }
        }
        drop_outside_captures(sampler);
    }
}
