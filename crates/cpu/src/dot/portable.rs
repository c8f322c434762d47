//! Dot products in plain Rust: sixteen partial sums, multiplied and added with two roundings.

use super::blocks::{self, Plain, for_format};
use super::lanes::{self, Lanes};
use super::pack::PackedRows;
use core::marker::PhantomData;
use flash_sampling_core::{DType, Element, Matrix};
use half::{bf16, f16};

/// Plain Rust for a weight of type `T`.
struct Portable<T>(PhantomData<T>);

const WIDTH: usize = 16;

impl<T: Element> Lanes for Portable<T> {
    type Sums = [f32; WIDTH];
    type Weights = [f32; WIDTH];
    type PackedInput = [f32; WIDTH];
    const STEP: usize = WIDTH;
    const WEIGHT_BYTES: usize = WIDTH * size_of::<T>();
    const HIDDEN_BYTES: usize = WIDTH * 4;

    #[inline(always)]
    unsafe fn zero() -> Self::Sums {
        [0.0; WIDTH]
    }
    #[inline(always)]
    unsafe fn weights(at: *const u8) -> Self::Weights {
        // SAFETY: the caller passes `STEP` readable elements; the read allows any alignment.
        unsafe { at.cast::<[T; WIDTH]>().read_unaligned() }.map(T::widen)
    }
    #[inline(always)]
    unsafe fn hidden(at: *const u8) -> Self::PackedInput {
        // SAFETY: as above.
        unsafe { at.cast::<[f32; WIDTH]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn multiply_add(sums: Self::Sums, w: Self::Weights, h: Self::PackedInput) -> Self::Sums {
        core::array::from_fn(|j| sums[j] + w[j] * h[j])
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn total(sums: Self::Sums) -> f32 {
        let mut s = sums;
        for width in [8, 4, 2, 1] {
            for j in 0..width {
                s[j] += s[j + width];
            }
        }
        s[0]
    }
}

/// Multiplies a tile; see [`lanes::tile`], and for blocks [`blocks::multiply`].
pub(super) fn tile(weight: &Matrix<'_>, hidden: PackedRows<'_>, out: &mut [f32]) {
    // SAFETY: plain Rust is always available; the dispatcher has checked types and sizes.
    unsafe {
        match weight.dtype() {
            DType::BF16 => lanes::tile::<Portable<bf16>, 2, 2, 2>(weight, hidden, out),
            DType::F16 => lanes::tile::<Portable<f16>, 2, 2, 2>(weight, hidden, out),
            DType::F32 => lanes::tile::<Portable<f32>, 2, 2, 2>(weight, hidden, out),
            dtype => {
                macro_rules! multiply {
                    ($format:ident) => {
                        blocks::multiply::<Portable<f32>, Plain<$format>>(weight, hidden, out)
                    };
                }
                for_format!(dtype, multiply, unreachable!("{dtype:?} is a float"))
            }
        }
    }
}

/// Decodes a quantised weight; see [`blocks::decode`].
pub(super) fn decode(weight: &Matrix<'_>, stride: usize, out: &mut [f32]) {
    macro_rules! decode {
        ($format:ident) => {
            // SAFETY: plain Rust is always available, and the type is that of the weight.
            unsafe { blocks::decode::<Portable<f32>, Plain<$format>>(weight, stride, out) }
        };
    }
    for_format!(weight.dtype(), decode, blocks::decode_scaled(weight, stride, out))
}

/// Runs multiply-adds; see [`lanes::products`].
pub(super) fn products(weight: DType, count: u64) -> f32 {
    // SAFETY: plain Rust is always available.
    unsafe {
        match weight {
            DType::BF16 => lanes::products::<Portable<bf16>, 2, 2>(count),
            DType::F16 => lanes::products::<Portable<f16>, 2, 2>(count),
            _ => lanes::products::<Portable<f32>, 2, 2>(count),
        }
    }
}
