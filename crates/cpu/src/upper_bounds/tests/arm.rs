//! The products of the dot products of ARM, compared with plain Rust and with float64.

use super::super::digits::DigitLayout;
use super::super::dotprod::{self, Codes, ShadowCodes};
use super::super::{Digits, multiply_blocks, plain};
use super::{hidden, noise};
use crate::dot::TILE;
use crate::dot::tests::bytes;
use flash_sampling_core::backend::{code_stride, hidden_digits};
use flash_sampling_core::{DType, Matrix, ShadowBuffer};

#[test]
fn products_of_a_shadow_are_those_of_plain_rust() {
    if !dotprod::is_available() {
        return;
    }
    for (vocab, cols, rows) in [(256, 4096, 1), (77, 100, 9), (33, 64, 64), (5, 63, 3), (64, 129, 7)] {
        let weight: Vec<f32> = (0..vocab * cols).map(noise).collect();
        let buffer = ShadowBuffer::new(&Matrix::new(&weight, vocab, cols).unwrap()).unwrap();
        let (shadow, floats) = (buffer.shadow(), hidden(rows, cols, 0));
        let mut digits = Digits::new(rows, cols, vec![DigitLayout::Groups]);
        digits.pack(DigitLayout::Groups, &Matrix::new(&floats, rows, cols).unwrap(), 1.0, cols);
        let (mut want, mut out) = (vec![f32::NAN; rows * TILE], vec![f32::NAN; rows * TILE]);
        plain::portable(&shadow, &digits, &mut want);
        let (codes, stride) = (shadow.codes().as_ptr().cast(), code_stride(cols));
        // SAFETY: the instructions are available, and the sizes are those of the shadow and the hidden states.
        unsafe { dotprod::multiply::<ShadowCodes>((codes, stride), [vocab, stride], &digits, &mut out) };
        assert!(out.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "[{vocab}, {cols}], {rows}");
    }
}

#[test]
fn products_of_blocks_are_those_of_the_weights_and_the_digits() {
    if !dotprod::is_available() {
        return;
    }
    let (vocab, cols) = (37, 512);
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_elements() > 1) {
        let weight = bytes(vocab, cols, 5, dtype, false);
        let weight = Matrix::from_bytes(&weight, dtype, vocab, cols, cols).unwrap();
        macro_rules! layout {
            ($format:ident) => {
                <$format as Codes>::DIGITS
            };
        }
        let layout = crate::dot::blocks::for_format!(dtype, layout, unreachable!());
        for rows in [1, 3, 8] {
            let floats = hidden(rows, cols, 0);
            let mut digits = Digits::new(rows, cols, vec![layout]);
            digits.pack(layout, &Matrix::new(&floats, rows, cols).unwrap(), 1.0, cols);
            let mut out = vec![f32::NAN; rows * TILE];
            multiply_blocks(&weight, &digits, &mut out);
            let (mut w, mut magnitudes) = (vec![0.0; cols], vec![0.0; cols]);
            for (r, floats) in floats.chunks_exact(cols).enumerate() {
                let mut state = vec![0.0f64; cols];
                hidden_digits(floats, |k, [high, low]| state[k] = 256.0 * f64::from(high) + f64::from(low));
                for i in 0..vocab {
                    weight.row_to_f64(i, &mut w);
                    weight.row_magnitudes(i, &mut magnitudes);
                    let want: f64 = w.iter().zip(&state).map(|(w, h)| w * h).sum();
                    let size: f64 = magnitudes.iter().zip(&state).map(|(w, h)| f64::from(*w) * h.abs()).sum();
                    let error = (f64::from(out[r * TILE + i]) - want).abs();
                    assert!(error <= 1e-5 * size, "{dtype:?}, row {i} and {r} of {rows}: {error:e} of {size:e}");
                }
            }
        }
    }
}
