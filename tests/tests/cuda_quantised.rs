//! The suite on the CUDA backend over quantised weights, and tests of these weights only.

mod backends;

use backends::gpu::{CHOICES, Gpu};
use backends::gpu_rows::rows;
use backends::quantised::Quantised;
use backends::{GROUP, assert_same};
use flash_sampling_conformance::{SamplerFactory, suite};
use flash_sampling_core::backend::canonical::{canonical_dot, dot_error_bound, norm};
use flash_sampling_core::reference::Reference;
use flash_sampling_core::{DType, Domain, Head, Matrix, Noise, PerturbedArgmax, Plan, RowParams, Samples, bf16, f16};
use flash_sampling_cuda::{
    CudaError, DeviceAddress, DeviceHead, DeviceMatrix, DeviceScales, DeviceTiled, KernelChoice,
};

suite!(tiled_q8_0, Quantised::new(Gpu::TILED, DType::Q8_0));
suite!(tiled_q6_k, Quantised::new(Gpu::TILED, DType::Q6_K));
suite!(tiled_i8, Quantised::new(Gpu::TILED, DType::I8));
suite!(tiled_f8, Quantised::new(Gpu::TILED, DType::F8_E4M3));

/// The types of quantised weights.
fn types() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| !dtype.is_float())
}

/// Returns word `i` of the input stream.
fn input(i: usize) -> u32 {
    Noise::new(11, 13).unwrap().word(Domain::Generator, 2, i as u32)
}

/// A quantised weight `[vocab, cols]` with random codes, and hidden states in float32.
struct Case {
    dtype: DType,
    vocab: usize,
    cols: usize,
    bytes: Vec<u8>,
    /// The scales, and rows and columns of their blocks.
    scales: Option<(Vec<f32>, [usize; 2])>,
    hidden: Vec<f32>,
}

impl Case {
    /// With `sums_are_exact`, factors are powers of two and hidden states small, so that every order of a sum gives the
    /// same float32.
    fn new(dtype: DType, [rows, vocab, cols]: [usize; 3], block: Option<[usize; 2]>, sums_are_exact: bool) -> Case {
        let at = dtype.code() as usize * 10_000_000;
        let mut bytes: Vec<u8> = (0..dtype.bytes(vocab * cols).unwrap()).map(|i| input(at + i) as u8).collect();
        // An f16 in a band of exponents below `log`.
        let half = |log: i32, i: usize| match sums_are_exact {
            true => f16::from_f32(2f32.powi(log)),
            false => f16::from_f32(2f32.powi(log) * (1.0 + input(at + i) as f32 * 2f32.powi(-32))),
        };
        for (i, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
            let mut set = |at: usize, log| block[at..at + 2].copy_from_slice(&half(log, i).to_le_bytes());
            match dtype {
                DType::Q8_0 | DType::IQ4_NL => set(0, -9),
                DType::Q4_0 => set(0, -5),
                DType::Q6_K => set(208, -14),
                DType::Q4_K => [(0, -12), (2, -8)].into_iter().for_each(|(at, log)| set(at, log)),
                DType::Q5_K => [(0, -13), (2, -8)].into_iter().for_each(|(at, log)| set(at, log)),
                DType::MXFP4 => block[0] = 124,
                // From 2^-2 to 2^2, of both signs.
                DType::F8_E4M3 => block[0] = block[0] & 0x80 | (0x28 + block[0] % 32),
                _ => {}
            }
        }
        let scales = block.map(|block| {
            let count = vocab.div_ceil(block[0]) * cols.div_ceil(block[1]);
            let log = if dtype == DType::I8 { -10 } else { -5 };
            let scale = |i: usize| match sums_are_exact {
                true => 2f32.powi(log + (input(i) % 3) as i32),
                false => 2f32.powi(log) * (1.0 + input(i) as f32 * 2f32.powi(-32)),
            };
            ((0..count).map(scale).collect(), block)
        });
        let state = |i: usize| match sums_are_exact {
            true => (input(at + 5_000_000 + i) % 5) as f32 * 0.5 - 1.0,
            false => bf16::from_f32(input(at + 5_000_000 + i) as i32 as f32 * 2f32.powi(-31)).to_f32(),
        };
        let hidden = (0..rows * cols).map(state).collect();
        Case { dtype, vocab, cols, bytes, scales, hidden }
    }

