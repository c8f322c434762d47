//! The vocabulary of FlashSampling: everything that is true on every machine.
//!
//! A decode step of a language model ends with `hidden [rows, hidden] x weight [vocab, hidden]^T`, a transform of the
//! logits, and one random draw per row. FlashSampling (Ruiz et al. 2026) adds Gumbel noise to each tile of logits while
//! it is still on chip and keeps one winner per tile, so the `[rows, vocab]` logits are never written. This crate holds
//! the theory that the backends share:
//!
//! | module | what it holds | paper |
//! | --- | --- | --- |
//! | [`noise`] | the noise of (seed, position, draw, token), version 2 | App. C, J |
//! | [`head`], [`stream_head`], [`matrix`] | the LM head; one whose weight arrives block by block; rows of bf16, f16 or f32 | |
//! | [`params`] | what differs per row: parameters, filters, penalties, masks | Alg. 1, line 3 |
//! | [`summary`] | winners, log-masses, group summaries, and their merges | Lemmas D.3, D.5, App. L |
//! | [`sampler`] | [`PerturbedArgmax`], the trait of all variants, its results, and speculative drafts | |
//! | [`backend`] | for implementers: scans, row summaries, the driver over scans | |
//! | [`error`], [`math`] | what can go wrong; `exp` and `tanh` with the same bits everywhere | |
//! | [`reference`](mod@reference) | the four variants, in float64, as short as they get | Alg. I.1 to I.4 |
//!
//! # Crate layout
//! This crate sees no backend and no threads and forbids `unsafe`. Backends see this crate and never each other.
#![forbid(unsafe_code)]

pub mod backend;
pub mod error;
pub mod head;
pub mod math;
pub mod matrix;
pub mod noise;
pub mod params;
pub mod reference;
pub mod sampler;
pub mod stream_head;
pub mod summary;

pub use backend::Scan;
pub use backend::selection::{RankRange, Selection, Selector};
pub use error::{HeadError, KnobValue, RowError, SampleError, Stage, StagedError};
/// The 16-bit floats of weights and hidden states, of the version of `half` that [`Matrix`] takes.
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use head::Head;
pub use matrix::{DType, Matrix};
pub use noise::{Domain, Noise, NoiseRng};
pub use params::adjustments::{Adjustment, Adjustments, IndexedAdjustments};
pub use params::filters::{Filter, Filters, Order};
pub use params::history::History;
pub use params::knob::{Knob, Knobs};
pub use params::sampling_params::{ParamsError, SamplingParams, SamplingParamsBuilder};
pub use params::{LogprobsMode, RowBuffer, RowParams};
pub use sampler::samples::{Draw, Kept, RowSample, Samples, log_prob};
pub use sampler::{Capabilities, Exactness, GroupDraw, Input, PerturbedArgmax, Plan, Shape, Variant, speculation};
pub use stream_head::{StreamError, StreamHead};
pub use summary::frontier::Frontier;
pub use summary::group_summary::{GroupSummary, group_size};
pub use summary::log_mass::LogMass;
pub use summary::mass_histogram::MassHistogram;
pub use summary::moments::Moments;
pub use summary::winner::{Candidate, LogitRank, TopList, Winner};
