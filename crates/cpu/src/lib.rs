//! FlashSampling on the CPU: the draw fused into the LM-head matmul, with rayon and SIMD.
//!
//! | type | variant | paper | exact |
//! | --- | --- | --- | --- |
//! | [`Tiled`] | fused tiled | Alg. 1 | pathwise |
//! | [`Grouped`] | parallel groups | Alg. I.2, section D.3 | in distribution; pathwise with [`GroupDraw::Reuse`] |
//! | [`Online`], [`OnlineStream`] | online, also over a reader | Alg. I.3 | in distribution |
//! | [`Standalone`] | over existing logits | Alg. I.1 | pathwise |
//!
//! [`Parked`] is a plan between calls, for weights that are borrowed anew for each; [`matmul`] is the matmul alone.
//!
//! Weight and hidden states are bf16, f16 or f32 in any pair, borrowed and never repacked; sums are float32. A tile of
//! 256 tokens is multiplied with all rows of the batch ([`Isa`] says with which instructions), transformed, perturbed
//! and reduced while it is in the cache: there is no `[rows, vocab]` array.
//!
//! # Crate layout
//! `dot` multiplies (README beside it). `granules` computes noise words and thresholds, and `perturb` the exact scores of
//! tokens that can win. `simd` has the AVX-512 code. `tile` evaluates one tile, `state` is the state of a row, `engine` runs
//! passes on all threads over the input of a call (`hidden`), `summary` makes results, and each variant has its file.
//! `unsafe` lives in `dot`, `simd`, `perturb`, `tile` and `prefetch`.

mod above;
mod adjusted;
mod again;
mod canonical;
mod dot;
mod engine;
mod error;
mod filtered;
mod floor;
mod granules;
mod grouped;
mod hidden;
mod isa;
mod largest;
mod limit;
mod matmul;
mod online;
mod options;
mod parked;
mod perturb;
mod prefetch;
mod raw;
mod scan;
mod simd;
mod standalone;
mod state;
mod stream;
mod summary;
mod tile;
mod tiled;

pub use error::CpuError;
pub use flash_sampling_core::{GroupDraw, StreamError, StreamHead};
pub use grouped::Grouped;
pub use isa::{Isa, ParseIsaError};
pub use limit::products;
pub use matmul::matmul;
pub use online::Online;
pub use options::CpuOptions;
pub use parked::Parked;
pub use standalone::Standalone;
pub use stream::OnlineStream;
pub use tiled::Tiled;
