//! FlashSampling on the CPU: the draw fused into the LM-head matmul, with rayon and SIMD.
//!
//! | type | variant | paper | exact |
//! | --- | --- | --- | --- |
//! | [`Tiled`] | fused tiled | Alg. 1 | pathwise |
//! | [`Grouped`] | parallel groups | Alg. I.2 | in distribution |
//! | [`Online`], [`OnlineStream`] | online, also over a reader | Alg. I.3 | in distribution |
//! | [`Standalone`] | over existing logits | Alg. I.1 | pathwise |
//!
//! [`make_shadow`] makes the shadow of a weight on all threads, and [`digest_of_matrix`] its digest. [`DetachedTiled`] is
//! a plan between calls, for weights borrowed per call; [`matmul`] is the matmul alone.
//!
//! Weight and hidden states are any pair of bf16, f16 and f32, borrowed and never repacked; sums are float32. A tile of
//! 256 tokens is multiplied with all rows of the batch ([`Isa`] selects the instructions), transformed, perturbed and
//! reduced while it is in the cache. There is no `[rows, vocab]` array.
//!
//! # Crate layout
//! * `dot` multiplies (its folder has a README), and `simd` has the AVX-512 and NEON code.
//! * `upper_bounds` computes upper bounds of logits from 8-bit products, which select the tokens that may win.
//! * `scan` is one pass over the tokens on all threads. Its page lists the modules for the draw within a tile, for filters
//!   and for results.
//! * `variants` has the samplers, one file each.
//!
//! `unsafe` code is in `dot`, `upper_bounds`, `simd`, `scan/perturb`, `scan/tile` and `scan/prefetch`.

mod dot;
mod error;
mod isa;
mod matmul;
mod options;
mod scan;
mod shadow;
mod simd;
mod upper_bounds;
mod variants;

pub use error::CpuError;
pub use isa::{Isa, ParseIsaError};
pub use matmul::matmul;
pub use options::CpuOptions;
pub use shadow::{digest_of_matrix, make_shadow};
pub use variants::{DetachedTiled, Grouped, Online, OnlineStream, Standalone, Tiled};