    /// All types that have rows of this size; types with scales also with scales of rows, of some rows, of the whole
    /// weight, and of blocks.
    fn all(shape: [usize; 3], sums_are_exact: bool) -> impl Iterator<Item = Case> {
        let fits = move |dtype: &DType| shape[2].is_multiple_of(256) || dtype.is_scaled();
        types().filter(fits).flat_map(move |dtype| {
            let blocks: &[Option<[usize; 2]>] = match dtype.is_scaled() {
                true => &[None, Some([1, 1 << 20]), Some([48, 1 << 20]), Some([1 << 20, 1 << 20]), Some([48, 64])],
                false => &[None],
            };
            blocks.iter().map(move |block| Case::new(dtype, shape, *block, sums_are_exact))
        })
    }

    fn weight(&self) -> Matrix<'_> {
        let weight = Matrix::from_bytes(&self.bytes, self.dtype, self.vocab, self.cols, self.cols).unwrap();
        match &self.scales {
            Some((scales, block)) => weight.with_scales(scales, *block).unwrap(),
            None => weight,
        }
    }

    /// The head; the weight's first rows are not drawn if it is a shard.
    fn head(&self, is_shard: bool) -> Head<'_> {
        match is_shard {
            // In the middle of a block of scales.
            true => Head::shard(self.weight().row_range(70..self.vocab), 70, self.vocab).unwrap(),
            false => Head::new(self.weight()).unwrap(),
        }
    }

    fn what(&self) -> String {
        format!("{} with scales of {:?}", self.dtype.name(), self.scales.as_ref().map(|(_, block)| block))
    }
}

/// The hidden states as a type.
enum States {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl States {
    fn all(hidden: &[f32]) -> [States; 3] {
        [
            States::F32(hidden.to_vec()),
            States::Bf16(hidden.iter().map(|h| bf16::from_f32(*h)).collect()),
            States::F16(hidden.iter().map(|h| f16::from_f32(*h)).collect()),
        ]
    }

    fn matrix(&self, cols: usize) -> Matrix<'_> {
        match self {
            States::F32(h) => Matrix::new(h, h.len() / cols, cols),
            States::Bf16(h) => Matrix::new(h, h.len() / cols, cols),
            States::F16(h) => Matrix::new(h, h.len() / cols, cols),
        }
        .unwrap()
    }
}

#[test]
fn every_type_draws_the_tokens_of_the_reference() {
    let Some(_) = Gpu::TILED.device() else { return };
    let variants = [
        Gpu::TILED,
        Gpu::Tiled(KernelChoice::PortableUnaligned),
        Gpu::Shared,
        Gpu::Grouped(GROUP),
        Gpu::Online(GROUP),
        Gpu::StreamedTiled,
        Gpu::StreamedOnline,
    ];
    // The first shapes are for all types; the others, for fp8 and int8, whose rows need not be whole blocks.
    for (count, cols) in [(1, 256), (7, 512), (70, 256), (200, 256), (20, 400), (50, 1040), (128, 272)] {
        for case in Case::all([count, 1030, cols], true) {
            for variant in variants {
                let is_streamed = matches!(variant, Gpu::StreamedTiled | Gpu::StreamedOnline);
                if is_streamed && case.scales.is_some() {
                    continue;
                }
                let head = case.head(!is_streamed && count == 7);
                // Stored logits come from the same kernel.
                let logprobs = matches!(variant, Gpu::Tiled(_) | Gpu::Shared).then_some(2);
                let plan = Plan { max_rows: count, max_draws: 3, max_logprobs: logprobs, ..Plan::default() };
                // Of 200 rows, all but one have log-probabilities, so the kernels store runs of 150 and 49 rows.
                let has_logprobs = |r: usize| if count == 200 { r != 150 } else { r.is_multiple_of(3) };
                let rows: Vec<RowParams<'_>> = rows(count)
                    .into_iter()
                    .enumerate()
                    .map(|(r, row)| RowParams { logprobs: logprobs.filter(|_| has_logprobs(r)), ..row })
                    .collect();
                let reference = variant.reference_variant(&head).unwrap();
                let (mut want, mut found) = (Samples::new(), Samples::new());
                let states = States::all(&case.hidden);
                Reference::new(head, plan, reference).sample(states[0].matrix(cols), &rows, &mut want).unwrap();
                let mut sampler = variant.build(head, plan).unwrap();
                for (states, hidden) in states.iter().zip(["f32", "bf16", "f16"]) {
                    sampler.sample(states.matrix(cols), &rows, &mut found).unwrap();
                    assert_same(&found, &want, &format!("{} by {}, {hidden}, {count}", case.what(), variant.name()));
                }
            }
        }
    }
}

