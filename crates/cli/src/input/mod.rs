//! Input files: heads, hidden states, masks, parameters.
//!
//! Tensor files are memory-mapped; other files have a size limit. The parsers accept any bytes without a panic, and the
//! fuzz targets test them.
//!
//! | module | input |
//! | --- | --- |
//! | [`tensor`] | `FILE[:TENSOR]`, safetensors, GGUF or `.npy`, as a mapped matrix |
//! | [`scales`] | the scales of 8-bit weights in safetensors files |
//! | [`safetensors`], [`npy`] | headers of tensor files |
//! | [`checkpoint`] | the LM head of a Hugging Face checkpoint folder |
//! | [`checkpoint_files`] | tensors and small files of such a folder |
//! | [`gguf`] | GGUF files: their head and their tokenizer |
//! | [`config`] | the head's parameters in `config.json` |
//! | [`loaded_head`] | a head from files with its transforms |
//! | [`shadow`] | the shadow of a weight, made or in a file |
//! | [`synthetic`] | deterministic heads and hidden states of any size, without a file |
//! | [`mask`] | bitmaps of allowed tokens |
//! | [`requests`] | parameters of rows as JSON |
//! | [`logit_bias`] | `ID:VALUE,...` |
//! | `bounded` | whole files up to a size limit |
//! | `number`, `similar` | underflow, misspelt names |

#[cfg(target_endian = "big")]
compile_error!("tensor files are little-endian and are mapped as they are");

pub(crate) mod bounded;
pub mod checkpoint;
pub mod checkpoint_files;
pub mod config;
mod error;
pub mod gguf;
pub mod loaded_head;
pub mod logit_bias;
pub mod mask;
pub mod npy;
pub(crate) mod number;
pub mod requests;
pub mod safetensors;
pub mod scales;
pub mod shadow;
pub(crate) mod similar;
pub mod synthetic;
pub mod tensor;

pub use error::{LoadError, Problem};
pub use tensor::{Tensor, TensorPath};
