//! Benchmarks against other programs, of filters, and of ranks.
//!
//! The program is `flash-sampling-bench`; docs/performance.md has its figures. Inputs, timing, records and tables are
//! shared with `flash-sampling bench`.
//!
//! | module | content |
//! | --- | --- |
//! | [`args`] | the command line |
//! | [`cpu`] | variants and a row of existing logits on the CPU |
//! | [`filters`] | filters, penalties and masks against the plain draw |
//! | `gpu` | one GPU: the fused kernel against cuBLAS and samplers over its logits (feature `cuda`) |
//! | `ranks` | several GPUs (feature `cuda`) |
//! | [`record`] | the record of a run |
//! | `rivals` | cuBLAS, softmax with inverse CDF, NCCL's all-gather (feature `cuda`) |

pub mod args;
pub mod cpu;
pub mod filters;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod ranks;
pub mod record;
#[cfg(feature = "cuda")]
pub mod rivals;

/// The example of docs/knobs.md as a doctest. It is in this crate because no package contains the page.
#[cfg(doctest)]
#[doc = include_str!("../../docs/knobs.md")]
mod knobs {}