#[test]
fn canonical_tokens_of_every_type_are_those_of_the_reference() {
    let Some(_) = Gpu::TILED.device() else { return };
    for case in Case::all([9, 1030, 256], false) {
        let plan = Plan { max_rows: 9, max_draws: 3, canonical: true, ..Plan::default() };
        let head = case.head(true);
        let reference = Gpu::TILED.reference_variant(&head).unwrap();
        for states in States::all(&case.hidden) {
            let (mut want, mut found) = (Samples::new(), Samples::new());
            Reference::new(head, plan, reference.clone()).sample(states.matrix(256), &rows(9), &mut want).unwrap();
            let mut sampler = Gpu::TILED.build(head, plan).unwrap();
            sampler.sample(states.matrix(256), &rows(9), &mut found).unwrap();
            assert_same(&found, &want, &case.what());
        }
    }
}

/// Compares the logits of greedy draws with canonical dot products. The mean error is not zero, so the sums are not the
/// canonical ones.
#[test]
fn logits_are_within_the_error_bound() {
    let Some(_) = Gpu::TILED.device() else { return };
    let (mut errors, mut count) = (0.0, 0);
    for case in Case::all([70, 300, 512], false) {
        let (head, weight) = (case.head(false), case.weight());
        let plan = Plan { max_rows: 70, ..Plan::default() };
        let rows = vec![RowParams { temperature: 0.0, ..RowParams::default() }; 70];
        for states in States::all(&case.hidden) {
            let input = states.matrix(512);
            let logits: Vec<Vec<(u32, u32)>> = CHOICES
                .into_iter()
                .map(|choice| {
                    let mut found = Samples::new();
                    Gpu::Tiled(choice).build(head, plan).unwrap().sample(input, &rows, &mut found).unwrap();
                    let drawn = |draw: flash_sampling_core::Draw| (draw.token, draw.logit.to_bits());
                    found.iter().map(|row| drawn(row.unwrap().draws[0])).collect()
                })
                .collect();
            assert!(logits.windows(2).all(|pair| pair[0] == pair[1]), "{}: kernels differ", case.what());
            let (mut w, mut rounded, mut h) = (vec![0.0f64; 512], vec![0.0; 512], vec![0.0; 512]);
            for (r, (token, logit)) in logits[0].iter().enumerate() {
                weight.row_to_f64(*token as usize, &mut w);
                weight.row_to_f32(*token as usize, &mut rounded);
                input.row_to_f32(r, &mut h);
                let canonical = canonical_dot(&w, &h);
                let (error, bound) = (
                    (f64::from(f32::from_bits(*logit)) - canonical).abs(),
                    dot_error_bound(513, norm(&rounded), norm(&h)),
                );
                assert!(error <= bound, "{}: {error:e} > {bound:e}", case.what());
                (errors, count) = (errors + error / bound, count + 1);
            }
        }
    }
    println!("mean error {:.1e} of the bound, {count} logits", errors / f64::from(count));
    assert!(errors > 0.0);
}

