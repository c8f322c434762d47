//! Runs the kernels over quantised weights on the processor (kernels/tests/quantised_weights.cpp), and compares weights, products
//! and canonical logits with the core's.

use crate::emulated::{self, Input, Output};
use flash_sampling_core::backend::canonical::{canonical_dot, canonical_logit, dot_error_bound, norm};
use flash_sampling_core::{DType, Domain, Head, Matrix, Noise};

/// Returns word `i` of the input stream.
fn input(i: usize) -> u32 {
    Noise::new(7, 9).unwrap().word(Domain::Generator, 1, i as u32)
}

/// A quantised weight, with gaps between its rows, and hidden states.
struct Case {
    dtype: DType,
    tokens: usize,
    cols: usize,
    stride: usize,
    bytes: Vec<u8>,
    /// Scales of a larger matrix, rows and columns of a block, and the weight's first row in this matrix.
    scales: Option<(Vec<f32>, [usize; 2], usize)>,
    hidden: Vec<f32>,
    first_token: u32,
}

/// The places of the f16 scales in a block.
fn halves(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::IQ4_NL => &[0],
        DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q6_K => &[208],
        _ => &[],
    }
}

impl Case {
    /// A weight of random codes. With `any`, scales have any bits, also those of infinities and NaN.
    fn new(dtype: DType, tokens: usize, cols: usize, rows: usize, any: bool) -> Case {
        let at = dtype.code() as usize * 1_000_000 + cols * 1000;
        let stride = cols + 2 * dtype.block_elements();
        let mut bytes: Vec<u8> = (0..dtype.bytes(tokens * stride).unwrap()).map(|i| input(at + i) as u8).collect();
        if !any {
            for (i, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
                for half in halves(dtype) {
                    // From 2^-7 to 2^-3, of both signs.
                    let bits = (input(at + 3 * i + half) as u16 & 0x8fff) + 0x2000;
                    block[*half..half + 2].copy_from_slice(&bits.to_le_bytes());
                }
                match dtype {
                    DType::MXFP4 => block[0] = 120 + block[0] % 8,
                    DType::F8_E4M3 if block[0] & 0x7f == 0x7f => block[0] = 0,
                    _ => {}
                }
            }
        }
        let float = |i: usize| input(at + i) as i32 as f32 * 2f32.powi(-31);
        let hidden = (0..rows * cols).map(|i| float(500_000 + i)).collect();
        Case { dtype, tokens, cols, stride, bytes, scales: None, hidden, first_token: 5 }
    }

    /// With scales of blocks, and the weight from row `first` of their matrix on.
    fn scaled(mut self, block: [usize; 2], first: usize) -> Case {
        let count = (first + self.tokens).div_ceil(block[0]) * self.cols.div_ceil(block[1]);
        self.scales = Some(((0..count).map(|i| (input(i) % 1999 + 1) as f32 / 1024.0).collect(), block, first));
        self
    }

