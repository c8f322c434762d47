//! Exact token sampling fused into the LM-head matmul.
//!
//! A decode step of a language model ends with `hidden [rows, hidden] x weight [vocab, hidden]^T`, a transform of the
//! logits, and one random draw per row. FlashSampling (Ruiz et al. 2026) adds Gumbel noise to each tile of logits while
//! it is still on chip and keeps one winner per tile: no softmax, no logits tensor, no approximation.
//!
//! ```
//! use flash_sampling::{Backend, BackendConfig, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples, build};
//!
//! // The LM head: weight [vocab, hidden] in bf16, f16, f32 or blocks of GGUF, borrowed. Here 1000 tokens, hidden size 64.
//! let weight: Vec<f32> = (0..1000 * 64).map(|i| (i as f32 * 0.7).sin()).collect();
//! let head = Head::new(Matrix::new(&weight, 1000, 64)?)?;
//! let config = BackendConfig { plan: Plan { max_rows: 2, ..Plan::default() }, ..BackendConfig::default() };
//! let mut sampler: Box<dyn PerturbedArgmax + '_> = build(head, &config)?;
//!
//! // Each step: hidden states [rows, hidden], and for each row its seed and its position in its sequence.
//! let hidden: Vec<f32> = (0..2 * 64).map(|i| (i as f32 * 0.3).cos()).collect();
//! let rows = [5, 17].map(|position| RowParams { seed: 42, position, temperature: 0.8, ..RowParams::default() });
//! let mut samples = Samples::new();
//! sampler.sample(Matrix::new(&hidden, 2, 64)?, &rows, &mut samples)?;
//! let tokens: Vec<u32> = samples.iter().map(|row| Ok(row?.token())).collect::<Result<_, flash_sampling::RowError>>()?;
//! assert!(tokens.iter().all(|&token| token < 1000));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Contents
//! | to | use |
//! | --- | --- |
//! | build a sampler from a configuration, a value or text | [`build`], [`build_owned`], [`build_from_logits`], [`BackendConfig`] |
//! | sample | [`PerturbedArgmax`], [`RowParams`], [`Samples`] |
//! | parse a request, and draw its next token | [`SamplingParams`], [`History`], [`RowBuffer`] |
//! | borrow weights and hidden states | [`Head`], [`Matrix`] |
//! | read half the bytes of a weight | [`make_shadow`], [`Shadow`], [`Head::with_shadow`], [`BackendConfig`] |
//! | replay the noise of a token | [`Noise`], [`noise`](mod@noise) |
//! | verify draft tokens of a smaller model | [`speculation`] |
//! | compare with a plain implementation | [`reference`](mod@reference) |
//! | implement a backend | [`backend`], whose items are exempt from semantic versioning |
//!
//! # All samplers
//! | sampler | device | input |
//! | --- | --- | --- |
//! | [`cpu::Tiled`], [`cpu::Grouped`], [`cpu::Online`] | CPU | hidden states |
//! | [`cpu::OnlineStream`] | CPU | hidden states, with a weight read block by block |
//! | [`cpu::Standalone`] | CPU | existing logits |
//! | [`cuda::CudaTiled`], [`cuda::CudaGrouped`], [`cuda::CudaOnline`] | GPU, host memory in and out | hidden states |
//! | [`cuda::CudaStreamed`] | GPU | hidden states, with a weight read block by block |
//! | [`cuda::CudaStandalone`] | GPU | existing logits |
//! | [`cuda::DeviceSampler`] | GPU, device memory | hidden states, or existing logits |
//! | [`cuda::DeviceTiled`] | GPU, device memory | hidden states |
//! | [`distributed::Sharded`] | shards in one process | hidden states or logits, as its shards |
//! | [`distributed::ShardSampler`] | one rank of a [`distributed::Transport`] | hidden states or logits, as its shard |
//! | [`CudaRank`] | one rank on a GPU | hidden states, in host or device memory |
//! | [`reference::Reference`] | anywhere, slow | hidden states |
//!
//! `CudaTiled` copies a weight from host memory once, and hidden states in every call. `DeviceSampler` reads both in place
//! from the caller's device memory, and waits for the results. `DeviceTiled` launches one kernel on the caller's stream
//! and writes the draws to device memory, so a CUDA graph can capture it.
//!
//! # Features
//! | feature | default | content |
//! | --- | --- | --- |
//! | `cpu` | yes | the CPU backend: rayon and SIMD, chosen at run time |
//! | `distributed` | yes | vocabulary shards |
//! | `mpi` | no | `distributed::Mpi`, ranks as processes of MPI; the build needs an MPI library and libclang |
//! | `cuda` | no | the CUDA backend: tiled, grouped, online, streamed and existing logits, on GPUs of compute capability 8.0 and up; the build needs no CUDA |
//! | `cuda-linked` | no | `cuda` in a program where another crate links NVIDIA's libraries, as candle does |
//! | `nccl` | no | `GpuExchange::Nccl`, GPUs that reduce their draws by NCCL; the build needs no NCCL |
//! | `shadow-file` | no | `ShadowFile` and `write_shadow`, the shadow of a weight from and to files |
//! | `serde` | no | [`SamplingParamsBuilder`] and [`BackendConfig`] from and to JSON and similar formats |
//!
//! Without features, the crate has only the reference, which is exact and slow.
//!
//! # Compatibility
//! * Types that a user fills in are struct literals: [`RowParams`], [`Plan`], [`BackendConfig`] and the backends'
//!   options. They may get fields, so end a literal with `..Default::default()`. A new field's default changes nothing.
//! * Types that a user reads are `non_exhaustive`: [`RowSample`], [`Draw`], [`Kept`], errors, knobs, variants,
//!   backends.
//! * [`backend`], methods "for implementers" and methods with types of [`backend`] may change in any release.
//!   [`Capabilities`] may get a field.
#![forbid(unsafe_code)]
// The table of samplers links to samplers of features that may be off.
#![cfg_attr(
    not(all(feature = "cpu", feature = "cuda", feature = "distributed")),
    allow(rustdoc::broken_intra_doc_links)
)]