/// The sums of real inputs depend on their order. A row of fp8 or int8 has the same bits in batches of every size, by all
/// kernels. With hidden states of a `wide` range, which f16 cannot hold, the Hopper kernel multiplies in bf16.
#[test]
fn rows_with_scales_have_the_same_draws_in_every_batch() {
    let Some(_) = Gpu::TILED.device() else { return };
    const ROWS: usize = 200;
    // With few tokens, a block of the Hopper kernel has a single tile of 16 tokens. With many tokens, it has several tiles,
    // and every warpgroup has tokens.
    let shapes = [[1030, 1040], [60_011, 144]];
    let cases = [DType::F8_E4M3, DType::I8].into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape)));
    for ((dtype, [vocab, cols]), wide) in cases.flat_map(|case| [(case, false), (case, true)]) {
        let mut case = Case::new(dtype, [ROWS, vocab, cols], Some([1, cols]), false);
        if wide {
            // The smaller batches do not have this row.
            let row = &mut case.hidden[(ROWS - 30) * cols..];
            row[..2].copy_from_slice(&[2f32.powi(20), 2f32.powi(-30)]);
        }
        let hidden = States::all(&case.hidden).into_iter().nth(1).unwrap();
        let rows: Vec<_> = rows(ROWS).into_iter().map(|row| RowParams { logprobs: None, ..row }).collect();
        let plan = Plan { max_rows: ROWS, max_draws: 3, ..Plan::default() };
        let [mut all, mut some] = [Samples::new(), Samples::new()];
        Gpu::TILED.build(case.head(false), plan).unwrap().sample(hidden.matrix(cols), &rows, &mut all).unwrap();
        for choice in CHOICES {
            let mut sampler = Gpu::Tiled(choice).build(case.head(false), plan).unwrap();
            for count in [1, 8, 20, 50, 100, 128, 129] {
                let range = ROWS - count..ROWS;
                let states = hidden.matrix(cols).row_range(range.clone());
                sampler.sample(states, &rows[range.clone()], &mut some).unwrap();
                for (r, at) in range.enumerate() {
                    let (found, want) = (some.row(r), all.row(at));
                    let [found, want] = [found, want].map(|row| row.unwrap().draws.to_vec());
                    let bits =
                        |draw: &flash_sampling_core::Draw| (draw.token, draw.score.to_bits(), draw.logit.to_bits());
                    let is_same = found.iter().map(bits).eq(want.iter().map(bits));
                    assert!(is_same, "row {at} of {count}, {vocab} tokens of {dtype:?}, {choice:?}, wide {wide}");
                }
            }
        }
    }
}

/// The first element of the hidden state of rows 0 and 1 multiplies only zeros, so the logits depend on elements that f16
/// cannot hold, or holds as subnormal numbers.
#[test]
fn hidden_states_of_a_wide_range_have_the_same_draws_in_every_batch() {
    let Some(_) = Gpu::TILED.device() else { return };
    const ROWS: usize = 40;
    const COLS: usize = 272;
    for dtype in [DType::F8_E4M3, DType::I8] {
        let mut case = Case::new(dtype, [ROWS, 600, COLS], Some([1, COLS]), false);
        // In fp8: 0, 256, and 2^-8.
        case.bytes.chunks_exact_mut(COLS).for_each(|token| token[..3].copy_from_slice(&[0, 0x78, 0x02]));
        let small = 2f32.powi(-32);
        let wide = [[1.0, small, small * (1.0 + 2f32.powi(-7))], [1.0, 2f32.powi(-45), 0.0]];
        case.hidden[..2 * COLS].fill(0.0);
        for (row, elements) in case.hidden.chunks_exact_mut(COLS).zip(wide) {
            row[..3].copy_from_slice(&elements);
        }
        let hidden = States::all(&case.hidden).into_iter().nth(1).unwrap();
        let rows: Vec<_> = (0..ROWS as u64)
            .map(|r| RowParams { seed: r, temperature: if r < 2 { 0.0 } else { 0.7 }, ..RowParams::default() })
            .collect();
        let plan = Plan { max_rows: ROWS, ..Plan::default() };
        let sample = |choice, range: core::ops::Range<usize>| {
            let mut found = Samples::new();
            let mut sampler = Gpu::Tiled(choice).build(case.head(false), plan).unwrap();
            sampler.sample(hidden.matrix(COLS).row_range(range.clone()), &rows[range], &mut found).unwrap();
            let bits = |draw: flash_sampling_core::Draw| (draw.token, draw.score.to_bits(), draw.logit.to_bits());
            found.iter().map(|row| bits(row.unwrap().draws[0])).collect::<Vec<_>>()
        };
        let want = sample(CHOICES[0], 0..ROWS);
        assert!(want[..2].iter().all(|(_, _, logit)| *logit != 0), "{dtype:?}: an element is lost");
        for choice in CHOICES {
            for range in [0..1, 1..2, 0..ROWS, 2..ROWS] {
                assert_eq!(sample(choice, range.clone()), want[range.clone()], "{dtype:?}, {choice:?}, rows {range:?}");
            }
        }
    }
}

