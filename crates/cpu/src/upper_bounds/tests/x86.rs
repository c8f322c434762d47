//! The products of x86-64 kernels, compared with plain Rust.

use super::super::codes::ShadowCodes;
use super::super::digits::DigitLayout;
use super::super::{Digits, avx2, multiply_panels, plain, vnni};
use super::{check_blocks, hidden, noise};
use crate::dot::pack::PackedRows;
use crate::dot::{DotScratch, TILE, amx};
use crate::isa::Isa;
use flash_sampling_core::backend::code_stride;
use flash_sampling_core::{DType, Matrix, Shadow, ShadowBuffer};

/// The products in plain Rust.
fn products(shadow: &Shadow<'_>, digits: &Digits) -> Vec<f32> {
    let mut out = vec![f32::NAN; digits.rows.len() * TILE];
    plain::portable(shadow, digits, &mut out);
    out
}

#[test]
fn all_kernels_have_the_products_of_plain_rust() {
    for (vocab, cols, rows) in [(256, 4096, 1), (77, 100, 9), (33, 64, 64), (256, 1000, 17), (5, 63, 3), (64, 129, 40)]
    {
        let weight: Vec<f32> = (0..vocab * cols).map(noise).collect();
        let buffer = ShadowBuffer::new(&Matrix::new(&weight, vocab, cols).unwrap()).unwrap();
        let (shadow, floats) = (buffer.shadow(), hidden(rows, cols, 0));
        let states = Matrix::new(&floats, rows, cols).unwrap();
        let mut digits = Digits::new(rows, cols, vec![DigitLayout::Groups, DigitLayout::Panels]);
        digits.pack(DigitLayout::Groups, &states, 1.0, cols);
        let want = products(&shadow, &digits);
        let stride = code_stride(cols);
        if is_x86_feature_detected!("avx2") {
            let mut out = vec![f32::NAN; rows * TILE];
            // SAFETY: AVX2 is available, and the digits are in groups.
            unsafe { avx2::multiply(&shadow, &digits, &mut out) };
            assert!(out.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "AVX2, [{vocab}, {cols}], {rows}");
        }
        if is_x86_feature_detected!("avx512vnni") {
            let mut out = want.clone();
            let (codes, out_at) = (shadow.codes().as_ptr().cast(), out.as_mut_ptr());
            let (hidden, groups) = (&digits, stride / 64);
            // SAFETY: VNNI is available, and the sizes are those of the shadow and the hidden states.
            unsafe {
                vnni::Operands { codes, stride, rows: vocab, hidden, groups, out: out_at }.multiply::<ShadowCodes>();
            }
            assert!(out.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "VNNI, [{vocab}, {cols}], {rows}");
        }
        digits.pack(DigitLayout::Panels, &states, 1.0, cols);
        let codes: Vec<u8> = shadow.codes().iter().map(|code| *code as u8).collect();
        let mut scratch = DotScratch::default();
        let multiply = |pairs: &Matrix<'_>, panels: PackedRows<'_>, integers: &mut [f32], _: &mut DotScratch| {
            amx::plain::integer_tile(pairs, panels, integers);
        };
        let mut out = vec![f32::NAN; rows * TILE];
        multiply_panels(&codes, stride, &digits, &mut out, &mut scratch, multiply);
        assert!(out.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "tiles, [{vocab}, {cols}], {rows}");
    }
}

#[test]
fn products_of_blocks_are_those_of_the_weights_and_the_digits() {
    macro_rules! layout {
        ($format:ident) => {
            vnni::layout::<$format>()
        };
    }
    if is_x86_feature_detected!("avx512vnni") {
        check_blocks(|dtype| crate::dot::blocks::for_format!(dtype, layout, unreachable!()));
    }
    if Isa::Amx.is_available() && amx::has_integers() {
        check_blocks(|_| DigitLayout::PanelsAndSums);
    }
}