mod build;
mod config;
#[cfg(all(feature = "cuda", feature = "distributed"))]
mod cuda_rank;
mod owned;
#[cfg(feature = "shadow-file")]
mod shadow_file;

#[cfg(feature = "distributed")]
pub use build::build_rank;
pub use build::{BuildError, MAX_SHARDS, build, build_from_logits, capabilities_of};
pub use config::{Backend, BackendConfig, ParseConfigError, VariantConfig};
#[cfg(all(feature = "cuda", feature = "distributed"))]
pub use cuda_rank::{CudaRank, CudaRankOptions, GpuExchange};
pub use owned::{HeadOwner, OwnedWeight, build_owned, make_shadow};
#[cfg(feature = "shadow-file")]
pub use shadow_file::{ShadowFile, ShadowFileError, write_shadow};
// Samplers and their results.
#[doc(inline)]
pub use flash_sampling_core::{
    Capabilities, Description, Draw, Exactness, Input, Kept, PerturbedArgmax, Plan, RowSample, SampleError, Samples,
    Shape, Variant, log_prob, reference, speculation,
};
// Heads and inputs.
#[doc(inline)]
pub use flash_sampling_core::{
    DType, Element, Head, HeadError, Matrix, Shadow, ShadowBuffer, StreamError, StreamHead, round_as_ggml,
};
#[doc(no_inline)]
pub use flash_sampling_core::{bf16, f16};
// The parameters of a row, and of a request.
#[doc(inline)]
pub use flash_sampling_core::{
    History, Knob, KnobValue, Knobs, LogprobsMode, Order, ParamsError, RowBuffer, RowError, RowParams, SamplingParams,
    SamplingParamsBuilder,
};
// The noise of a token.
#[doc(inline)]
pub use flash_sampling_core::{Domain, Noise, NoiseRng, noise};
// For implementers of samplers.
#[doc(inline)]
pub use flash_sampling_core::backend;

#[cfg(feature = "cpu")]
pub use flash_sampling_cpu as cpu;
#[cfg(feature = "cpu")]
pub use flash_sampling_cpu::{CpuError, CpuOptions, Isa};
#[cfg(feature = "cuda")]
pub use flash_sampling_cuda as cuda;
#[cfg(feature = "distributed")]
pub use flash_sampling_distributed as distributed;
#[cfg(feature = "distributed")]
pub use flash_sampling_distributed::{ShardError, ShardMerge};

/// The examples of the README, compiled and run by the doctests.
#[cfg(all(doctest, feature = "cpu"))]
#[doc = include_str!("../README.md")]
mod readme {}
