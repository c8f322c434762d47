//! The suite on the CUDA backend, and what only this backend promises.

use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::{alone, drop_alone, runs};
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_conformance::{BuildError, SamplerFactory, suite};
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{DType, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use flash_sampling_cuda::{
    CudaError, CudaTiled, Device, DeviceHead, DeviceMatrix, DeviceTiled, KernelChoice, RowFeatures, abi,
};

#[path = "cuda/device_filters.rs"]
mod device_filters;
#[path = "cuda/dots.rs"]
mod dots;
#[path = "cuda/filters.rs"]
mod filters;
#[path = "cuda/large.rs"]
mod large;
#[path = "cuda/layouts.rs"]
mod layouts;
#[path = "cuda/log_z.rs"]
mod log_z;
#[path = "cuda/raw.rs"]
mod raw;
#[path = "cuda/rows.rs"]
mod rows;
#[path = "cuda/surveys.rs"]
mod surveys;
#[path = "cuda/top_p.rs"]
mod top_p;
#[path = "cuda/top_p_alone.rs"]
mod top_p_alone;

use rows::rows;

/// The fused tiled variant on the first GPU.
struct Cuda(KernelChoice);

const CHOICES: [KernelChoice; 3] = [KernelChoice::Fastest, KernelChoice::Portable, KernelChoice::PortableUnaligned];

impl SamplerFactory for Cuda {
    fn name(&self) -> String {
        let kernels = match self.0 {
            KernelChoice::Fastest => "",
            KernelChoice::Portable => "/portable",
            KernelChoice::PortableUnaligned => "/unaligned",
        };
        format!("cuda/tiled{kernels}")
    }

    fn unavailable(&self) -> Option<String> {
        Device::new(0).err().map(|error| error.to_string())
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(ReferenceVariant::Tiled)
    }

    fn pace(&self) -> usize {
        8
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let failed = |error: flash_sampling_cuda::CudaError| BuildError(error.to_string());
        let device = Device::new(0).map_err(failed)?;
        Ok(Box::new(CudaTiled::with_kernels(head, plan, &device, self.0).map_err(failed)?))
    }
}

suite!(tiled, Cuda(KernelChoice::Fastest));
suite!(portable, Cuda(KernelChoice::Portable));
suite!(unaligned, Cuda(KernelChoice::PortableUnaligned));

/// Whether tests of this file run here; each is counted once.
fn runs_here() -> bool {
    let cuda = Cuda(KernelChoice::Fastest);
    runs(&cuda.name(), cuda.unavailable(), 1)
}

/// Device memory, the caller's stream, and a graph whose replays read new positions.
#[test]
fn a_captured_call_draws_fresh_noise_when_positions_change() {
    if !runs_here() {
        return;
    }
    for choice in CHOICES {
        [RowFeatures::Bare, RowFeatures::Any].into_iter().for_each(|kinds| captured_call(choice, kinds));
    }
}

fn captured_call(choice: KernelChoice, kinds: RowFeatures) {
    let device = Device::new(0).unwrap();
    let problem = Problem::integers(Size::new(5, 3001, 136), DType::BF16, DType::BF16, 12);
    let stream = device.context().new_stream().unwrap();
    let weight = stream.clone_htod(problem.weight.matrix().bytes()).unwrap();
    let hidden = stream.clone_htod(problem.input().bytes()).unwrap();
    let mut rows_there = stream.alloc_zeros::<abi::Row>(5).unwrap();
    let draws_there = stream.alloc_zeros::<abi::Draw>(5).unwrap();
    let [weight, hidden] = [(&weight, 3001), (&hidden, 5)].map(|(slice, rows)| DeviceMatrix {
        address: DeviceAddress::of(slice, &stream),
        dtype: DType::BF16,
        rows,
        cols: 136,
        row_stride: 136,
    });
    let head = DeviceHead { weight, first_token: 0, bias: None, soft_cap: None, scale: 1.0 };
    let (rows_at, draws_at) = (DeviceAddress::of(&rows_there, &stream), DeviceAddress::of(&draws_there, &stream));
    stream.synchronize().unwrap();
    // SAFETY: the weight is on this device, of this size, and outlives the sampler's launches.
    let mut sampler = unsafe { DeviceTiled::with_kernels(head, 5, &device, choice) }.unwrap();
    sampler.prepare(kinds).unwrap();
    let capturing = alone();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    // SAFETY: hidden states, rows and draws are on this device and outlive the graph; one stream is used.
    let launched = unsafe { sampler.launch(&stream, &hidden, rows_at, draws_at, kinds) };
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    drop(capturing);
    launched.unwrap();
    let graph = graph.unwrap().unwrap();
    let (mut want, mut tokens) = (Samples::new(), Vec::new());
    for position in 0..4 {
        let params: Vec<RowParams<'_>> =
            (0..5).map(|seed| RowParams { seed, position, ..RowParams::default() }).collect();
        let row = |p: &RowParams<'_>| abi::Row {
            seed: p.seed,
            position: p.position,
            inv_temperature: 1.0,
            ..abi::Row::default()
        };
        stream.memcpy_htod(&params.iter().map(row).collect::<Vec<_>>(), &mut rows_there).unwrap();
        graph.launch().unwrap();
        let found = stream.clone_dtoh(&draws_there).unwrap();
        stream.synchronize().unwrap();
        let plan = Plan { max_rows: 5, ..Plan::default() };
        Reference::new(problem.head(), plan, ReferenceVariant::Tiled)
            .sample(problem.input(), &params, &mut want)
            .unwrap();
        for (found, want) in found.iter().zip(want.iter()) {
            let want = want.unwrap().draws[0];
            assert_eq!((found.status, found.token), (abi::status::DRAWN, want.token));
            assert_eq!((found.score.to_bits(), found.logit.to_bits()), (want.score.to_bits(), want.logit.to_bits()));
        }
        tokens.push(found.iter().map(|draw| draw.token).collect::<Vec<_>>());
    }
    assert!(tokens.windows(2).all(|pair| pair[0] != pair[1]), "{tokens:?}");
    drop_alone(sampler);
}

