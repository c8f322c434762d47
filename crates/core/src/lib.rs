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
//! | [`math`] | `exp` and `tanh` with the same bits everywhere | |
//! | [`winner`] | [`Winner`], [`Candidate`], [`TopList`]: maxima of perturbed scores | Lemma D.5 |
//! | [`log_mass`], [`mass_histogram`] | streaming and order-independent log-sum-exp | App. L |
//! | [`group_summary`] | [`GroupSummary`] and its binary merge | Lemma D.3 |
//! | [`frontier`] | [`Frontier`]: the winner above every threshold at once | |
//! | [`filters`], [`selection`] | top-k, top-p and their kin, and which tokens they keep | |
//! | [`moments`] | mean and deviation of a row, order-independent | |
//! | [`history`], [`repetitions`], [`adjustments`] | a sequence's tokens, and the penalties, bans and biases of a row | |
//! | [`sampling_params`] | [`SamplingParams`]: the parameters of a request, owned, with the names that JSON has | |
//! | [`error`], [`digest`] | what can go wrong, by whom; what ranks compare of a call | |
//! | [`knob`] | the knobs by name, and sets of them | |
//! | [`stream_head`] | [`StreamHead`]: a head whose weight arrives block by block | |
//! | [`matrix`] | [`Matrix`]: rows of bf16, f16 or f32, borrowed | |
//! | [`head`], [`params`], [`transform`] | the LM head, what differs per row, logits to scores | Alg. 1, line 3 |
//! | [`sampler`], [`samples`] | [`PerturbedArgmax`], the trait of all variants, and its results | |
//! | [`backend`] | [`Scan`]: one pass over a shard of the vocabulary; the row summaries that merge; the driver over scans | |
//! | [`canonical`], [`error_bounds`] | one dot product that every backend can agree on, and when it must decide | |
//! | [`speculation`] | drafts judged by shared noise, or by rejection | |
//! | [`reference`](mod@reference) | the four variants, in float64, as short as they get | Alg. I.1 to I.4 |
//!
//! # Crate layout
//! This crate sees no backend and no threads and forbids `unsafe`. Backends see this crate and never each other.
#![forbid(unsafe_code)]

pub mod adjustments;
pub mod backend;
pub mod canonical;
pub mod digest;
pub mod error;
pub mod error_bounds;
pub mod filters;
pub mod frontier;
pub mod group_summary;
pub mod head;
pub mod history;
pub mod knob;
pub mod log_mass;
pub mod mass_histogram;
pub mod math;
pub mod matrix;
pub mod moments;
pub mod noise;
pub mod params;
pub mod reference;
pub mod repetitions;
pub mod sampler;
pub mod samples;
pub mod sampling_params;
pub mod selection;
pub mod speculation;
pub mod stream_head;
pub mod transform;
pub mod winner;

pub use adjustments::{Adjustment, Adjustments, IndexedAdjustments};
pub use backend::Scan;
pub use error::{HeadError, KnobValue, RowError, SampleError, Stage, StagedError};
pub use filters::{Filter, Filters, Order};
pub use frontier::Frontier;
pub use group_summary::{GroupSummary, group_size};
/// The 16-bit floats of weights and hidden states, of the version of `half` that [`Matrix`] takes.
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use head::Head;
pub use history::History;
pub use knob::{Knob, Knobs};
pub use log_mass::LogMass;
pub use mass_histogram::MassHistogram;
pub use matrix::{DType, Matrix};
pub use moments::Moments;
pub use noise::{Domain, Noise, NoiseRng};
pub use params::{LogprobsMode, RowBuffer, RowParams};
pub use sampler::{Capabilities, Exactness, GroupDraw, Input, PerturbedArgmax, Plan, Shape, Variant};
pub use samples::{Draw, Kept, RowSample, Samples, log_prob};
pub use sampling_params::{ParamsError, SamplingParams, SamplingParamsBuilder};
pub use selection::{RankRange, Selection, Selector};
pub use stream_head::{StreamError, StreamHead};
pub use winner::{Candidate, LogitRank, TopList, Winner};
