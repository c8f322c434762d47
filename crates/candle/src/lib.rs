//! FlashSampling for [candle](candle_core): the draw fused into the LM-head matmul, over candle's tensors.
//!
//! | type | replaces |
//! | --- | --- |
//! | [`FusedHead`] | `lm_head.forward(&hidden)` and the sampler after it: tokens from hidden states, no logits |
//! | [`FusedHead::from_qtensor`] | the same for a quantised model on the CPU: the weight stays quantised |
//! | [`LogitsProcessor`] | candle-transformers' type of the same name, over logits that exist, or over a [`FusedHead`] |
//! | [`with_matrix`] | a tensor's storage as the matrix that every sampler of [`flash_sampling`] takes |
//! | [`qtensor_matrix`] | a `QTensor`'s blocks as such a matrix |
//! | `with_device_matrix` (feature `cuda`) | the same for a tensor on a GPU, for the samplers over device memory |
//!
//! Tensors are on the CPU, or with the feature `cuda` on a GPU. On a GPU the head reads candle's memory, and draws on
//! candle's stream. The feature needs NVIDIA's compiler and libraries, as candle's own feature `cuda` does. Without the
//! feature, a CUDA tensor is an error.
#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![deny(unsafe_code)]

#[cfg(feature = "cuda")]
mod device_matrix;
mod head;
mod logits_processor;
mod matrix;
#[cfg(feature = "cuda")]
mod on_device;
mod quantised;

#[cfg(feature = "cuda")]
pub use device_matrix::with_device_matrix;
pub use head::{FusedHead, HeadOptions};
pub use logits_processor::{LogitsProcessor, Sampling};
pub use matrix::with_matrix;
pub use quantised::qtensor_matrix;

use candle_core::{Error, Result};

/// Converts an error of a sampler to candle's.
fn wrap<T, E: std::error::Error + Send + Sync + 'static>(outcome: std::result::Result<T, E>) -> Result<T> {
    outcome.map_err(Error::wrap)
}
