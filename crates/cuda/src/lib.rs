//! The CUDA backend of FlashSampling: the draw fused into the matmul, for GPUs of compute capability 8.0 and up.
//!
//! The kernels are CUDA C++ under `kernels/`, embedded here and compiled for the GPU by NVIDIA's run-time compiler
//! (NVRTC): at first use, and then kept on disk (see [`cache`]), or ahead of time (see [`ahead`]), for hosts that have a
//! driver only. Nothing is linked: the crate builds and runs on every machine, and where the driver, a GPU, or both a
//! compiled kernel and the compiler are missing, planning answers [`CudaError::Unavailable`] with what was looked for.
//!
//! | type | inputs | a call |
//! | --- | --- | --- |
//! | [`CudaTiled`] | host memory | copies rows and hidden states up, launches, copies the draws down, waits |
//! | [`DeviceSampler`] | weight and hidden states in device memory | copies row parameters up, launches on the caller's stream, copies the draws down, waits |
//! | [`DeviceTiled`] | device memory, on the caller's stream | one launch; allocates nothing, waits for nothing |
//! | [`RowEncoder`] | row parameters | none: encodes the rows of a launch, which a captured graph finds at a fixed address |
//! | [`CudaTiled`] with a [`CudaExchange`] | one shard; hidden states on the host, or [`DeviceHidden`] | as above, for the vocabulary of all ranks |
//! | [`DevicePeers`] | draws of one shard in device memory | one launch: the draws of all ranks' shards, over NVLink |
//! | `DeviceNccl` (feature `nccl`) | the same | three launches: the same, by NCCL |
//! | [`DeviceFilters`] after [`DeviceTiled`] | device memory, on the caller's stream | two or three launches; allocates nothing, but for the first that stores logits, waits for nothing |
//! | [`CudaGrouped`], [`CudaOnline`] | host memory | as [`CudaTiled`], with a draw by groups |
//! | [`DeviceGroups`] | device memory, on the caller's stream | three launches; allocates nothing, waits for nothing |
//! | [`CudaStreamed`] | host memory, the weight from a reader in blocks | reads, copies and multiplies at once |
//! | [`CudaStandalone`] | existing logits in host memory | copies them up, launches, copies the draws down, waits |
//! | [`DeviceStandalone`] | existing logits in device memory, on the caller's stream | one launch; allocates nothing, waits for nothing |
//!
//! One fused kernel is for Hopper, one for every GPU of compute capability 8.0 and up. Both multiply bf16 or f16 on tensor
//! cores, and on one GPU they give the same bits (measured on an H200). A tensor core of another generation rounds within
//! a product in another way, so only a canonical plan promises the same bits there. Tensor cores do not multiply float32,
//! and pairs of different types. The layout of device memory decides how fast inputs are read, not whether.
//!
//! The variants with groups (paper Alg. I.2 and I.3) use the portable kernel, which writes log-masses and samples of
//! groups. A second kernel draws from them by a [`GroupRule`].
//!
//! The GPU decides min-p, top-k and top-p in the orders that engines use. On Hopper, the draw lists the largest logits of
//! rows where min-p or top-k comes first; elsewhere it stores all logits. A second kernel filters and draws. The host
//! decides other filters, and the few rows that the kernels leave undecided, by core's selector.
//!
//! Over device memory, log Z on request (paper App. L) gives the log-probability of a draw:
//! [`DeviceTiled::launch_with_log_z`], [`DeviceGroups::launch`], [`DeviceDraws::log_z`]. The samplers serve
//! log-probabilities, lists without replacement and canonical plans from stored logits; their log Z is a sum of integers
//! with the same bits on every backend and for every sharding.
//!
//! # Features
//! `driver` is all of the above; without it, the crate has the [`Probe`] alone, which looks at the file system. `nccl` adds
//! the exchange between GPUs by NCCL.
//!
//! ```
//! # #[cfg(feature = "driver")] {
//! use flash_sampling_core::{Head, Matrix, Plan};
//! use flash_sampling_cuda::{CudaTiled, Device};
//!
//! let weight = [0.0f32; 8];
//! let head = Head::new(Matrix::new(&weight, 4, 2)?)?;
//! match Device::new(0).and_then(|device| CudaTiled::new(head, Plan::default(), &device)) {
//!     Ok(_) => println!("planned"),
//!     Err(error) => println!("{error}"),
//! }
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]
// Without the feature the documentation still tells of what it adds.
#![cfg_attr(not(feature = "nccl"), allow(rustdoc::broken_intra_doc_links))]

mod probe;

#[cfg(feature = "driver")]
pub mod abi;
#[cfg(feature = "driver")]
mod compile;
#[cfg(feature = "driver")]
mod device;
#[cfg(all(test, feature = "driver"))]
#[path = "../tests/emulated/mod.rs"]
mod emulated;
#[cfg(feature = "driver")]
mod error;
#[cfg(feature = "driver")]
mod exchange;
#[cfg(feature = "driver")]
mod sampler;
#[cfg(feature = "driver")]
mod selection;

pub use probe::Probe;

#[cfg(feature = "nccl")]
pub use crate::exchange::nccl::{DeviceNccl, NcclEndpoint, NcclId, nccl_version};
#[cfg(feature = "driver")]
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
        groups::DeviceGroups,
        head::DeviceHead,
        matrix::DeviceMatrix,
        noise_math::NoiseMath,
        row_features::{KernelChoice, RowFeatures},
        select::GroupRule,
        standalone::{DeviceDraws, DeviceStandalone},
        tiled::DeviceTiled,
    },
    error::CudaError,
    exchange::{
        cuda_exchange::CudaExchange,
        peers::{DevicePeers, PeerEndpoint},
    },
    sampler::{
        device_sampler::{DeviceHidden, DeviceSampler},
        grouped::CudaGrouped,
        logits::CudaStandalone,
        online::CudaOnline,
        row_encoder::{RowEncodeError, RowEncoder},
        streamed::CudaStreamed,
        tiled::CudaTiled,
    },
    selection::filtered::{DeviceFilters, FilterKinds},
};
#[cfg(feature = "driver")]
pub use cudarc;
