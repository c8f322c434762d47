//! The suite on the grouped and online variants of the CUDA backend, and what only they promise.

use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::runs;
use flash_sampling_conformance::trial::RowBits;
use flash_sampling_conformance::{BuildError, SamplerFactory, suite};
use flash_sampling_core::reference::{Reference, ReferenceVariant, log_mass};
use flash_sampling_core::{DType, GroupDraw, Head, PerturbedArgmax, Plan, RowParams, Samples};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use flash_sampling_cuda::{
    CudaError, CudaGrouped, CudaOnline, CudaTiled, Device, DeviceGroups, DeviceHead, DeviceMatrix, GroupRule, abi,
};

#[path = "cuda/rows.rs"]
mod rows;

use rows::rows;

/// Tokens of a group: the size that `vectors/value_stability.txt` knows.
const GROUP: u32 = 512;

/// A variant with groups, on the first GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cuda {
    Grouped(u32),
    GroupedReuse,
    Online(u32),
}

impl SamplerFactory for Cuda {
    fn name(&self) -> String {
        let variant = match self {
            Cuda::Grouped(_) => "grouped",
            Cuda::GroupedReuse => "grouped-reuse",
            Cuda::Online(_) => "online",
        };
        format!("cuda/{variant}")
    }

    fn unavailable(&self) -> Option<String> {
        Device::new(0).err().map(|error| error.to_string())
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(match self {
            Cuda::Grouped(group) => ReferenceVariant::Grouped(*group),
            Cuda::GroupedReuse => ReferenceVariant::Tiled,
            Cuda::Online(group) => ReferenceVariant::Online(*group),
        })
    }

    fn pace(&self) -> usize {
        8
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        let failed = |error: CudaError| BuildError(error.to_string());
        let device = Device::new(0).map_err(failed)?;
        Ok(match *self {
            Cuda::Grouped(group) => {
                Box::new(CudaGrouped::new(head, plan, group, GroupDraw::Fresh, &device).map_err(failed)?)
            }
            Cuda::GroupedReuse => {
                Box::new(CudaGrouped::new(head, plan, GROUP, GroupDraw::Reuse, &device).map_err(failed)?)
            }
            Cuda::Online(group) => Box::new(CudaOnline::new(head, plan, group, &device).map_err(failed)?),
        })
    }
}

suite!(grouped, Cuda::Grouped(GROUP));
suite!(grouped_reuse, Cuda::GroupedReuse);
suite!(online, Cuda::Online(GROUP));

