//! The decoder in plain Rust: core's definition.

use super::Decoder;
use super::formats::Format;
use crate::dot::lanes::Lanes;
use core::marker::PhantomData;
use flash_sampling_core::DType;
use flash_sampling_core::backend::{SPAN, Span};

/// Decodes blocks of the format `T` by their definition.
pub(crate) struct Plain<T>(PhantomData<T>);

/// Floats per step of the kernel in plain Rust.
const STEP: usize = 16;

impl<T: Format, F: Lanes<Weights = [f32; STEP]>> Decoder<F> for Plain<T> {
    type Scales = ();
    const DTYPE: DType = T::DTYPE;

    #[inline(always)]
    unsafe fn scales(_: *const u8) {}

    #[inline(always)]
    unsafe fn weights(block: *const u8, step: usize, (): &()) -> [f32; STEP] {
        // SAFETY: the caller passes a readable block.
        let block = unsafe { core::slice::from_raw_parts(block, T::DTYPE.block_bytes()) };
        let weights = Span::decode(T::DTYPE, block, step / (SPAN / STEP)).to_f32();
        core::array::from_fn(|i| weights[step % (SPAN / STEP) * STEP + i])
    }
}
