//! Reading heads, hidden states and masks from files.
//!
//! Tensor files are mapped, never read whole; other files have a limit in size. The parsers work on bytes and never panic
//! on them, whatever they hold: they are the targets of the fuzz folder.
//!
//! | module | what it reads |
//! | --- | --- |
//! | [`tensor`] | `FILE[:tensor]`, safetensors or `.npy`, as a mapped matrix |
//! | [`safetensors`], [`npy`] | where in the bytes a tensor lies |
//! | [`checkpoint`] | a Hugging Face checkpoint folder: shards, the head or the tied embedding, its bias |
//! | [`files`] | the files of such a folder: any tensor by name |
//! | [`config`] | what `config.json` says about the head |
//! | [`mask`] | bitmaps of allowed tokens |
//! | [`requests`] | row parameters as JSON, one object or one for each row |
//! | [`logit_bias`] | `ID:VALUE,...` |
//! | `bounded` | whole files, up to a limit |

#[cfg(target_endian = "big")]
compile_error!("tensor files are little-endian and are mapped as they are");

pub(crate) mod bounded;
pub mod checkpoint;
pub mod config;
mod error;
pub mod files;
pub mod logit_bias;
pub mod mask;
pub mod npy;
pub mod requests;
pub mod safetensors;
mod similar;
pub mod tensor;
mod underflow;
mod unique;

pub use error::{LoadError, Problem};
pub use tensor::{Tensor, TensorPath};