#[test]
fn integer_inputs_have_the_reference_bits_for_every_group_and_batch() {
    if !runs(&Cuda::Grouped(GROUP).name(), Cuda::Grouped(GROUP).unavailable(), 1) {
        return;
    }
    // Vocabularies of 40 000 tokens make blocks that share groups, and groups that span many blocks.
    let sizes =
        [(1, 1, 1), (3, 64, 8), (8, 1000, 200), (16, 517, 65), (33, 40_000, 40), (64, 5000, 512), (256, 3001, 16)];
    for (count, vocab, hidden) in sizes {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let problem = Problem::integers(Size::new(count, vocab, hidden), dtype, dtype, 21);
            let rows: Vec<RowParams<'_>> = rows(count)
                .into_iter()
                .map(|row| if vocab <= 60 { RowParams { logit_bias: &[], ..row } } else { row })
                .collect();
            let plan = Plan { max_rows: count, max_draws: 3, ..Plan::default() };
            for group in [64, 512, 16_384] {
                for factory in [Cuda::Grouped(group), Cuda::Online(group)] {
                    let (mut want, mut found) = (Samples::new(), Samples::new());
                    let scheme = factory.reference_variant(&problem.head()).unwrap();
                    Reference::new(problem.head(), plan, scheme).sample(problem.input(), &rows, &mut want).unwrap();
                    let mut sampler = factory.build(problem.head(), plan).unwrap();
                    // Twice: the scratch must be left as it was found.
                    for _ in 0..2 {
                        sampler.sample(problem.input(), &rows, &mut found).unwrap();
                        let (found, want) = (RowBits::all(&found), RowBits::all(&want));
                        for (r, (found, want)) in found.iter().zip(&want).enumerate() {
                            assert_eq!(found, want, "{factory:?}, {vocab} x {hidden}, {}, row {r}", dtype.name());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_in_batches_of_1_to_256() {
    if !runs(&Cuda::Online(GROUP).name(), Cuda::Online(GROUP).unavailable(), 1) {
        return;
    }
    let problem = Problem::gaussian(Size::new(256, 6011, 775), DType::BF16, DType::BF16, 21);
    let rows = rows(256);
    for factory in [Cuda::Grouped(128), Cuda::Online(128)] {
        let plan = Plan { max_rows: 256, max_draws: 3, ..Plan::default() };
        let mut sampler = factory.build(problem.head(), plan).unwrap();
        let mut out = Samples::new();
        sampler.sample(problem.input(), &rows, &mut out).unwrap();
        let all = RowBits::all(&out);
        for batch in [1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 200, 255] {
            for first in [0, 1, 256 - batch] {
                let input = problem.input().row_range(first..first + batch);
                sampler.sample(input, &rows[first..first + batch], &mut out).unwrap();
                let found = RowBits::all(&out);
                assert_eq!(found, all[first..first + batch], "{factory:?}: rows {first}.. in a batch of {batch}");
            }
        }
    }
}

#[test]
fn reused_maxima_are_the_tiled_draws() {
    if !runs(&Cuda::GroupedReuse.name(), Cuda::GroupedReuse.unavailable(), 1) {
        return;
    }
    let device = Device::new(0).unwrap();
    let problem = Problem::gaussian(Size::new(24, 7003, 256), DType::BF16, DType::BF16, 5);
    let plan = Plan { max_rows: 24, max_draws: 3, ..Plan::default() };
    let (mut tiled, mut reused) = (Samples::new(), Samples::new());
    let rows = rows(24);
    CudaTiled::new(problem.head(), plan, &device).unwrap().sample(problem.input(), &rows, &mut tiled).unwrap();
    let mut sampler = CudaGrouped::new(problem.head(), plan, 64, GroupDraw::Reuse, &device).unwrap();
    sampler.sample(problem.input(), &rows, &mut reused).unwrap();
    assert_eq!(RowBits::all(&reused), RowBits::all(&tiled));
}

/// Device memory, the caller's stream, a graph whose replays read new positions, log Z, and all rules.
#[test]
fn captured_calls_draw_by_every_rule_and_tell_log_z() {
    if !runs(&Cuda::Online(GROUP).name(), Cuda::Online(GROUP).unavailable(), 1) {
        return;
    }
    const ROWS: usize = 5;
    let device = Device::new(0).unwrap();
    let problem = Problem::integers(Size::new(ROWS, 30_001, 136), DType::BF16, DType::BF16, 12);
    let stream = device.context().new_stream().unwrap();
    let weight = stream.clone_htod(problem.weight.matrix().bytes()).unwrap();
    let hidden = stream.clone_htod(problem.input().bytes()).unwrap();
    let mut rows_there = stream.alloc_zeros::<abi::Row>(ROWS).unwrap();
    let draws_there = stream.alloc_zeros::<abi::Draw>(ROWS).unwrap();
    let log_z_there = stream.alloc_zeros::<f64>(ROWS).unwrap();
    let [weight, hidden] = [(&weight, 30_001), (&hidden, ROWS)].map(|(slice, rows)| DeviceMatrix {
        address: DeviceAddress::of(slice, &stream),
        dtype: DType::BF16,
        rows,
        cols: 136,
        row_stride: 136,
    });
    let head = DeviceHead { weight, first_token: 0, bias: None, soft_cap: None, scale: 1.0 };
    let (rows_at, draws_at) = (DeviceAddress::of(&rows_there, &stream), DeviceAddress::of(&draws_there, &stream));
    let log_z_at = DeviceAddress::of(&log_z_there, &stream);
    stream.synchronize().unwrap();
    let rules = [
        (GroupRule::Fresh, ReferenceVariant::Grouped(256)),
        (GroupRule::Online, ReferenceVariant::Online(256)),
        (GroupRule::Maxima, ReferenceVariant::Tiled),
    ];
    for (rule, scheme) in rules {
        // SAFETY: the weight is on this device, of this size, and outlives the sampler's launches.
        let mut sampler = unsafe { DeviceGroups::new(head, ROWS, 256, rule, &device) }.unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        // SAFETY: hidden states, rows, draws and log Z are on this device and outlive the graph; one stream is used.
        unsafe { sampler.launch(&stream, &hidden, rows_at, draws_at, Some(log_z_at)) }.unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
        for position in 0..4 {
            let params: Vec<RowParams<'_>> =
                (0..ROWS as u64).map(|seed| RowParams { seed, position, ..RowParams::default() }).collect();
            let row = |p: &RowParams<'_>| abi::Row {
                seed: p.seed,
                position: p.position,
                inv_temperature: 1.0,
                ..abi::Row::default()
            };
            stream.memcpy_htod(&params.iter().map(row).collect::<Vec<_>>(), &mut rows_there).unwrap();
            graph.launch().unwrap();
            let found = stream.clone_dtoh(&draws_there).unwrap();
            let log_z = stream.clone_dtoh(&log_z_there).unwrap();
            stream.synchronize().unwrap();
            let plan = Plan { max_rows: ROWS, ..Plan::default() };
            let mut want = Samples::new();
            Reference::new(problem.head(), plan, scheme.clone()).sample(problem.input(), &params, &mut want).unwrap();
            for (r, (found, want)) in found.iter().zip(want.iter()).enumerate() {
                let want = want.unwrap().draws[0];
                assert_eq!((found.status, found.token), (abi::status::DRAWN, want.token), "{rule:?}, row {r}");
                assert_eq!(found.score.to_bits(), want.score.to_bits(), "{rule:?}, row {r}");
                assert_eq!(found.logit.to_bits(), want.logit.to_bits(), "{rule:?}, row {r}");
                let exact = log_mass(&problem.raw_logits(r));
                assert!((log_z[r] - exact).abs() < 1e-8, "{rule:?}, row {r}: log Z {}, not {exact}", log_z[r]);
            }
        }
    }
}

#[test]
fn groups_that_are_no_multiple_of_64_are_refused() {
    if !runs(&Cuda::Online(GROUP).name(), Cuda::Online(GROUP).unavailable(), 1) {
        return;
    }
    let problem = Problem::integers(Size::new(1, 100, 8), DType::BF16, DType::BF16, 1);
    let device = Device::new(0).unwrap();
    for size in [0, 1, 63, 100] {
        let grouped = CudaGrouped::new(problem.head(), Plan::default(), size, GroupDraw::Fresh, &device);
        assert_eq!(grouped.err(), Some(CudaError::GroupSize { size }));
        let online = CudaOnline::new(problem.head(), Plan::default(), size, &device);
        assert_eq!(online.err(), Some(CudaError::GroupSize { size }));
    }
}
