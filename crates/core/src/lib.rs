//! The core of FlashSampling: noise, parameters, summaries, the sampler trait and the reference.
//!
//! A decode step of a language model ends with `hidden [rows, hidden] x weight [vocab, hidden]^T`, a transform of the
//! logits, and one random draw per row. FlashSampling (Ruiz et al. 2026) adds Gumbel noise to each tile of logits while
//! it is still on chip and keeps one winner per tile, so it never writes the `[rows, vocab]` logits.
//!
//! | module | content | paper |
//! | --- | --- | --- |
//! | this page | samplers, heads, parameters and results | Alg. 1 |
//! | [`noise`](mod@noise) | the noise of (seed, position, draw, token), version 2 | App. C, J |
//! | [`speculation`] | verification of draft tokens | |
//! | [`reference`](mod@reference) | the four variants in float64, as short as possible | Alg. I.1 to I.4 |
//! | [`backend`] | for implementers: summaries and their merges, scans, filters, the driver; exempt from semantic versioning | Lemmas D.3, D.5, App. L |
//!
//! # Crate layout
//! This crate has no backend and no threads, and forbids `unsafe`. Backends depend on it and never on each other.
#![forbid(unsafe_code)]

pub mod backend;
mod error;
mod head;
mod matrix;
pub mod noise;
mod params;
pub mod reference;
mod sampler;
mod shadow;
mod stream_head;
mod summary;

// Samplers and their results.
pub use error::SampleError;
pub use sampler::samples::{Draw, Kept, RowSample, Samples, log_prob};
pub use sampler::{Capabilities, Description, Exactness, Input, PerturbedArgmax, Plan, Shape, Variant, speculation};
// Heads and inputs.
pub use error::HeadError;
/// The 16-bit floats of weights and hidden states, from the version of `half` that [`Matrix`] takes.
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use head::Head;
pub use matrix::{DType, Element, Matrix, Scales, round_as_ggml};
pub use shadow::{Shadow, ShadowBuffer};
pub use stream_head::{StreamError, StreamHead};
// The parameters of a row, and of a request.
pub use error::{KnobValue, RowError};
pub use params::filters::Order;
pub use params::history::History;
pub use params::knob::{Knob, Knobs};
pub use params::sampling_params::{ParamsError, SamplingParams, SamplingParamsBuilder};
pub use params::{LogprobsMode, RowBuffer, RowParams};
// The noise of a token.
#[doc(inline)]
pub use noise::{Domain, Noise, NoiseRng};