    /// Calls `run` with the weight.
    fn with_weight<R>(&self, run: impl FnOnce(Matrix<'_>) -> R) -> R {
        let Some((scales, block, first)) = &self.scales else {
            return run(Matrix::from_bytes(&self.bytes, self.dtype, self.tokens, self.cols, self.stride).unwrap());
        };
        let before = vec![0; self.dtype.bytes(first * self.stride).unwrap()];
        let bytes = [&before[..], &self.bytes].concat();
        let rows = first + self.tokens;
        let whole = Matrix::from_bytes(&bytes, self.dtype, rows, self.cols, self.stride).unwrap();
        run(whole.with_scales(scales, *block).unwrap().row_range(*first..rows))
    }

    fn write(&self, out: &mut Input) {
        self.with_weight(|weight| {
            let rows = self.hidden.len() / self.cols;
            let code = self.dtype.code() as usize;
            let header = [code, weight.row_stride_bytes(), self.tokens, self.cols, rows, self.first_token as usize];
            out.put(header.map(|number| number as u32));
            let scales = weight.scales();
            let [block_rows, block_cols] = scales.map_or([0, 1], |scales| scales.block());
            let first = scales.map_or(0, |scales| scales.row_of_block());
            let values = scales.map_or(&[][..], |scales| scales.values(self.tokens));
            let blocks = [block_rows, block_cols, self.cols.div_ceil(block_cols), first, values.len()];
            out.put(blocks.map(|number| number as u32));
            out.put_all(values.iter().copied());
        });
        out.put_all(self.bytes.iter().copied());
        out.put_all(self.hidden.iter().copied());
    }
}

/// Asserts that numbers have the same bits; NaN has any.
#[track_caller]
fn assert_same(found: f64, want: f64, what: impl Fn() -> String) {
    let is_same = found.to_bits() == want.to_bits() || found.is_nan() && want.is_nan();
    assert!(is_same, "{}: {found:e}, not {want:e}", what());
}

fn check(case: &Case, found: &mut Output) {
    let (tokens, cols) = (case.tokens, case.cols);
    let what = |t: usize, k: usize| format!("{:?} of {cols} columns, token {t}, {k}", case.dtype);
    case.with_weight(|weight| {
        let (mut rounded, mut exact) = (vec![vec![0.0f32; cols]; tokens], vec![vec![0.0f64; cols]; tokens]);
        for t in 0..tokens {
            weight.row_to_f32(t, &mut rounded[t]);
            weight.row_to_f64(t, &mut exact[t]);
            for k in 0..cols {
                assert_same(found.take::<f32>().into(), rounded[t][k].into(), || what(t, k));
                assert_same(found.take(), exact[t][k], || what(t, k));
            }
        }
        for _columns in [8, 64] {
            for (r, hidden) in case.hidden.chunks_exact(cols).enumerate() {
                for t in 0..tokens {
                    // The kernel's order: ascending, by fused multiply-adds.
                    let want = rounded[t].iter().zip(hidden).fold(0.0f32, |sum, (w, h)| w.mul_add(*h, sum));
                    let dot: f32 = found.take();
                    assert_same(dot.into(), want.into(), || what(t, r));
                    let canonical = canonical_dot(&exact[t], hidden);
                    let bound = dot_error_bound(cols + 1, norm(&rounded[t]), norm(hidden));
                    let error = (f64::from(dot) - canonical).abs();
                    assert!(error <= bound || !canonical.is_finite(), "{}: {error:e} > {bound:e}", what(t, r));
                }
            }
        }
        let start = case.first_token as usize;
        let head = Head::shard(weight, start, start + tokens).unwrap();
        let mut scratch = vec![0.0; cols];
        for (r, hidden) in case.hidden.chunks_exact(cols).enumerate() {
            for t in 0..tokens {
                let want = canonical_logit(&head, case.first_token + t as u32, hidden, &mut scratch);
                // The sampler refuses rows with other logits before it looks for near ties.
                let logit: f32 = found.take();
                if want.is_finite() {
                    assert_same(logit.into(), want.into(), || what(t, r));
                }
            }
        }
    });
}

fn answers(cases: &[Case]) {
    let Some(program) = emulated::program("quantised_weights") else { return };
    let mut input = Input::default();
    input.put(cases.len() as u32);
    cases.iter().for_each(|case| case.write(&mut input));
    let mut found = emulated::answer(&program, input);
    cases.iter().for_each(|case| check(case, &mut found));
    assert!(found.is_empty());
}

#[test]
fn weights_products_and_canonical_logits_have_the_bits_of_the_core() {
    let quantised = || DType::ALL.into_iter().filter(|dtype| !dtype.is_float());
    let mut cases: Vec<Case> = Vec::new();
    for dtype in quantised() {
        let block = dtype.block_elements().max(8);
        // Any bits; then finite weights, of several tiles and parts of rows.
        cases.push(Case::new(dtype, 40, 2 * block.max(32), 1, true));
        cases.push(Case::new(dtype, 150, block, 3, false));
        cases.push(Case::new(dtype, 35, 3 * block, 9, false));
    }
    for dtype in [DType::I8, DType::F8_E4M3] {
        cases.push(Case::new(dtype, 37, 43, 2, false).scaled([1, 43], 0));
        cases.push(Case::new(dtype, 37, 40, 2, false).scaled([1000, 1000], 0));
        cases.push(Case::new(dtype, 37, 70, 2, false).scaled([16, 32], 21));
    }
    answers(&cases);
}
