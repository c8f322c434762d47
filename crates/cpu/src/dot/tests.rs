//! Tests of all kernels.

use super::*;
use crate::dot::pack::Packed;
use flash_sampling_core::backend::canonical::{canonical_dot, dot_error_bound, extra_terms, norm};
use flash_sampling_core::round_as_ggml;
use half::{bf16, f16};

fn value(i: usize, j: usize) -> f32 {
    (((i * 7919 + j * 104_729 + 13) % 1009) as f32 / 504.5 - 1.0) * 3.0
}

/// Returns blocks of any codes and scales. The block's f16 factors are 1 for integers.
fn blocks(count: usize, salt: usize, dtype: DType, integers: bool) -> Vec<u8> {
    let factors: &[usize] = match dtype {
        DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q6_K => &[208],
        _ => &[0],
    };
    let hash = |i: usize| (i as u64 + 1 + salt as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let mut bytes: Vec<u8> = (0..count * dtype.block_bytes()).map(|i| hash(i) as u8).collect();
    for (b, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
        if dtype == DType::MXFP4 {
            block[0] = if integers { 128 } else { 110 + (hash(b) % 20) as u8 };
            continue;
        }
        for &at in factors {
            let factor = if integers { 1.0 } else { value(b, at) / 50.0 };
            block[at..at + 2].copy_from_slice(&f16::from_f32(factor).to_le_bytes());
        }
    }
    bytes
}

/// The scales of 8-bit weights: powers of two for integers.
fn scaled<'a>(m: Matrix<'a>, integers: bool) -> Matrix<'a> {
    static SCALES: [[f32; 64]; 2] = [[0.37; 64], [0.5; 64]];
    if !m.dtype().is_scaled() {
        return m;
    }
    let count = m.rows().div_ceil(100) * m.cols().div_ceil(64);
    m.with_scales(&SCALES[usize::from(integers)][..count], [100, 64]).unwrap()
}

/// Returns the bytes of a matrix of test values in any type.
pub(crate) fn bytes(rows: usize, cols: usize, salt: usize, dtype: DType, integers: bool) -> Vec<u8> {
    if dtype.is_scaled() {
        let codes = [0x38, 0xb8, 0x40, 0xc0, 0u8];
        let code = |i: usize| if integers { codes[(i * 7 + salt) % 5] } else { (i * 31 + salt) as u8 & 0xf7 };
        return (0..rows * cols).map(code).collect();
    }
    if !dtype.is_float() {
        return blocks(rows * cols / dtype.block_elements(), salt, dtype, integers);
    }
    let values = (0..rows * cols).map(|at| {
        let v = value(at / cols + salt, at % cols);
        if integers { v.round() } else { v }
    });
    match dtype {
        DType::BF16 => values.flat_map(|v| bf16::from_f32(v).to_ne_bytes()).collect(),
        DType::F16 => values.flat_map(|v| f16::from_f32(v).to_ne_bytes()).collect(),
        _ => values.flat_map(|v| v.to_ne_bytes()).collect(),
    }
}

/// The norm of a weight row in the bound of its dot products.
fn magnitude(weight: &Matrix<'_>, row: usize) -> f64 {
    let mut magnitudes = vec![0.0; weight.cols()];
    weight.row_magnitudes(row, &mut magnitudes);
    norm(&magnitudes)
}

fn run(isa: Isa, weight: &Matrix<'_>, hidden: &Matrix<'_>) -> Vec<f32> {
    let dot = Dot::new(isa, weight.dtype(), hidden.dtype());
    let mut packed = Packed::new(hidden.rows(), hidden.cols());
    packed.pack(dot.layout(), hidden);
    let mut scratch = Dot::scratch(isa, weight.dtype(), hidden.rows());
    let mut out = vec![f32::NAN; hidden.rows() * TILE];
    dot.tile(weight, packed.all(), &mut out, &mut scratch);
    out
}

const FLOATS: [DType; 3] = [DType::BF16, DType::F16, DType::F32];

