#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::dot::tests::bytes;
use crate::isa::Isa;
use crate::options::CpuOptions;
use crate::variants::Tiled;
use flash_sampling_core::{
    DType, Draw, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples, Shadow, ShadowBuffer, bf16,
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

/// Weights of several kinds: name, and the weight at row and column.
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

fn hidden(rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| 2.0 * noise(i + 999_983) * if i % cols == 11 { 8.0 } else { 1.0 }).collect()
}

/// Rows with every parameter that allows upper bounds.
fn params<'a>(rows: usize, step: u64, mask: &'a [u32], bias: &'a [(u32, f32)]) -> Vec<RowParams<'a>> {
    (0..rows)
        .map(|r| {
            let row = RowParams { seed: 7 + r as u64, position: step, ..RowParams::default() };
            match r % 6 {
                0 => row,
                1 => RowParams { temperature: 0.0, ..row },
                2 => RowParams { temperature: 0.3, mask: Some(mask), ..row },
                3 => RowParams { temperature: 1.7, draws: 3, ..row },
                4 => RowParams { logit_bias: bias, banned: &[77, 1500], ..row },
                _ => RowParams { temperature: 1e-38, ..row },
            }
        })
        .collect()
}

/// Compares the rows of `steps` calls of two samplers. Returns the first difference.
fn compare(a: &mut Tiled<'_>, b: &mut Tiled<'_>, steps: u64) -> Result<(), String> {
    let mask: Vec<u32> = (0..VOCAB.div_ceil(32) as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect();
    let bias = [(3, 2.5), (77, -4.0), (2999, f32::NEG_INFINITY)];
    let (mut out, mut expected) = (Samples::new(), Samples::new());
    for step in 0..steps {
        let rows = [1, 3, 6, 12, 17][step as usize % 5];
        let cols = a.shape().input;
        let floats = hidden(rows, cols);
        let input = Matrix::new(&floats, rows, cols).unwrap();
        let params = params(rows, step, &mask, &bias);
        a.sample(input, &params, &mut out).unwrap();
        b.sample(input, &params, &mut expected).unwrap();
        for r in 0..rows {
            let bits = |samples: &Samples| {
                let bits = |draw: &Draw| (draw.token, draw.score.to_bits(), draw.logit.to_bits());
                samples.row(r).map(|row| row.draws.iter().map(bits).collect::<Vec<_>>())
            };
            let (found, expected) = (bits(&out), bits(&expected));
            if found != expected {
                return Err(format!("step {step}, row {r}: {found:?} instead of {expected:?}"));
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
            let plan = Plan { max_rows: 17, max_draws: 3, max_logprobs: None, canonical };
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
                    let outcome = compare(&mut with, &mut without, 10);
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
            let plan = Plan { max_rows: 17, max_draws: 3, ..Plan::default() };
            let weight = bytes(VOCAB, cols, 1, dtype, false);
            let head = Head::new(Matrix::from_bytes(&weight, dtype, VOCAB, cols, cols).unwrap()).unwrap();
            let sampler = || Tiled::new(head, plan, &options).unwrap();
            let (mut with, mut without) = (sampler(), sampler().without_bounds());
            let outcome = compare(&mut with, &mut without, 10);
            assert!(outcome.is_ok(), "{dtype:?}, {isa}: {outcome:?}");
        }
    }
}

/// The negative control: if the errors of the shadow are set to 0, some draws differ.
#[test]
fn draws_without_the_errors_of_the_shadow_differ() {
    let (_, floats) = heads().swap_remove(0);
    let weight = Matrix::new(&floats, VOCAB, COLS).unwrap();
    let buffer = ShadowBuffer::new(&weight).unwrap();
    let shadow = buffer.shadow();
    let head = Head::new(weight).unwrap();
    let plan = Plan { max_rows: 17, max_draws: 3, ..Plan::default() };
    let options = CpuOptions { threads: Some(1), isa: None };
    let without_errors = Shadow::new(shadow.codes(), COLS, [shadow.scales(), &[0.0; VOCAB], shadow.norms()]).unwrap();
    let mut with = Tiled::new(head.with_shadow(without_errors).unwrap(), plan, &options).unwrap();
    let mut without = Tiled::new(head, plan, &options).unwrap();
    assert!(compare(&mut with, &mut without, 3000).is_err());
}
