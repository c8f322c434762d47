//! Tests of all kernels of upper bounds, and of draws with them.

use super::digits::{DigitLayout, Digits};
use super::{Kernel, UpperBounds, multiply_blocks, plain};
use crate::dot::tests::bytes;
use crate::dot::{Dot, DotScratch, TILE};
use crate::isa::Isa;
use crate::options::{CpuOptions, Threads};
use crate::variants::Tiled;
use core::ops::Range;
use flash_sampling_core::backend::canonical::{canonical_dot, norm};
use flash_sampling_core::backend::{ShadowBound, hidden_digits};
use flash_sampling_core::{
    DType, Draw, Head, History, Matrix, Order, PerturbedArgmax, Plan, RowParams, Samples, Shadow, ShadowBuffer, bf16,
};

const VOCAB: usize = 3000;
const COLS: usize = 96;

/// A number in [-1, 1), from an index.
fn noise(i: usize) -> f32 {
    let mut x = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Weights `[VOCAB, COLS]` of several kinds, each with a name.
fn heads() -> Vec<(&'static str, Vec<f32>)> {
    let each = |f: &dyn Fn(usize, usize) -> f32| (0..VOCAB * COLS).map(|i| f(i / COLS, i % COLS)).collect();
    let plain = |v: usize, k: usize| noise(v * COLS + k);
    vec![
        ("plain", each(&plain)),
        ("peaked", each(&|v, k| plain(v, k) * if v == 77 { 6.0 } else { 1.0 })),
        ("norms", each(&|v, k| plain(v, k) * 4f32.powi((v % 31) as i32 - 28))),
        ("one huge row", each(&|v, k| plain(v, k) * if v == 1234 { 1e5 } else { 1.0 })),
        ("one large column", each(&|v, k| if k == 5 { 40.0 + plain(v, k) } else { plain(v, k) })),
        ("ties", each(&|v, k| (3.0 * plain(v % 7, k)).round())),
        ("zeros", each(&|v, k| if v % 3 == 0 { 0.0 } else { plain(v, k) })),
        ("subnormal", each(&|v, k| plain(v, k) * 1e-38)),
        ("NaN", each(&|v, k| if v == 2000 && k == 3 { f32::NAN } else { plain(v, k) })),
        ("infinity", each(&|v, k| if v == 5 && k == 7 { f32::NEG_INFINITY } else { plain(v, k) })),
        ("near overflow", each(&|v, k| plain(v, k) * 1e37)),
    ]
}

fn hidden(rows: usize, cols: usize, salt: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| 2.0 * noise(i + 999_983 * (1 + salt)) * if i % cols == 11 { 8.0 } else { 1.0 }).collect()
}

/// The masks, biases and tokens of rows.
struct Lists {
    mask: Vec<u32>,
    /// A mask that allows five tokens.
    few: Vec<u32>,
    bias: [(u32, f32); 3],
    history: History,
}

