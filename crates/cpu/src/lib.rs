//! FlashSampling on the CPU: the draw fused into the LM-head matmul, with rayon and SIMD.
//!
//! | type | variant | paper | exact |
//! | --- | --- | --- | --- |
//! | [`Tiled`] | fused tiled | Alg. 1 | pathwise |
//! | [`Grouped`] | parallel groups | Alg. I.2, section D.3 | in distribution; pathwise with [`GroupDraw::Reuse`](flash_sampling_core::GroupDraw::Reuse) |
//! | [`Online`], [`OnlineStream`] | online, also over a reader | Alg. I.3 | in distribution |
//! | [`Standalone`] | over existing logits | Alg. I.1 | pathwise |
//!
//! [`DetachedTiled`] is a plan between calls, for weights that are borrowed anew for each; [`matmul`] is the matmul alone.
//!
//! Weight and hidden states are bf16, f16 or f32 in any pair, borrowed and never repacked; sums are float32. A tile of
//! 256 tokens is multiplied with all rows of the batch ([`Isa`] says with which instructions), transformed, perturbed
//! and reduced while it is in the cache: there is no `[rows, vocab]` array.
//!
//! # Crate layout
//! `dot` multiplies (README beside it), and `simd` has the AVX-512 code. `scan` is one pass over the tokens on all threads: its
//! page lists what draws within a tile, what decides filters, and what makes results. `variants` has the samplers, a file
//! each. `unsafe` lives in `dot`, `simd`, `scan/perturb`, `scan/tile` and `scan/prefetch`.

mod dot;
mod error;
mod isa;
mod matmul;
mod options;
mod peak;
mod scan;
mod simd;
mod variants;

pub use error::CpuError;
pub use isa::{Isa, ParseIsaError};
pub use matmul::matmul;
pub use options::CpuOptions;
pub use peak::products;
pub use variants::{DetachedTiled, Grouped, Online, OnlineStream, Standalone, Tiled};