/// A thread that has never used the GPU has no current context; the first launch there encodes maps for the driver.
#[test]
fn a_sampler_that_is_moved_to_another_thread_draws_there() {
    if !runs_here() {
        return;
    }
    let device = Device::new(0).unwrap();
    let problem = Problem::integers(Size::new(5, 3001, 136), DType::BF16, DType::BF16, 12);
    let stream = device.context().new_stream().unwrap();
    let weight = stream.clone_htod(problem.weight.matrix().bytes()).unwrap();
    let hidden = stream.clone_htod(problem.input().bytes()).unwrap();
    let row = |seed| abi::Row { seed, inv_temperature: 1.0, ..abi::Row::default() };
    let rows_there = stream.clone_htod(&(0..5).map(row).collect::<Vec<_>>()).unwrap();
    let draws_there = stream.alloc_zeros::<abi::Draw>(5).unwrap();
    let [weight, hidden] = [(&weight, 3001), (&hidden, 5)].map(|(slice, rows)| DeviceMatrix {
        address: DeviceAddress::of(slice, &stream),
        dtype: DType::BF16,
        rows,
        cols: 136,
        row_stride: 136,
    });
    let head = DeviceHead { weight, first_token: 0, bias: None, soft_cap: None, scale: 1.0 };
    let (rows_at, draws_at) = (DeviceAddress::of(&rows_there, &stream), DeviceAddress::of(&draws_there, &stream));
    stream.synchronize().unwrap();
    let params: Vec<RowParams<'_>> = (0..5).map(|seed| RowParams { seed, ..RowParams::default() }).collect();
    let mut want = Samples::new();
    let plan = Plan { max_rows: 5, ..Plan::default() };
    Reference::new(problem.head(), plan, ReferenceVariant::Tiled).sample(problem.input(), &params, &mut want).unwrap();
    for choice in CHOICES {
        // SAFETY: the weight is on this device, of this size, and outlives the sampler's launches.
        let mut sampler = unsafe { DeviceTiled::with_kernels(head, 5, &device, choice) }.unwrap();
        let stream = &stream;
        let launch = move || {
            // SAFETY: hidden states, rows and draws are on this device and outlive the launch; one stream is used.
            unsafe { sampler.launch(stream, &hidden, rows_at, draws_at, RowFeatures::Unpenalised) }.unwrap();
            stream.synchronize().unwrap();
            drop_alone(sampler);
        };
        std::thread::scope(|scope| scope.spawn(launch).join()).unwrap();
        let found = stream.clone_dtoh(&draws_there).unwrap();
        stream.synchronize().unwrap();
        let tokens = |row: usize| want.row(row).unwrap().draws[0].token;
        assert!(found.iter().enumerate().all(|(r, draw)| draw.status == 0 && draw.token == tokens(r)), "{found:?}");
    }
    let nothing = DeviceHead { weight: DeviceMatrix { rows: 0, ..head.weight }, ..head };
    // SAFETY: it is refused.
    let refused = unsafe { DeviceTiled::new(nothing, 5, &device) }.err();
    assert_eq!(refused, Some(CudaError::Layout { what: "weight", reason: "it has no rows" }));
}