impl Lists {
    fn new() -> Self {
        let mask = (0..VOCAB.div_ceil(32) as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
        let mut few = vec![0; VOCAB.div_ceil(32)];
        [77, 78, 900, 2047, 2999usize].iter().for_each(|token| few[token / 32] |= 1 << (token % 32));
        let history = History::new(&(0..400).map(|i| i * i % 2903).collect::<Vec<u32>>());
        Lists { mask, few, bias: [(3, 2.5), (77, -4.0), (2999, f32::NEG_INFINITY)], history }
    }
}

/// The kinds of rows without filters, with a top-k as the first filter, and with a min-p as the first filter. The last
/// kind of all has only a top-p, which needs the mass of all tokens.
const PLAIN: Range<usize> = 0..6;
const TOP_K: Range<usize> = 6..18;
const MIN_P: Range<usize> = 18..26;
const KINDS: Range<usize> = 0..27;

/// Changes a row to a kind of [`KINDS`].
fn kind<'a>(kind: usize, lists: &'a Lists, row: RowParams<'a>) -> RowParams<'a> {
    let mask = Some(&lists.mask[..]);
    let few = Some(&lists.few[..]);
    match kind {
        0 => row,
        1 => RowParams { temperature: 0.0, ..row },
        2 => RowParams { temperature: 0.3, mask, ..row },
        3 => RowParams { temperature: 1.7, draws: 3, ..row },
        4 => RowParams { logit_bias: &lists.bias, banned: &[77, 1500], ..row },
        5 => RowParams { temperature: 1e-38, ..row },
        6 => RowParams { top_k: 20, ..row },
        7 => RowParams { top_k: 50, top_p: 0.9, ..row },
        8 => RowParams { top_k: 3, draws: 3, temperature: 0.3, mask, ..row },
        9 => RowParams {
            top_k: 5,
            history: Some(&lists.history),
            repetition_penalty: 1.3,
            frequency_penalty: 0.2,
            ..row
        },
        // These rows have fewer finite logits than `top_k`.
        10 => RowParams { top_k: 9, mask: few, draws: 3, ..row },
        11 => RowParams { top_k: 1000, top_p: 0.5, mask: few, ..row },
        12 => RowParams { top_k: 4, without_replacement: true, draws: 3, logit_bias: &lists.bias, ..row },
        13 => RowParams { top_k: 12, kept: true, logprobs: Some(3), ranks: true, logprob_token_ids: &[5, 77], ..row },
        14 => RowParams { top_k: 7, min_p: 0.2, order: Order::LlamaCpp, temperature: 0.4, ..row },
        15 => RowParams { top_k: 30, typical_p: 0.7, epsilon_cutoff: 0.01, xtc_probability: 0.5, ..row },
        16 => RowParams { top_k: 1, banned: &[77, 1500], ..row },
        17 => RowParams { top_k: 8, temperature: 1e-38, ..row },
        18 => RowParams { min_p: 0.05, ..row },
        19 => RowParams { min_p: 0.3, draws: 3, temperature: 0.7, logit_bias: &lists.bias, ..row },
        20 => RowParams { min_p: 0.02, order: Order::LlamaCpp, temperature: 2.0, ..row },
        21 => RowParams { min_p: 0.1, top_k: 6, mask, ..row },
        22 => RowParams { min_p: 0.05, top_p: 0.8, ..row },
        23 => RowParams { min_p: 0.01, mask: few, draws: 3, ..row },
        24 => RowParams { min_p: 0.1, kept: true, logprobs: Some(2), ..row },
        25 => RowParams { min_p: 1.0, temperature: 0.5, ..row },
        _ => RowParams { top_p: 0.9, ..row },
    }
}

/// Compares the rows of `steps` calls of two samplers, with rows of these kinds. Returns the first difference.
fn compare(a: &mut Tiled<'_>, b: &mut Tiled<'_>, steps: u64, kinds: Range<usize>) -> Result<(), String> {
    let lists = Lists::new();
    let (mut out, mut expected) = (Samples::new(), Samples::new());
    for step in 0..steps {
        let rows = [1, 3, 6, 12, 17][step as usize % 5];
        let cols = a.shape().input;
        let floats = hidden(rows, cols, step as usize);
        let input = Matrix::new(&floats, rows, cols).unwrap();
        let of_row = |r: usize| {
            let row = RowParams { seed: 7 + r as u64, position: step, ..RowParams::default() };
            kind(kinds.start + (5 * r + step as usize) % kinds.len(), &lists, row)
        };
        let params: Vec<RowParams<'_>> = (0..rows).map(of_row).collect();
        a.sample(input, &params, &mut out).unwrap();
        b.sample(input, &params, &mut expected).unwrap();
        for (r, params) in params.iter().enumerate() {
            let bits = |samples: &Samples| {
                let bits = |draw: &Draw| (draw.token, draw.score.to_bits(), draw.logit.to_bits());
                samples.row(r).map(|row| row.draws.iter().map(bits).collect::<Vec<_>>())
            };
            let (found, expected_draws) = (bits(&out), bits(&expected));
            // The text of a row also contains kept tokens, log-probabilities, ranks and passes.
            let all = [&out, &expected].map(|samples| format!("{:?}", samples.row(r)));
            if found != expected_draws || all[0] != all[1] {
                return Err(format!("step {step}, row {r}, {params:?}: {} instead of {}", all[0], all[1]));
            }
        }
    }
    Ok(())
}

#[test]
fn draws_with_a_shadow_are_the_draws_without() {
    for isa in Isa::available() {
        for canonical in [false, true] {
            let options = CpuOptions { isa: Some(isa), threads: Some(2) };
            let plan = Plan { max_rows: 17, max_draws: 3, max_logprobs: (!canonical).then_some(3), canonical };
            for (name, floats) in heads() {
                let halves: Vec<bf16> = floats.iter().map(|&w| bf16::from_f32(w)).collect();
                for weight in [Matrix::new(&floats, VOCAB, COLS).unwrap(), Matrix::new(&halves, VOCAB, COLS).unwrap()] {
                    let buffer = ShadowBuffer::new(&weight).unwrap();
                    let mut head = Head::new(weight).unwrap();
                    if name == "peaked" {
                        head = head.with_soft_cap(3.0).unwrap().with_scale(1.5).unwrap();
                    }
                    let mut with = Tiled::new(head.with_shadow(buffer.shadow()).unwrap(), plan, &options).unwrap();
                    let mut without = Tiled::new(head, plan, &options).unwrap();
                    let outcome = compare(&mut with, &mut without, 30, KINDS);
                    assert!(outcome.is_ok(), "{name}, {isa}: {outcome:?}");
                }
            }
        }
    }
}

#[test]
fn draws_of_quantised_weights_are_the_draws_without_bounds() {
    let cols = 256;
    for isa in Isa::available() {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_elements() > 1) {
            let options = CpuOptions { isa: Some(isa), threads: Some(2) };
            let plan = Plan { max_rows: 17, max_draws: 3, max_logprobs: Some(3), ..Plan::default() };
            let weight = bytes(VOCAB, cols, 1, dtype, false);
            let head = Head::new(Matrix::from_bytes(&weight, dtype, VOCAB, cols, cols).unwrap()).unwrap();
            let sampler = || Tiled::new(head, plan, &options).unwrap();
            let (mut with, mut without) = (sampler(), sampler().without_bounds());
            let outcome = compare(&mut with, &mut without, 30, KINDS);
            assert!(outcome.is_ok(), "{dtype:?}, {isa}: {outcome:?}");
        }
    }
}

