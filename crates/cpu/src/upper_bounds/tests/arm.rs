//! The products of the dot products of ARM, compared with plain Rust and with float64.

use super::super::digits::DigitLayout;
use super::super::dotprod::{self, Codes, ShadowCodes};
use super::super::{Digits, plain};
use super::{check_blocks, hidden, noise};
use crate::dot::TILE;
use flash_sampling_core::backend::code_stride;
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
    macro_rules! layout {
        ($format:ident) => {
            <$format as Codes>::DIGITS
        };
    }
    check_blocks(|dtype| crate::dot::blocks::for_format!(dtype, layout, unreachable!()));
}