#[test]
fn integer_inputs_have_the_reference_bits_for_every_tile_and_transform() {
    if !runs_here() {
        return;
    }
    let sizes = [(1, 1, 1), (3, 64, 8), (8, 1000, 200), (16, 517, 65), (31, 33_000, 130), (64, 5000, 512)];
    let large = [(100, 2048, 1023), (128, 4097, 96), (200, 50_000, 64), (256, 20_011, 192), (300, 700, 40)];
    for (i, (count, vocab, hidden)) in sizes.into_iter().chain(large).enumerate() {
        for dtype in [DType::BF16, DType::F16] {
            let mut problem = Problem::integers(Size::new(count, vocab, hidden), dtype, dtype, 40 + i as u64);
            if i % 2 == 1 {
                problem.bias = Some((0..vocab).map(|t| (t % 7) as f32 * 0.25).collect());
            }
            (problem.soft_cap, problem.scale) = if i % 3 == 2 { (Some(30.0), Some(1.5)) } else { (None, None) };
            let rows = rows(count);
            let rows: Vec<_> = rows
                .into_iter()
                .map(|row| if vocab <= 60 { RowParams { logit_bias: &[], ..row } } else { row })
                .collect();
            let plan = Plan { max_rows: count, max_draws: 3, ..Plan::default() };
            let (mut want, mut found) = (Samples::new(), Samples::new());
            Reference::new(problem.head(), plan, ReferenceVariant::Tiled)
                .sample(problem.input(), &rows, &mut want)
                .unwrap();
            for choice in CHOICES {
                let mut sampler = Cuda(choice).build(problem.head(), plan).unwrap();
                // Twice: the scratch must be left as it was found.
                for _ in 0..2 {
                    sampler.sample(problem.input(), &rows, &mut found).unwrap();
                    let what = format!("{count} rows, {vocab} x {hidden}, {}, {choice:?}", dtype.name());
                    assert_eq!(RowBits::all(&found), RowBits::all(&want), "{what}");
                }
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_in_batches_of_1_to_256() {
    if !runs_here() {
        return;
    }
    let problem = Problem::gaussian(Size::new(256, 6011, 775), DType::BF16, DType::BF16, 21);
    let rows = rows(256);
    let mut out = Samples::new();
    // The kernels agree with each other too.
    let mut all = Vec::new();
    for choice in CHOICES {
        let plan = Plan { max_rows: 256, max_draws: 3, ..Plan::default() };
        let mut sampler = Cuda(choice).build(problem.head(), plan).unwrap();
        if all.is_empty() {
            sampler.sample(problem.input(), &rows, &mut out).unwrap();
            all = RowBits::all(&out);
        }
        for batch in [1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 200, 255, 256] {
            for first in [0, 1, 256 - batch].into_iter().filter(|first| first + batch <= 256) {
                let input: Matrix<'_> = problem.input().row_range(first..first + batch);
                sampler.sample(input, &rows[first..first + batch], &mut out).unwrap();
                assert_eq!(
                    RowBits::all(&out),
                    all[first..first + batch],
                    "rows {first}.. in a batch of {batch}, {choice:?}"
                );
            }
        }
    }
}

#[test]
fn invalid_weights_are_their_rows_errors_and_leave_nothing_behind() {
    if !runs_here() {
        return;
    }
    let good = Problem::integers(Size::new(8, 500, 16), DType::BF16, DType::BF16, 4);
    let head_bias: Vec<f32> = (0..500).map(|t| if t == 77 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let rows = rows(8);
    let plan = Plan { max_rows: 8, max_draws: 3, ..Plan::default() };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        // Times the zeros of the columns that no row uses, both are NaN there too.
        for poison in [f32::NAN, f32::INFINITY] {
            let at = |row: &[f32], k: usize, wrong: Option<f32>| wrong.filter(|_| k == 5).unwrap_or(row[k]);
            let weight =
                Tensor::from_fn(dtype, 500, 16, |t, k| at(&good.weight.row(t), k, (t == 123).then_some(poison)));
            let hidden = |element| Tensor::from_fn(dtype, 8, 16, |r, k| at(&good.hidden.row(r), k, Some(element)));
            let bad = Problem { bias: Some(head_bias.clone()), ..Problem::new(weight, hidden(1.0)) };
            // Times a negative number, infinity only forbids its token.
            let after = hidden(-0.5);
            let (mut out, mut want, mut want_after) = (Samples::new(), Samples::new(), Samples::new());
            let mut reference = Reference::new(bad.head(), plan, ReferenceVariant::Tiled);
            reference.sample(bad.input().row_range(0..3), &rows[..3], &mut want).unwrap();
            reference.sample(after.matrix(), &rows, &mut want_after).unwrap();
            assert!(want.iter().all(|row| row.is_err()));
            assert!(want_after.iter().all(|row| row.is_err() == poison.is_nan()));
            for choice in CHOICES {
                let mut sampler = Cuda(choice).build(bad.head(), plan).unwrap();
                for turn in 0..2 {
                    let what = format!("{poison} in {}, {choice:?}, turn {turn}", dtype.name());
                    sampler.sample(bad.input().row_range(0..3), &rows[..3], &mut out).unwrap();
                    assert_eq!(RowBits::all(&out), RowBits::all(&want), "{what}");
                    sampler.sample(after.matrix(), &rows, &mut out).unwrap();
                    assert_eq!(RowBits::all(&out), RowBits::all(&want_after), "{what}, more rows");
                }
            }
        }
    }
}