/// Calls `check` with each kernel that this machine has for a head, and with `hidden` in the kernel's layout.
fn for_each_kernel(
    head: &Head<'_>,
    hidden: &Matrix<'_>,
    mut check: impl FnMut(&UpperBounds, Kernel, &Digits, &mut DotScratch),
) {
    for isa in Isa::available() {
        let Some(mut bounds) = UpperBounds::new(head, isa, &Threads::One) else { continue };
        let scales = [0.0, bounds.coarsest, f32::INFINITY];
        for kernel in bounds.kernels.into_iter().flatten() {
            // Coarse digits may have any scale: the smallest one, the chosen one, or one without high digits.
            let count = if bounds.layout(head, kernel).skips_zeros() { scales.len() } else { 1 };
            for coarsest in &scales[..count] {
                bounds.coarsest = *coarsest;
                let mut digits = bounds.digits(hidden.rows(), head);
                assert!(bounds.pack_for(kernel, head, hidden, &mut digits));
                check(&bounds, kernel, &digits, &mut Dot::scratch(isa, head.weight().dtype(), hidden.rows()));
            }
        }
    }
}

#[test]
fn products_of_a_shadow_are_those_of_plain_rust() {
    for (vocab, cols, rows) in [(256, 4096, 1), (77, 100, 9), (33, 64, 64), (256, 1000, 17), (5, 63, 3), (64, 129, 40)]
    {
        let weight: Vec<f32> = (0..vocab * cols).map(noise).collect();
        let weight = Matrix::new(&weight, vocab, cols).unwrap();
        let buffer = ShadowBuffer::new(&weight).unwrap();
        let (shadow, floats) = (buffer.shadow(), hidden(rows, cols, 0));
        let head = Head::new(weight).unwrap().with_shadow(shadow).unwrap();
        let hidden = Matrix::new(&floats, rows, cols).unwrap();
        let mut digits = Digits::new(rows, cols, vec![DigitLayout::Groups]);
        digits.pack(DigitLayout::Groups, &hidden, 0.0, |norm, error| ShadowBound::new(cols, norm, error, 1.0));
        let mut want = vec![f32::NAN; rows * TILE];
        plain::portable(&shadow, &digits, &mut want);
        let check = |out: &[f32], name: &dyn core::fmt::Debug| {
            let is_same = out.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(is_same, "{name:?}, [{vocab}, {cols}], {rows}");
        };
        for_each_kernel(&head, &hidden, |bounds, kernel, digits, scratch| {
            let mut out = vec![f32::NAN; rows * TILE];
            bounds.multiply_shadow(&shadow, digits, &mut out, scratch);
            check(&out, &kernel);
        });
        #[cfg(target_arch = "x86_64")]
        {
            let mut digits = Digits::new(rows, cols, vec![DigitLayout::Panels]);
            digits.pack(DigitLayout::Panels, &hidden, 0.0, |norm, error| ShadowBound::new(cols, norm, error, 1.0));
            let codes: Vec<u8> = shadow.codes().iter().map(|code| *code as u8).collect();
            let (mut out, mut scratch) = (vec![f32::NAN; rows * TILE], DotScratch::default());
            let stride = flash_sampling_core::backend::code_stride(cols);
            super::multiply_panels(&codes, stride, &digits, &mut out, &mut scratch, |pairs, panels, integers, _| {
                crate::dot::amx::plain::integer_tile(pairs, panels, integers);
            });
            check(&out, &"tiles in plain Rust");
        }
    }
}

