//! Filters over device memory: rows that one pass decides, captured calls, and refused addresses.

use super::backends::gpu::{CHOICES, Gpu};
use super::backends::gpu_memory::{OnDevice, captured};
use flash_sampling_conformance::data::{hash, normal};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::capture_lock;
use flash_sampling_conformance::tensor::Tensor;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{
    Capabilities, DType, Exactness, Input, Knobs, PerturbedArgmax, Plan, RowParams, Samples, Variant,
};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::cudarc::driver::CudaSlice;
use flash_sampling_cuda::{
    CudaError, CudaTiled, DeviceDraws, DeviceFilters, DeviceMatrix, DeviceStandalone, DeviceTiled, FilterKinds,
    KernelChoice, RowFeatures, abi,
};
use std::sync::MutexGuard;

const CAPABILITIES: Capabilities = Capabilities {
    backend: "cuda",
    variant: Variant::Tiled,
    exactness: Exactness::Pathwise,
    input: Input::Hidden,
    without_replacement: false,
    knobs: Knobs::FILTERS,
    canonical: false,
    shadow: false,
};

/// A head in device memory, with rows, filters and draws for calls.
pub(super) struct DeviceCalls {
    filters: DeviceFilters,
    sampler: DeviceTiled,
    row_filters: CudaSlice<abi::RowFilters>,
    filters_at: DeviceAddress<abi::RowFilters>,
    /// The kinds of the last filters.
    kinds: FilterKinds,
    at: OnDevice,
    /// The lock that prevents captures during the drop; it is dropped last.
    dropping: Option<MutexGuard<'static, ()>>,
}

impl Drop for DeviceCalls {
    fn drop(&mut self) {
        self.dropping = Some(capture_lock());
    }
}

impl DeviceCalls {
    pub(super) fn new(problem: &Problem, choice: KernelChoice) -> DeviceCalls {
        let at = OnDevice::new(problem, 0);
        let (count, vocab) = (problem.rows(), problem.weight.rows() as u32);
        let row_filters = at.stream.alloc_zeros(count).unwrap();
        let filters_at = DeviceAddress::of(&row_filters, &at.stream);
        at.stream.synchronize().unwrap();
        // SAFETY: the weight is on this device and has this size. A wait for the sampler's calls precedes its drop, and
        // the sampler is dropped first.
        let sampler = unsafe { DeviceTiled::with_kernels(at.head, count, &at.device, choice) }.unwrap();
        let filters = DeviceFilters::new(0..vocab, count, &at.device).unwrap();
        DeviceCalls { filters, sampler, row_filters, filters_at, kinds: FilterKinds::ALL, at, dropping: None }
    }