#[test]
fn a_bad_scale_is_an_error_of_the_rows() {
    let Some(_) = Gpu::TILED.device() else { return };
    // Products of an infinite scale have both signs, so their sum is NaN.
    let nan = types().filter(|dtype| *dtype != DType::MXFP4).map(|dtype| (dtype, f32::NAN));
    for (dtype, scale) in nan.chain([(DType::F8_E4M3, f32::INFINITY)]) {
        let mut case = Case::new(dtype, [3, 300, 256], dtype.is_scaled().then_some([1, 256]), true);
        match dtype {
            DType::I8 | DType::F8_E4M3 => case.scales.as_mut().unwrap().0[77] = scale,
            _ => {
                let at = 77 * dtype.bytes(256).unwrap() + if dtype == DType::Q6_K { 208 } else { 0 };
                case.bytes[at..at + 2].copy_from_slice(&f16::NAN.to_le_bytes());
            }
        }
        let plan = Plan { max_rows: 3, ..Plan::default() };
        let states = States::all(&case.hidden);
        let mut found = Samples::new();
        let mut sampler = Gpu::TILED.build(case.head(false), plan).unwrap();
        let rows = [RowParams::default(); 3];
        sampler.sample(states[1].matrix(256), &rows, &mut found).unwrap();
        for row in found.iter() {
            assert_eq!(row.err(), Some(flash_sampling_core::RowError::NaN { token: 77 }), "{}", case.what());
        }
    }
}

#[test]
fn heads_in_device_memory_that_do_not_fit_are_refused() {
    let Some((device, stream)) = Gpu::TILED.with_stream() else { return };
    let memory = stream.clone_htod(&vec![0u8; 300 * 210]).unwrap();
    let address = DeviceAddress::of(&memory, &stream);
    stream.synchronize().unwrap();
    let weight = DeviceMatrix { address, dtype: DType::Q6_K, rows: 300, cols: 256, row_stride: 256 };
    let head = DeviceHead::of(weight);
    let scales = DeviceScales { address: address.cast(), block: [300, 256], row_of_block: 0 };
    let plan = |head| {
        // SAFETY: the weight outlives the sampler, which is not used.
        unsafe { DeviceTiled::new(head, 2, &device) }.err()
    };
    assert_eq!(plan(head), None);
    let bytes = DeviceMatrix { dtype: DType::I8, ..weight };
    assert_eq!(plan(DeviceHead { weight: bytes, scales: Some(scales), ..head }), None);
    for weight in [
        DeviceMatrix { address: address.add(1), ..weight },
        DeviceMatrix { cols: 128, ..weight },
        DeviceMatrix { row_stride: 300, ..weight },
    ] {
        let found = plan(DeviceHead { weight, ..head });
        assert!(matches!(found, Some(CudaError::Layout { what: "weight", .. })), "{weight:?}: {found:?}");
    }
    for (weight, scales) in [
        (weight, scales),
        (bytes, DeviceScales { block: [0, 256], ..scales }),
        (bytes, DeviceScales { address: address.add(2).cast(), ..scales }),
    ] {
        let found = plan(DeviceHead { weight, scales: Some(scales), ..head });
        assert!(matches!(found, Some(CudaError::Layout { what: "scales", .. })), "{scales:?}: {found:?}");
    }
}
