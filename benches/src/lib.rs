//! Benchmarks against other programs, of filters, and of ranks. The program is `flash-sampling-bench`; docs/performance.md
//! has its figures. Inputs, timing, records and tables are those of `flash-sampling bench`.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`args`] | the command line |
//! | [`cpu`] | variants and a row of existing logits on the CPU |
//! | [`filters`] | filters, penalties and masks against the plain draw |
//! | `gpu` | one GPU: the fused kernel against cuBLAS and samplers over its logits (feature `cuda`) |
//! | `ranks` | several GPUs (feature `cuda`) |
//! | [`record`] | the record of a run |
//! | `rivals` | cuBLAS, softmax with inverse CDF, NCCL's all-gather (feature `cuda`) |
//! | `candle` | candle on the CPU (feature `candle`) |

pub mod args;
#[cfg(feature = "candle")]
pub mod candle;
pub mod cpu;
pub mod filters;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod ranks;
pub mod record;
#[cfg(feature = "cuda")]
pub mod rivals;

/// The example of docs/knobs.md, compiled and run by the doctests: here, as the page is in no package.
#[cfg(doctest)]
#[doc = include_str!("../../docs/knobs.md")]
mod knobs {}
