//! The decoder in plain Rust, which calls the definition of the block types in `core`.

use super::Decoder;
use super::formats::Format;
use crate::dot::lanes::Lanes;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use flash_sampling_core::DType;
use flash_sampling_core::backend::{SPAN, Span};

/// Decodes blocks of the format `T` by [`Span::decode`], all spans of a block at once.
pub(crate) struct Plain<T>(PhantomData<T>);

/// Floats per step of the kernel in plain Rust.
const STEP: usize = 16;
/// The largest number of weights in a block.
const MOST: usize = 256;

impl<T: Format, F: Lanes<Weights = [f32; STEP]>> Decoder<F> for Plain<T> {
    /// All decoded weights of the block.
    type Scales = [[f32; STEP]; MOST / STEP];
    const DTYPE: DType = T::DTYPE;

    #[inline(always)]
    unsafe fn scales(block: *const u8, out: &mut MaybeUninit<Self::Scales>) {
        // SAFETY: the caller passes a readable block.
        let block = unsafe { core::slice::from_raw_parts(block, T::DTYPE.block_bytes()) };
        let weights = out.write([[0.0; STEP]; MOST / STEP]);
        for (span, out) in weights.as_chunks_mut::<{ SPAN / STEP }>().0.iter_mut().enumerate() {
            if span * SPAN < T::DTYPE.block_elements() {
                out.as_flattened_mut().copy_from_slice(&Span::decode(T::DTYPE, block, span).to_f32());
            }
        }
    }

    #[inline(always)]
    unsafe fn weights(_: *const u8, step: usize, weights: &Self::Scales) -> [f32; STEP] {
        weights[step]
    }
}
