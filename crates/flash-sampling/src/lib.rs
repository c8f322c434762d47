//! Exact token sampling fused into the LM-head matmul.
//!
//! A decode step of a language model ends with `hidden [rows, hidden] x weight [vocab, hidden]^T`, a transform of the
//! logits, and one random draw per row. FlashSampling (Ruiz et al. 2026) adds Gumbel noise to each tile of logits while
//! it is still on chip and keeps one winner per tile: no softmax, no logits tensor, no approximation.
//!
//! ```
//! use flash_sampling::{Backend, BackendConfig, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples, build};
//!
//! // The LM head: weight [vocab, hidden] in bf16, f16 or f32, borrowed. Here 1000 tokens, hidden size 64.
//! let weight: Vec<f32> = (0..1000 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
//! let head = Head::new(Matrix::new(&weight, 1000, 64)?)?;
//! let config = BackendConfig { plan: Plan { max_rows: 2, ..Plan::default() }, ..BackendConfig::default() };
//! let mut sampler: Box<dyn PerturbedArgmax + '_> = build(head, &config)?;
//!
//! // Each step: hidden states [rows, hidden], and for each row its seed and its place in its sequence.
//! let hidden: Vec<f32> = (0..2 * 64).map(|i| (i as f32 * 0.3).cos()).collect();
//! let rows = [5, 17].map(|position| RowParams { seed: 42, position, temperature: 0.8, ..RowParams::default() });
//! let mut samples = Samples::new();
//! sampler.sample(Matrix::new(&hidden, 2, 64)?, &rows, &mut samples)?;
//! let tokens: Vec<u32> = samples.iter().map(|row| Ok(row?.token())).collect::<Result<_, flash_sampling::RowError>>()?;
//! assert!(tokens.iter().all(|&token| token < 1000));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is here
//! The vocabulary of [`flash_sampling_core`] (heads, row parameters, the [`PerturbedArgmax`] trait, noise, summaries,
//! the f64 [`reference`](mod@reference)) and [`build`], which makes any variant on any backend from a
//! [`BackendConfig`]. The backends' own types, for what a configuration cannot say (logits that already exist, a head
//! read from a stream, ranks in threads), are in the modules `cpu`, `distributed` and `cuda`.
//!
//! # Features
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `cpu` | yes | the CPU backend: rayon and SIMD, chosen at run time |
//! | `distributed` | yes | vocabulary shards |
//! | `mpi` | no | `distributed::Mpi`, ranks as processes of MPI; building it needs an MPI library and libclang |
//! | `cuda` | no | the CUDA backend: tiled, grouped, online and streamed, on GPUs of compute capability 8.0 and up; needs no CUDA to build |
//! | `cuda-linked` | no | `cuda` in a program where another crate links NVIDIA's libraries, as candle does |
//! | `nccl` | no | `GpuExchange::Nccl`, GPUs that reduce their draws by NCCL; needs no NCCL to build |
//! | `cuda-probe` | no | `cuda::Probe`, what a machine offers to CUDA, without the backend |
//! | `serde` | no | [`SamplingParamsBuilder`] from and to JSON and its kin |
//! | `cuda-rivals` | no | `cuda::rivals`, what the benchmark compares with: cuBLAS, plain reads, inverse CDF |
//!
//! Without any feature there remains the reference, which is exact and slow.
#![forbid(unsafe_code)]

mod build;
mod config;
#[cfg(all(feature = "cuda", feature = "distributed"))]
mod cuda_rank;

#[cfg(feature = "distributed")]
pub use build::build_rank;
pub use build::{BuildError, MAX_SHARDS, build};
pub use config::{Backend, BackendConfig, VariantConfig};
#[cfg(all(feature = "cuda", feature = "distributed"))]
pub use cuda_rank::{CudaRank, CudaRankOptions, GpuExchange};
pub use flash_sampling_core::*;

#[cfg(feature = "cpu")]
pub use flash_sampling_cpu as cpu;
#[cfg(feature = "cpu")]
pub use flash_sampling_cpu::{CpuError, CpuOptions, Isa};
#[cfg(feature = "cuda-probe")]
pub use flash_sampling_cuda as cuda;
#[cfg(feature = "distributed")]
pub use flash_sampling_distributed as distributed;
#[cfg(feature = "distributed")]
pub use flash_sampling_distributed::{ShardError, ShardMerge};

/// The examples of the README, compiled and run by the doctests.
#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../../../README.md")]
mod readme {}
