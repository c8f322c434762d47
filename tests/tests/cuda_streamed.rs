//! The suite on heads whose weight is read in blocks, and tests of these heads only.

mod backends;

use backends::gpu::Gpu;
use backends::gpu_rows::rows;
use backends::{assert_same, assert_twice, described, reference};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite;
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{DType, LogprobsMode, PerturbedArgmax, Plan, RowParams, Samples, StreamError};
use flash_sampling_cuda::{CudaError, CudaStreamed, CudaTiled};
use std::io::Read;

suite!(online, Gpu::StreamedOnline);
suite!(tiled, Gpu::StreamedTiled);

#[test]
fn streamed_weights_have_the_reference_bits_in_blocks_of_any_size() {
    let Some(device) = Gpu::StreamedOnline.device() else { return };
    for (count, vocab, hidden) in [(1, 1, 1), (7, 5000, 65), (120, 3001, 64)] {
        for dtype in [DType::BF16, DType::F32] {
            let mut problem = Problem::integers(Size::new(count, vocab, hidden), dtype, dtype, 33);
            problem.bias = Some((0..vocab).map(|t| (t % 5) as f32).collect());
            problem.scale = Some(0.5);
            // More draws than fit into a launch.
            let row = |row| RowParams { draws: 3, first_draw: 2, logit_bias: &[], ..row };
            let rows: Vec<RowParams<'_>> = rows(count).into_iter().map(row).collect();
            let plan = Plan { max_rows: count, max_draws: 3, ..Plan::default() };
            let bytes = problem.weight.matrix().bytes();
            for block_bytes in [1, 2000 * hidden * dtype.block_bytes(), usize::MAX] {
                let online = CudaStreamed::online(described(&problem.head()), plan, 64, block_bytes, &device).unwrap();
                let tiled = CudaStreamed::tiled(described(&problem.head()), plan, block_bytes, &device).unwrap();
                for (mut sampler, variant) in [(online, ReferenceVariant::Online(64)), (tiled, ReferenceVariant::Tiled)]
                {
                    let what = format!("{variant:?}, {vocab} tokens in blocks of {}", sampler.block_tokens());
                    let (want, mut found) = (reference(&problem, plan, variant, &rows), Samples::new());
                    for _ in 0..2 {
                        sampler.sample(&mut &*bytes, problem.input(), &rows, &mut found).unwrap();
                        assert_same(&found, &want, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn a_stream_that_ends_early_is_an_error_that_names_the_token() {
    let Some(device) = Gpu::StreamedOnline.device() else { return };
    let problem = Problem::gaussian(Size::new(9, 2101, 70), DType::BF16, DType::BF16, 2);
    let bytes = problem.weight.matrix().bytes();
    let plan = Plan { max_rows: 9, max_draws: 3, ..Plan::default() };
    let mut out = Samples::new();
    let mut stream = CudaStreamed::online(described(&problem.head()), plan, 512, 1, &device).unwrap();
    for (rows_there, token) in [(0, 0), (500, 0), (513, 512), (2100, 2048)] {
        let failed = stream.sample(&mut &bytes[..rows_there * 140], problem.input(), &rows(9), &mut out);
        assert!(matches!(failed, Err(StreamError::Read { token: t, .. }) if t == token), "{failed:?}");
    }
    stream.sample(&mut &*bytes, problem.input(), &rows(9), &mut out).unwrap();
    assert!(out.iter().all(|row| row.is_ok()));
    let refused = CudaStreamed::online(described(&problem.head()), Plan { canonical: true, ..plan }, 512, 1, &device);
    assert!(matches!(refused.err(), Some(CudaError::Unsupported { .. })));
}

/// Uses more rows with log-probabilities than fit into 64 MiB, and rows with draws for several launches.
#[test]
fn log_probabilities_and_many_draws_are_those_of_the_head_in_memory() {
    let Some(device) = Gpu::StreamedTiled.device() else { return };
    let problem = Problem::gaussian(Size::new(150, 151_936, 16), DType::BF16, DType::BF16, 8);
    let plan = Plan { max_rows: 150, max_draws: 300, max_logprobs: Some(4), canonical: false };
    let row = |r: usize, row| RowParams {
        logprobs: (r % 10 != 3).then_some(r as u32 % 5),
        logprobs_mode: if r % 4 == 1 { LogprobsMode::Raw } else { LogprobsMode::Processed },
        draws: if r % 50 == 7 { 300 } else { 1 + r as u32 % 3 },
        ..row
    };
    let rows: Vec<RowParams<'_>> = rows(150).into_iter().enumerate().map(|(r, params)| row(r, params)).collect();
    let mut want = Samples::new();
    CudaTiled::new(problem.head(), plan, &device).unwrap().sample(problem.input(), &rows, &mut want).unwrap();
    assert_twice(&Gpu::StreamedTiled, &problem, plan, &rows, &want, "stream");
}

/// A reader that fails after some bytes.
struct Failing(usize);

impl Read for Failing {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let count = to.len().min(self.0).min(7777);
        if count == 0 {
            return Err(std::io::Error::other("the disk is gone"));
        }
        to[..count].fill(0x3f);
        self.0 -= count;
        Ok(count)
    }
}

/// Drops a stream whose copies and launches of earlier blocks still use memory that the drop frees.
#[test]
fn a_stream_is_dropped_while_the_work_of_a_call_that_failed_is_under_way() {
    let Some(device) = Gpu::StreamedOnline.device() else { return };
    let problem = Problem::integers(Size::new(64, 20_011, 512), DType::BF16, DType::BF16, 3);
    let rows = rows(64);
    let plan = Plan { max_rows: 64, max_draws: 3, max_logprobs: Some(1), canonical: false };
    let asking: Vec<RowParams<'_>> = rows.iter().map(|row| RowParams { logprobs: Some(1), ..*row }).collect();
    let (want, mut out) = (reference(&problem, plan, ReferenceVariant::Tiled, &asking), Samples::new());
    let bytes = problem.weight.matrix().bytes();
    for share in [1, 3, 7, 12, 19] {
        for turn in 0..4 {
            let mut stream = CudaStreamed::tiled(described(&problem.head()), plan, 1 << 20, &device).unwrap();
            let mut reader = Failing(bytes.len() / 20 * share);
            let failed = stream.sample(&mut reader, problem.input(), &asking, &mut out);
            let Err(StreamError::Read { token, source }) = failed else { panic!("{failed:?}") };
            assert!(token.is_multiple_of(stream.block_tokens()) && source.to_string() == "the disk is gone");
            assert!(out.is_empty());
            if turn % 2 == 1 {
                // The same sampler works after the failed call.
                stream.sample(&mut &*bytes, problem.input(), &asking, &mut out).unwrap();
                assert_same(&out, &want, &format!("after {share} of 20 parts"));
            }
            drop(stream);
        }
        device.context().synchronize().unwrap();
        device.context().check_err().unwrap();
    }
}
