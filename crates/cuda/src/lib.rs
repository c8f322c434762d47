//! The CUDA backend of FlashSampling: sampling fused into the matmul, for GPUs of compute capability 8.0 and later.
//!
//! The kernels are CUDA C++ under `kernels/`, embedded in the crate. NVIDIA's run-time compiler (NVRTC) compiles them
//! for the GPU at first use, and the result is kept on disk (see [`cache`]). Hosts with only a driver need kernels that
//! are compiled ahead of time (see [`ahead`]). The crate links nothing, so it builds and runs on every machine.
//! [`CudaError::Unavailable`] reports a missing driver or GPU, or a missing compiler for a kernel that is not compiled.
//!
//! | type | inputs | a call |
//! | --- | --- | --- |
//! | [`CudaTiled`] | host memory | copies rows and hidden states to the GPU, launches, copies the draws to the host, waits |
//! | [`DeviceSampler`] | weight and hidden states, or existing logits, in device memory | copies row parameters to the GPU, launches on the caller's stream, copies the draws to the host, waits |
//! | [`DeviceTiled`] | device memory, on the caller's stream | one launch, two for fp8 and int8 on Hopper; allocates nothing, does not wait |
//! | [`RowEncoder`] | row parameters | none: encodes the rows of a launch, at a fixed address for a captured graph |
//! | [`CudaTiled`] with a [`CudaExchange`] | one shard; hidden states on the host, or [`DeviceHidden`] | as above, for the vocabulary of all ranks |
//! | [`DevicePeers`] | draws of one shard in device memory | one launch: merges the draws of all shards, over NVLink |
//! | `DeviceNccl` (feature `nccl`) | draws of one shard in device memory | three launches: merges the draws of all shards, over NCCL |
//! | [`DeviceFilters`] after [`DeviceTiled`] | device memory, on the caller's stream | two to four launches; does not wait; only the first call that stores logits allocates |
//! | [`CudaGrouped`], [`CudaOnline`] | host memory | as [`CudaTiled`], with a draw by groups |
//! | [`CudaStreamed`] | host memory, the weight from a reader in blocks | reads, copies and multiplies at the same time |
//! | [`CudaStandalone`] | existing logits in host memory | copies the logits to the GPU, launches, copies the draws to the host, waits |
//! | [`DeviceStandalone`] | existing logits in device memory, on the caller's stream | one launch; allocates nothing, does not wait |
//!
//! One fused kernel is for Hopper, another for all GPUs of compute capability 8.0 and later. Both use tensor cores for
//! bf16 or f16, and on one GPU they give the same bits (measured on an H200). Tensor cores of another generation round
//! products differently, so only a canonical plan guarantees the same bits on other GPUs. Float32 and pairs of
//! different types do not use tensor cores. Every layout of device memory is supported; the layout affects only the
//! speed.
//!
//! The variants with groups (paper Alg. I.2 and I.3) use the portable kernel, which writes log-masses and samples of
//! groups. A second kernel draws from them.
//!
//! The GPU decides min-p, top-k and top-p in the orders that engines use. On Hopper, the fused kernel lists the largest
//! logits of rows with min-p or top-k first; in other cases it stores all logits. A second kernel filters and draws.
//! The core crate's selector on the host decides other filters, and the few rows that the kernels leave undecided.
//!
//! Over device memory, log Z on request (paper App. L) gives the log-probability of a draw:
//! [`DeviceTiled::launch_with_log_z`]. The samplers compute log-probabilities, lists without replacement and canonical
//! plans from stored logits. Their log Z is a sum of integers with the same bits on every backend and for all shards.
//!
//! The feature `nccl` adds the exchange between GPUs over NCCL.
//!
//! ```
//! use flash_sampling_core::{Head, Matrix, Plan};
//! use flash_sampling_cuda::{CudaTiled, Device};
//!
//! let weight = [0.0f32; 8];
//! let head = Head::new(Matrix::new(&weight, 4, 2)?)?;
//! match Device::new(0).and_then(|device| CudaTiled::new(head, Plan::default(), &device)) {
//!     Ok(_) => println!("planned"),
//!     Err(error) => println!("{error}"),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]
// Without the feature `nccl`, the documentation still links to its items.
#![cfg_attr(not(feature = "nccl"), allow(rustdoc::broken_intra_doc_links))]

pub mod abi;
mod compile;
mod device;
#[cfg(test)]
#[path = "../tests/emulated/mod.rs"]
mod emulated;
mod error;
mod exchange;
mod first_use;
mod sampler;
mod selection;

#[cfg(feature = "nccl")]
pub use crate::exchange::nccl::{DeviceNccl, NcclEndpoint, NcclId, nccl_version};
pub use crate::{
    abi::DeviceAddress,
    compile::{
        ahead,
        architecture::{Architecture, UnknownArchitecture},
        cache,
        cached_kernel::{CompilerVersion, KernelHeader},
        nvrtc::version as compiler,
        resources::Resources,
    },
    device::{
        gpu::Device,
        head::{DeviceHead, DeviceShadow, ShadowMemory},
        matrix::{DeviceMatrix, DeviceScales},
        row_features::{KernelChoice, RowFeatures},
        standalone::{DeviceDraws, DeviceStandalone},
        tiled::DeviceTiled,
    },
    error::CudaError,
    exchange::{
        cuda_exchange::CudaExchange,
        peers::{DevicePeers, PeerEndpoint},
    },
    sampler::{
        column_call::ColumnCall,
        device_sampler::{DeviceHidden, DeviceSampler},
        grouped::CudaGrouped,
        online::CudaOnline,
        row_encoder::{RowEncodeError, RowEncoder},
        standalone::CudaStandalone,
        streamed::CudaStreamed,
        tiled::CudaTiled,
    },
    selection::filtered::{DeviceFilters, FilterKinds},
};
pub use cudarc;