#[test]
fn every_instruction_set_agrees_with_the_canonical_dot() {
    for isa in Isa::available() {
        for weight_type in DType::ALL {
            for hidden_type in FLOATS {
                for (vocab, rows, cols) in
                    [(1usize, 1usize, 1usize), (5, 3, 31), (256, 7, 64), (100, 17, 97), (67, 40, 130), (40, 7, 1088)]
                {
                    let cols = cols.next_multiple_of(weight_type.block_elements());
                    for integers in [true, false] {
                        let w = bytes(vocab, cols, 1, weight_type, integers);
                        let h = bytes(rows, cols, 1000, hidden_type, integers);
                        let w = scaled(Matrix::from_bytes(&w, weight_type, vocab, cols, cols).unwrap(), integers);
                        let h = Matrix::from_bytes(&h, hidden_type, rows, cols, cols).unwrap();
                        let out = run(isa, &w, &h);
                        let (mut a, mut b) = (vec![0.0; cols], vec![0.0; cols]);
                        let mut exact = vec![0.0; cols];
                        let terms = cols + extra_terms(weight_type);
                        for r in 0..rows {
                            h.row_to_f32(r, &mut b);
                            for i in 0..vocab {
                                w.row_to_f32(i, &mut a);
                                w.row_to_f64(i, &mut exact);
                                let error = (f64::from(out[r * TILE + i]) - canonical_dot(&exact, &b)).abs();
                                let bound =
                                    if integers { 0.0 } else { dot_error_bound(terms, magnitude(&w, i), norm(&b)) };
                                assert!(error <= bound, "{isa} {weight_type:?} {hidden_type:?} [{r}, {i}]");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_batch_and_tile() {
    let vocab = 200;
    for isa in Isa::available() {
        for dtype in DType::ALL {
            let cols = if dtype.block_elements() > 1 { 384usize } else { 333 };
            let cols = cols.next_multiple_of(dtype.block_elements());
            let hidden_type = if dtype.is_float() { dtype } else { DType::F32 };
            let w = bytes(vocab, cols, 1, dtype, false);
            let h = bytes(70, cols, 1000, hidden_type, false);
            let w = scaled(Matrix::from_bytes(&w, dtype, vocab, cols, cols).unwrap(), false);
            let h = Matrix::from_bytes(&h, hidden_type, 70, cols, cols).unwrap();
            let whole = run(isa, &w, &h);
            for rows in [0..1, 3..5, 10..17, 20..70] {
                for tokens in [0..1, 5..70, 100..200] {
                    let part = run(isa, &w.row_range(tokens.clone()), &h.row_range(rows.clone()));
                    for (r, row) in rows.clone().enumerate() {
                        for (i, token) in tokens.clone().enumerate() {
                            let (a, b) = (part[r * TILE + i], whole[row * TILE + token]);
                            assert_eq!(a.to_bits(), b.to_bits(), "{isa} {dtype:?} row {row} token {token}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn decoded_weights_have_the_bits_of_their_definition() {
    for isa in Isa::available() {
        for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_elements() > 1) {
            // Each row of hidden states selects one weight, by a factor of 15 bits if the product of both is exact.
            let cols = dtype.block_elements().max(64);
            let w = bytes(64, cols, 5, dtype, false);
            let w = Matrix::from_bytes(&w, dtype, 64, cols, cols).unwrap();
            let factor = |k: usize| match k % 3 {
                _ if !dtype.is_exact_in_f32() => 1.0,
                0 => 16385.0 / 16384.0,
                1 => -12345.0 / 8192.0,
                _ => 1.0,
            };
            let diagonal = |at: usize| if at.is_multiple_of(cols + 1) { factor(at / cols) } else { 0.0 };
            let one: Vec<f32> = (0..cols * cols).map(diagonal).collect();
            let one = Matrix::new(&one, cols, cols).unwrap();
            let all = run(isa, &w, &one);
            let mut row = vec![0.0; cols];
            for i in 0..64 {
                w.row_to_f32(i, &mut row);
                for (k, &weight) in row.iter().enumerate() {
                    // A sum that begins with 0 loses the sign of -0.
                    let expected = (weight * factor(k) + 0.0).to_bits();
                    assert_eq!((all[k * TILE + i] + 0.0).to_bits(), expected, "{isa} {dtype:?} weight {i}, {k}");
                }
            }
            let alone = run(isa, &w, &one.row_range(7..8));
            assert_eq!(alone[..64], all[7 * TILE..][..64], "{isa} {dtype:?}");
        }
    }
}

/// The negative control of the bound: hidden states of 8 bits, which ggml multiplies.
#[test]
fn rounded_hidden_states_exceed_the_bound() {
    for dtype in [DType::Q8_0, DType::Q6_K, DType::Q4_K] {
        let cols = 256;
        let w = bytes(40, cols, 1, dtype, false);
        let w = Matrix::from_bytes(&w, dtype, 40, cols, cols).unwrap();
        let states: Vec<f32> = (0..cols).map(|k| value(7, k)).collect();
        let mut rounded = states.clone();
        round_as_ggml(dtype, &mut rounded);
        let errors_beyond = |states_of_run: &[f32]| {
            let out = run(Isa::best_for(dtype, DType::F32), &w, &Matrix::new(states_of_run, 1, cols).unwrap());
            let mut row = vec![0.0; cols];
            let mut row64 = vec![0.0; cols];
            let is_beyond = |i: &usize| {
                w.row_to_f32(*i, &mut row);
                w.row_to_f64(*i, &mut row64);
                let error = (f64::from(out[*i]) - canonical_dot(&row64, &states)).abs();
                error > dot_error_bound(cols + extra_terms(dtype), magnitude(&w, *i), norm(&states))
            };
            (0..40).filter(is_beyond).count()
        };
        assert_eq!(errors_beyond(&states), 0, "{dtype:?}");
        assert!(errors_beyond(&rounded) > 20, "{dtype:?}");
    }
}

#[test]
fn a_bad_scale_is_a_nan_or_an_infinity() {
    for (isa, cols) in Isa::available().into_iter().flat_map(|isa| [(isa, 256), (isa, 1024)]) {
        let mut w = bytes(3, cols, 1, DType::Q8_0, true);
        w.chunks_exact_mut(34).for_each(|block| block[2..].fill(1));
        w[34 * (cols / 32)..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
        w[34 * (cols / 32 * 3 - 1)..][..2].copy_from_slice(&f16::INFINITY.to_le_bytes());
        let w = Matrix::from_bytes(&w, DType::Q8_0, 3, cols, cols).unwrap();
        let mut h = vec![1.0f32; 4 * cols];
        (h[2 * cols + 5], h[3 * cols + 7]) = (f32::NEG_INFINITY, f32::NAN);
        for rows in [1, 2, 4] {
            let out = run(isa, &w, &Matrix::new(&h[..rows * cols], rows, cols).unwrap());
            assert!(out[0] == cols as f32 && out[1].is_nan() && out[2] == f32::INFINITY, "{isa}: {:?}", &out[..3]);
            if rows == 4 {
                assert!(out[2 * TILE] == f32::NEG_INFINITY && out[3 * TILE].is_nan(), "{isa}");
            }
        }
    }
}

#[test]
fn nan_and_infinity_pass_through() {
    for isa in Isa::available() {
        let mut w = vec![bf16::ONE; 3 * 40];
        w[45] = bf16::NAN;
        w[85] = bf16::INFINITY;
        let h = vec![bf16::ONE; 40];
        let out = run(isa, &Matrix::new(&w, 3, 40).unwrap(), &Matrix::new(&h, 1, 40).unwrap());
        assert!(out[0] == 40.0 && out[1].is_nan() && out[2] == f32::INFINITY, "{isa}: {:?}", &out[..3]);
    }
}

#[test]
fn strides_and_odd_addresses_are_fine() {
    for isa in Isa::available() {
        let raw = bytes(40, 50, 3, DType::BF16, true);
        let mut shifted = vec![0u8];
        shifted.extend_from_slice(&raw);
        let w = Matrix::from_bytes(&raw, DType::BF16, 40, 33, 50).unwrap();
        let odd = Matrix::from_bytes(&shifted[1..], DType::BF16, 40, 33, 50).unwrap();
        let h = bytes(2, 33, 9, DType::BF16, true);
        let h = Matrix::from_bytes(&h, DType::BF16, 2, 33, 33).unwrap();
        let (a, b) = (run(isa, &w, &h), run(isa, &odd, &h));
        assert_eq!(a[..40], b[..40], "{isa}");
    }
}
