//! The products of x86-64 kernels, compared with plain Rust.

use super::super::codes::ShadowCodes;
use super::super::digits::DigitLayout;
use super::super::{Digits, RowNumbers, avx2, multiply_panels, plain, vnni};
use super::{hidden, noise};
use crate::dot::pack::PackedRows;
use crate::dot::tests::bytes;
use crate::dot::{DotScratch, TILE, amx};
use crate::isa::Isa;
use flash_sampling_core::backend::{code_stride, shadow_row};
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
fn codes_of_quantised_weights_are_those_of_their_floats() {
    if !Isa::Avx512.is_available() {
        return;
    }
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_elements() > 1) {
        let (rows, cols) = (40, 768);
        let weight = bytes(rows, cols, 3, dtype, false);
        let weight = Matrix::from_bytes(&weight, dtype, rows, cols, cols).unwrap();
        let (mut row, mut want) = (vec![0.0; cols], vec![0i8; cols]);
        let numbers = RowNumbers::of_requantised(&weight);
        let mut out = vec![0u8; rows * cols];
        // SAFETY: AVX-512 is available.
        unsafe { crate::dot::avx512::requantise(&weight, numbers.rows(0..rows)[0], cols, &mut out) };
        for (r, codes) in out.chunks_exact(cols).enumerate() {
            weight.row_to_f32(r, &mut row);
            shadow_row(&row, &mut want);
            assert!(codes.iter().zip(&want).all(|(a, b)| *a as i8 == *b), "{dtype:?}, row {r}");
        }
    }
}
