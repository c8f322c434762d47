//! FlashSampling for [candle](candle_core): the draw fused into the LM-head matmul, over candle's tensors.
//!
//! | type | what it replaces |
//! | --- | --- |
//! | [`FusedHead`] | `lm_head.forward(&hidden)` and the sampler after it: tokens from hidden states, no logits |
//! | [`LogitsProcessor`] | candle-transformers' type of the same name, over logits that exist |
//! | [`with_matrix`] | a tensor's storage as the matrix that every sampler of [`flash_sampling`] takes |
//!
//! Tensors lie on the CPU. A CUDA tensor is refused; its pointers can be given to `flash_sampling::cuda` (feature `cuda`
//! of that crate), which takes device memory on any stream.
#![forbid(unsafe_code)]

mod head;
mod logits_processor;
mod matrix;

pub use head::{FusedHead, HeadOptions};
pub use logits_processor::{LogitsProcessor, Sampling};
pub use matrix::with_matrix;

use candle_core::{Error, Result};

/// An error of a sampler as candle's.
fn wrap<T, E: std::error::Error + Send + Sync + 'static>(outcome: std::result::Result<T, E>) -> Result<T> {
    outcome.map_err(Error::wrap)
}