/// Compares the products of every kernel of blocks with products in float64.
#[test]
fn products_of_blocks_are_those_of_the_weights_and_the_digits() {
    for (dtype, vocab, cols) in DType::ALL.into_iter().flat_map(|dtype| [(dtype, 37, 512), (dtype, 5, 1280)]) {
        if dtype.block_elements() == 1 {
            continue;
        }
        let weight = bytes(vocab, cols, 5, dtype, false);
        let weight = Matrix::from_bytes(&weight, dtype, vocab, cols, cols).unwrap();
        let head = Head::new(weight).unwrap();
        for rows in [1, 2, 3, 8, 9, 33] {
            let floats = hidden(rows, cols, 0);
            for_each_kernel(&head, &Matrix::new(&floats, rows, cols).unwrap(), |_, kernel, digits, scratch| {
                let mut out = vec![f32::NAN; rows * TILE];
                multiply_blocks(&weight, digits, &mut out, scratch);
                let (mut w, mut magnitudes, mut integers) = (vec![0.0; cols], vec![0.0; cols], vec![0; cols]);
                for (r, floats) in floats.chunks_exact(cols).enumerate() {
                    hidden_digits(floats, digits.rows[r].scale, &mut integers);
                    let (out, rest) = out[r * TILE..][..TILE].split_at(vocab);
                    assert!(rest.iter().all(|x| x.is_nan()), "{dtype:?}, {kernel:?}: more than the tile was written");
                    for (i, out) in out.iter().enumerate() {
                        weight.row_to_f64(i, &mut w);
                        weight.row_magnitudes(i, &mut magnitudes);
                        let want: f64 = w.iter().zip(&integers).map(|(w, h)| w * f64::from(*h)).sum();
                        let terms = magnitudes.iter().zip(&integers);
                        let size: f64 = terms.map(|(w, h)| f64::from(*w) * f64::from(h.abs())).sum();
                        let error = (f64::from(*out) - want).abs();
                        assert!(error <= 1e-5 * size, "{dtype:?}, {kernel:?}, [{r}, {i}] of {rows}: {error:e}");
                    }
                }
            });
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn rows_that_are_far_apart_have_no_tiles() {
    let weight = Matrix::from_bytes(&[0; 68], DType::Q8_0, 1, 64, 1 << 27).unwrap();
    assert_eq!(super::kernels(Isa::Amx, &weight)[1], None);
}

#[cfg(target_arch = "x86_64")]
#[test]
#[should_panic(expected = "has_panels")]
fn panels_are_not_read_as_groups() {
    let mut digits = Digits::new(1, 64, vec![DigitLayout::PanelsAndSums]);
    digits.pack(DigitLayout::PanelsAndSums, &Matrix::new(&[1.0f32; 64], 1, 64).unwrap(), 0.0, |_, _| None);
    digits.first_group();
}

#[test]
fn upper_bounds_are_above_the_exact_products() {
    let cols = 1024;
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_elements() > 1 || *dtype == DType::BF16) {
        let weight = bytes(300, cols, 2, dtype, false);
        let weight = Matrix::from_bytes(&weight, dtype, 300, cols, cols).unwrap();
        let buffer = dtype.is_float().then(|| ShadowBuffer::new(&weight).unwrap());
        let mut head = Head::new(weight).unwrap();
        if let Some(buffer) = &buffer {
            head = head.with_shadow(buffer.shadow()).unwrap();
        }
        for rows in [1, 2, 4, 8, 17] {
            // Every other row is negated, so the test covers errors of both signs.
            let mut floats = hidden(rows, cols, 3);
            floats.chunks_exact_mut(cols).step_by(2).for_each(|row| row.iter_mut().for_each(|x| *x = -*x));
            for_each_kernel(&head, &Matrix::new(&floats, rows, cols).unwrap(), |bounds, kernel, digits, scratch| {
                let (mut out, mut row) = (vec![f32::NAN; rows * TILE], vec![0.0; cols]);
                for tile in [0..256, 250..300] {
                    bounds.tile(&head, tile.clone(), digits, &mut out, scratch);
                    for (i, token) in tile.enumerate() {
                        weight.row_to_f32(token, &mut row);
                        for (r, floats) in floats.chunks_exact(cols).enumerate() {
                            let (bound, product) = (f64::from(out[r * TILE + i]), canonical_dot(&row, floats));
                            let size = norm(&row) * norm(floats);
                            let is_fine = !dtype.is_float() && bounds.coarsest == 0.0;
                            let width = if is_fine { 0.01 } else { 0.1 } * size;
                            let is_close = (product..product + width).contains(&bound);
                            assert!(is_close, "{dtype:?}, {kernel:?}, {rows}: {bound} for {product} of {size}");
                        }
                    }
                }
            });
        }
    }
}

/// A head, and a shadow of its weight.
fn with_shadow(floats: &[f32]) -> (Head<'_>, ShadowBuffer) {
    let weight = Matrix::new(floats, VOCAB, COLS).unwrap();
    (Head::new(weight).unwrap(), ShadowBuffer::new(&weight).unwrap())
}

const CONTROL: Plan = Plan { max_rows: 17, max_draws: 3, max_logprobs: Some(3), canonical: false };

/// The negative control: if the errors of the shadow are set to 0, some draws differ.
#[test]
fn draws_without_the_errors_of_the_shadow_differ() {
    // The large column makes the steps of the codes large.
    let (_, floats) = heads().into_iter().find(|(name, _)| *name == "one large column").unwrap();
    let (head, buffer) = with_shadow(&floats);
    let shadow = buffer.shadow();
    // With AVX2 alone, only calls of one row use bounds.
    let options = CpuOptions { threads: Some(1), isa: Some(Isa::Portable) };
    let without_errors = Shadow::new(shadow.codes(), COLS, [shadow.scales(), &[0.0; VOCAB], shadow.norms()]).unwrap();
    for kinds in [PLAIN, TOP_K, MIN_P] {
        let mut with = Tiled::new(head.with_shadow(without_errors).unwrap(), CONTROL, &options).unwrap();
        let mut without = Tiled::new(head, CONTROL, &options).unwrap();
        assert!(compare(&mut with, &mut without, 100, kinds.clone()).is_err(), "{kinds:?}");
    }
}

/// The negative control: if the floors of a top-k are too high, some draws differ.
#[test]
fn draws_with_floors_that_are_too_high_differ() {
    let (_, floats) = heads().swap_remove(0);
    let (head, buffer) = with_shadow(&floats);
    // With several threads, a floor that is too high may drop all tokens of a row.
    let options = CpuOptions { threads: Some(1), isa: Some(Isa::Portable) };
    for (error, differs) in [(0.0, false), (0.5, true)] {
        let with = Tiled::new(head.with_shadow(buffer.shadow()).unwrap(), CONTROL, &options).unwrap();
        let mut without = Tiled::new(head, CONTROL, &options).unwrap();
        let outcome = compare(&mut with.with_error_of_floors(error), &mut without, 50, TOP_K);
        assert_eq!(outcome.is_err(), differs, "{error}: {outcome:?}");
    }
}

/// A short test, for emulators.
#[test]
fn some_draws_with_a_shadow_are_the_draws_without() {
    let (_, floats) = heads().swap_remove(0);
    let (head, buffer) = with_shadow(&floats);
    let options = CpuOptions { threads: Some(1), isa: None };
    let mut with = Tiled::new(head.with_shadow(buffer.shadow()).unwrap(), CONTROL, &options).unwrap();
    let mut without = Tiled::new(head, CONTROL, &options).unwrap();
    assert_eq!(compare(&mut with, &mut without, 5, KINDS), Ok(()));
}