    /// Copies the parameters of the next launches to the GPU, and poisons the draws.
    pub(super) fn set(&mut self, params: &[RowParams<'_>]) {
        let (mut rows, mut all) = (Vec::new(), Vec::new());
        for params in params {
            let row = params.check(&[], &CAPABILITIES, &Plan::default(), self.at.head.weight.rows as u32).unwrap();
            all.push(row.filters.as_ref().and_then(abi::RowFilters::of).unwrap_or(abi::RowFilters::OFF));
            rows.push(abi::Row {
                seed: params.seed,
                position: params.position,
                inv_temperature: row.transform.inv_temperature,
                greedy: row.greedy.into(),
                ..abi::Row::default()
            });
        }
        self.kinds = FilterKinds::of(&all).with_rows(RowFeatures::Bare);
        self.at.stream.memcpy_htod(&all, &mut self.row_filters).unwrap();
        self.at.set(&rows);
    }

    /// Enqueues a call by lists or by stored logits. Returns whether the sampler supports the call.
    pub(super) fn launch(&mut self, by_lists: bool) -> Result<bool, CudaError> {
        let DeviceCalls { filters: selection, sampler, filters_at: filters, at, .. } = self;
        let OnDevice { stream, hidden, rows_at: rows, draws_at: draws, .. } = at;
        // SAFETY: this value owns rows, filters and draws, one per hidden state. All work uses one stream, and a wait
        // for the stream precedes every drop.
        unsafe {
            match by_lists {
                true => selection.launch_listed(stream, sampler, hidden, (*rows, *filters), *draws),
                false => selection
                    .launch(stream, sampler, hidden, (*rows, *filters), *draws, FilterKinds::ALL)
                    .map(|()| true),
            }
        }
    }

    /// Enqueues a call with known kinds of rows.
    pub(super) fn launch_known(&mut self) -> Result<(), CudaError> {
        let DeviceCalls { filters: selection, sampler, filters_at: filters, kinds, at, .. } = self;
        let OnDevice { stream, hidden, rows_at: rows, draws_at: draws, .. } = at;
        // SAFETY: as above; no row has a mask or biases, and the filters were set last.
        unsafe { selection.launch(stream, sampler, hidden, (*rows, *filters), *draws, *kinds) }
    }

    /// Waits for all enqueued work, and returns the draws.
    pub(super) fn draws(&self) -> Vec<abi::Draw> {
        self.at.draws()
    }
}

/// The columns of a head for [`like_a_models`]: one column per tall token, and the columns of the bulk.
pub(super) const TALL: usize = 64;
pub(super) const BULK: usize = 32;

/// Returns the weight for [`like_a_models`], with tall tokens spread over the vocabulary.
pub(super) fn scattered(vocab: usize) -> Tensor {
    let tall: Vec<usize> = (0..TALL as u64).map(|i| (hash(100, i) % vocab as u64) as usize).collect();
    let each = 1.0 / (BULK as f64).sqrt();
    Tensor::from_fn(DType::BF16, vocab, TALL + BULK, |t, k| match tall.get(k) {
        Some(&tall) => f32::from(u8::from(tall == t)),
        None => (each * normal(102, (t * BULK + k) as u64)) as f32,
    })
}

/// Returns hidden states for logits as in the benchmark: a few tokens far above a Gaussian bulk of standard deviation
/// 2. The bulk has 6 to 80 percent of the mass, depending on the row.
pub(super) fn like_a_models(rows: usize, seed: u64) -> Tensor {
    const PEAKS: [f32; 4] = [16.0, 14.0, 19.0, 12.0];
    const BELOW: [f32; 6] = [0.0, 0.9, 1.7, 2.4, 3.3, 4.5];
    Tensor::from_fn(DType::BF16, rows, TALL + BULK, |r, k| {
        let first = hash(seed, r as u64) as usize % TALL;
        let place = (0..BELOW.len()).find(|i| (first + 11 * i) % TALL == k);
        match place {
            Some(i) => PEAKS[r % PEAKS.len()] - BELOW[i],
            None if k < TALL => 0.0,
            None => (2.0 * normal(seed, (r * BULK + k) as u64)) as f32,
        }
    })
}

/// Counts undecided rows as the benchmark does. The control has rows of equal logits, which no list can decide.
#[test]
fn rows_like_a_models_are_decided_in_one_pass() {
    let Some(device) = Gpu::TILED.device() else { return };
    const VOCAB: usize = 151_936;
    const ROWS: usize = 256;
    let base = RowParams { seed: 101, ..RowParams::default() };
    let cases = [
        ("min_p 0.05", RowParams { min_p: 0.05, ..base }, true),
        ("top_k 20", RowParams { top_k: 20, ..base }, true),
        ("top_k 50, top_p 0.9", RowParams { top_k: 50, top_p: 0.9, ..base }, true),
        ("top_p 0.95", RowParams { top_p: 0.95, ..base }, false),
    ];
    let weight = scattered(VOCAB);
    let plan = Plan { max_rows: ROWS, ..Plan::default() };
    let decided = |draws: &[abi::Draw]| draws.iter().filter(|draw| draw.status == abi::status::DRAWN).count();
    let (mut counts, mut onces) = ([[0; 2]; 4], [0; 4]);
    let mut wrong = Vec::new();
    let sets = 4;
    for set in 0..sets {
        let problem = Problem::new(weight.clone(), like_a_models(ROWS, 103 + set));
        let (mut host, mut want) = (CudaTiled::new(problem.head(), plan, &device).unwrap(), Samples::new());
        let mut calls = DeviceCalls::new(&problem, KernelChoice::Fastest);
        for (((what, row, is_listed), counts), once) in cases.iter().zip(&mut counts).zip(&mut onces) {
            let rows: Vec<_> = (0..ROWS as u64).map(|r| RowParams { position: r + 1000 * set, ..*row }).collect();
            host.sample(problem.input(), &rows, &mut want).unwrap();
            *once += want.iter().filter(|row| row.is_ok_and(|row| row.passes == 1)).count();
            for (by_lists, count) in [false, true].into_iter().zip(counts) {
                calls.set(&rows);
                if (by_lists && !is_listed) || !calls.launch(by_lists).unwrap() {
                    continue;
                }
                let draws = calls.draws();
                *count += decided(&draws);
                for (r, (draw, want)) in draws.iter().zip(want.iter()).enumerate() {
                    let want = want.unwrap().draws[0];
                    let same = (draw.token, draw.score.to_bits()) == (want.token, want.score.to_bits());
                    if draw.status == abi::status::DRAWN && !same {
                        wrong.push(format!("{what}, by lists {by_lists}, set {set}, row {r}: {draw:?}, not {want:?}"));
                    }
                }
            }
        }
    }
    let hopper = device.capability() == (9, 0);
    for (((what, _, is_listed), [stored, listed]), once) in cases.iter().zip(counts).zip(onces) {
        let all = ROWS * sets as usize;
        println!(
            "{what}: of {all} rows stored logits decide {stored}, lists {listed}, the host sampler {once} in one pass"
        );
        let least = all * 99 / 100;
        let enough = once >= least && stored >= least && (listed >= least || !(hopper && *is_listed));
        if !enough {
            wrong.push(format!("{what}: of {all} rows stored logits decide {stored}, lists {listed}, the host sampler {once} in one pass"));
        }
    }
    // The control: lists of equal logits overflow and must not decide, so the host sampler counts further passes.
    let flat = Problem::new(weight.clone(), Tensor::from_fn(DType::BF16, 16, TALL + BULK, |_, _| 0.0));
    let (mut host, mut out) = (CudaTiled::new(flat.head(), plan, &device).unwrap(), Samples::new());
    host.sample(flat.input(), &[RowParams { min_p: 0.05, ..base }; 16], &mut out).unwrap();
    let repeated = out.iter().filter(|row| row.is_ok_and(|row| row.passes > 1)).count();
    if hopper && repeated < 16 {
        wrong.push(format!("the host sampler decided all but {repeated} of 16 rows of equal logits in one pass"));
    }
    let mut calls = DeviceCalls::new(&flat, KernelChoice::Fastest);
    for (what, row, _) in cases.iter().filter(|(.., is_listed)| *is_listed) {
        calls.set(&[*row; 16]);
        if calls.launch(true).unwrap() {
            let draws = calls.draws();
            let open = draws.iter().filter(|draw| draw.status == abi::status::UNDECIDED).count();
            println!("{what}: of 16 rows of equal logits lists leave {open} open");
            if open < 16 {
                wrong.push(format!("{what}: lists decide rows of equal logits: {draws:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong: {:#?}", wrong.len(), &wrong[..wrong.len().min(12)]);
}

/// The kind of launch with filters.
#[derive(Clone, Copy, Debug, PartialEq)]
enum LaunchKind {
    Stored,
    Listed,
    /// Rows known to have top-p alone; on Hopper, by block maxima.
    Known,
}

/// Captures a graph of each kind of launch after `prepare` and before any launch. Replays use new positions and
/// filters.
#[test]
fn captured_calls_with_filters_have_the_reference_bits() {
    let Some(device) = Gpu::TILED.device() else { return };
    let hopper = device.capability() == (9, 0);
    // Each of these row counts has its own kernel, compiled at first use.
    for count in [7, 20] {
        for choice in &CHOICES[..2] {
            for kind in [LaunchKind::Stored, LaunchKind::Listed, LaunchKind::Known] {
                if kind != LaunchKind::Listed || (hopper && *choice == KernelChoice::Fastest) {
                    captured_calls(count, *choice, kind);
                }
            }
        }
    }
}

fn captured_calls(count: usize, choice: KernelChoice, kind: LaunchKind) {
    let mut problem = Problem::integers(Size::new(count, 6_007, 72), DType::BF16, DType::BF16, 105);
    let base = RowParams { seed: 106, temperature: 3.0, ..RowParams::default() };
    let (greedy, top_p) = (RowParams { temperature: 0.0, ..base }, |top_p| RowParams { top_p, ..base });
    let kinds = match kind {
        LaunchKind::Known => vec![base, top_p(0.95), greedy, top_p(0.5), top_p(0.05)],
        LaunchKind::Stored | LaunchKind::Listed => vec![
            base,
            RowParams { min_p: 0.05, ..base },
            top_p(0.95),
            greedy,
            RowParams { top_k: 20, ..base },
            RowParams { top_k: 50, top_p: 0.9, ..base },
            RowParams { top_p: 0.5, min_p: 0.001, ..base },
        ],
    };
    // Block maxima are maxima of raw logits, so they need a head without a transform.
    problem.scale = (kind != LaunchKind::Known).then_some(2.0);
    let rows = |replay: usize| -> Vec<_> {
        let row = |r: usize| RowParams { position: replay as u64, ..kinds[(r + replay) % kinds.len()] };
        (0..count).map(row).collect()
    };
    let plan = Plan { max_rows: count, ..Plan::default() };
    let mut reference = Reference::new(problem.head(), plan, ReferenceVariant::Tiled);
    let mut want = Samples::new();
    let mut calls = DeviceCalls::new(&problem, choice);
    calls.filters.prepare(&mut calls.sampler).unwrap();
    calls.set(&rows(0));
    let stream = calls.at.stream.clone();
    stream.synchronize().unwrap();
    let graph = captured(&stream, || match kind {
        LaunchKind::Known => calls.launch_known(),
        _ => calls.launch(kind == LaunchKind::Listed).map(|is_one| assert!(is_one, "{choice:?}")),
    });
    let (mut decided, mut tokens) = (0, Vec::new());
    for replay in 0..5 {
        let rows = rows(replay);
        calls.set(&rows);
        graph.launch().unwrap();
        let draws = calls.draws();
        reference.sample(problem.input(), &rows, &mut want).unwrap();
        for (r, (draw, want)) in draws.iter().zip(want.iter()).enumerate() {
            let what = format!("{choice:?}, {kind:?}, {count} rows, replay {replay}, row {r}");
            if draw.status == abi::status::UNDECIDED {
                assert!(rows[r].enabled() != Knobs::NONE, "{what}: open without filters");
                continue;
            }
            let want = want.unwrap().draws[0];
            let found = (draw.status, draw.token, draw.score.to_bits());
            assert_eq!(found, (abi::status::DRAWN, want.token, want.score.to_bits()), "{what}");
            decided += usize::from(rows[r].enabled() != Knobs::NONE);
        }
        tokens.push(draws[0].token);
    }
    println!("{choice:?}, {kind:?}: {decided} of {} rows were decided", 5 * count);
    let least = if kind == LaunchKind::Listed { count } else { 2 * count };
    assert!(decided >= least, "{choice:?}, {kind:?}: {decided} of {} rows", 5 * count);
    tokens.dedup();
    assert!(tokens.len() > 1, "every replay drew {tokens:?}");
}

/// Adds bytes to an address, and casts it to the type of a call.
fn within<T, U>(address: DeviceAddress<T>, bytes: u64) -> DeviceAddress<U> {
    DeviceAddress::new(address.get() + bytes)
}

/// A launch with these addresses would break every later call on the GPU.
#[test]
fn addresses_within_an_element_are_layout_errors() {
    let Some(_) = Gpu::TILED.device() else { return };
    let problem = Problem::integers(Size::new(3, 700, 64), DType::BF16, DType::BF16, 107);
    let mut calls = DeviceCalls::new(&problem, KernelChoice::Fastest);
    calls.set(&[RowParams { top_k: 5, ..RowParams::default() }; 3]);
    let (rows, filters, draws) = (calls.at.rows_at, calls.filters_at, calls.at.draws_at);
    let stream = calls.at.stream.clone();
    let logits = stream.alloc_zeros::<f32>(3 * 700).unwrap();
    let matrix = DeviceMatrix {
        address: DeviceAddress::of(&logits, &stream).cast(),
        dtype: DType::F32,
        rows: 3,
        cols: 700,
        row_stride: 700,
    };
    let mut standalone = DeviceStandalone::new(0..700, DType::F32, 3, &calls.at.device).unwrap();
    let existing = DeviceDraws { count: 3, rows, sources: None, draws };
    let (sampler, selection, hidden) = (&mut calls.sampler, &mut calls.filters, &calls.at.hidden);
    let all = FilterKinds::ALL;
    // SAFETY: each call is refused, so nothing is launched.
    let refused = unsafe {
        [
            ("rows", sampler.launch(&stream, hidden, within(rows, 4), draws, RowFeatures::Bare)),
            ("draws", sampler.launch(&stream, hidden, rows, within(draws, 2), RowFeatures::Any)),
            ("rows", sampler.launch_storing(&stream, hidden, within(rows, 1), draws, matrix.address.cast(), 700)),
            ("log Z", sampler.launch_with_log_z(&stream, hidden, rows, draws, within(draws, 4), RowFeatures::Bare)),
            ("log Z", sampler.launch_with_log_z(&stream, hidden, rows, draws, within(draws, 4), RowFeatures::Any)),
            (
                "draws",
                sampler.launch_with_log_z(&stream, hidden, rows, within(draws, 1), draws.cast(), RowFeatures::Any),
            ),
            ("filters", selection.launch(&stream, sampler, hidden, (rows, within(filters, 4)), draws, all)),
            ("rows", selection.launch(&stream, sampler, hidden, (within(rows, 4), filters), draws, all)),
            ("filters", selection.launch_listed(&stream, sampler, hidden, (rows, within(filters, 4)), draws).map(drop)),
            ("rows", standalone.launch(&stream, &matrix, &DeviceDraws { rows: within(rows, 4), ..existing })),
            (
                "sources",
                standalone.launch(&stream, &matrix, &DeviceDraws { sources: Some(within(rows, 2)), ..existing }),
            ),
        ]
    };
    for (i, (what, refused)) in refused.into_iter().enumerate() {
        let named = matches!(refused, Err(CudaError::Layout { what: found, .. }) if found == what);
        assert!(named, "call {i}: {refused:?}, not a layout error of {what}");
    }
    // The GPU still works.
    assert!(calls.launch(false).unwrap());
    assert!(calls.draws().iter().all(|draw| draw.status == abi::status::DRAWN));
}
