//! Dot products in plain Rust: sixteen partial sums, multiplied and added with two roundings.

use super::blocks::{self, Plain, for_format};
use super::entry_points::entry_points;
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

entry_points!($ Portable, Plain of f32, 2 x 2, 2);
