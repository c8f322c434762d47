//! The conformance suite: the laws that every backend and variant must obey.
//!
//! # Adding a backend
//! Implement [`PerturbedArgmax`](flash_sampling_core::PerturbedArgmax); the laws test its contract. Then implement
//! [`SamplerFactory`] (a name, the variant of the reference and `build`), and write one line in a test file:
//! ```
//! use flash_sampling_conformance::{BuildError, SamplerFactory, suite};
//! use flash_sampling_core::reference::{Reference, ReferenceVariant};
//! use flash_sampling_core::{Head, PerturbedArgmax, Plan};
//!
//! struct Mine;
//!
//! impl SamplerFactory for Mine {
//!     fn name(&self) -> String {
//!         "mine/tiled".into()
//!     }
//!     fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
//!         Some(ReferenceVariant::Tiled)
//!     }
//!     fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
//!         Ok(Box::new(Reference::new(head, plan, ReferenceVariant::Tiled)))
//!     }
//! }
//!
//! suite!(mine_tiled, Mine);
//! # fn main() {}
//! ```
//! The laws draw millions of tokens, so tests need `opt-level = 3` in `[profile.test]`. A sampler that takes logits needs
//! the adapter [`FromLogits`](factory::FromLogits).
//!
//! [`suite!`] expands to a module with one test per law of [`laws::ALL`]. Programs run the same laws by [`Law::check`],
//! which reports the statistic, alpha and verdict of every check, and points to plot.
//!
//! # Modules
//! | module | contents |
//! | --- | --- |
//! | [`factory`] | the interface of a backend, and the adapter for samplers that take logits |
//! | [`laws`] | the laws, one function each |
//! | [`noise_map`], [`granules`] | the laws of a map from words to exponentials, tested without a sampler |
//! | [`report`], [`trial`] | the report of a law, and its inputs |
//! | [`problem`], [`logits`], [`tensor`], [`data`] | the heads and rows that laws draw from |
//! | [`statistics`] | chi-square, Kolmogorov-Smirnov, exact binomial; tails pooled |
//! | [`vectors`] | the files of `vectors/` |
//! | [`mod@suite`] | the macro, skips, and the switch that turns skips into failures |
//!
//! # Skips
//! A factory that cannot run on a machine returns the reason. Its tests are skipped, counted, and printed with the
//! reason. `FLASH_SAMPLING_REQUIRE=cuda,amx` turns a skip into a failure for every factory with one of these words in
//! its name. So a passing run on a GPU machine proves that the GPU tests ran.
#![forbid(unsafe_code)]

pub mod data;
pub mod factory;
pub mod granules;
pub mod laws;
pub mod logits;
pub mod noise_map;
pub mod problem;
pub mod report;
pub mod shared_reference;
pub mod statistics;
pub mod suite;
pub mod tensor;
pub mod trial;
pub mod vectors;

pub use factory::{BuildError, SamplerFactory};
pub use laws::Law;
pub use report::{LawFailure, LawReport};
pub use trial::{Effort, Trial};

/// The example of the README, compiled by the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
