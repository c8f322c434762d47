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
//! | [`DeviceTiled`] | device memory, on the caller's stream | one launch; allocates nothing, waits for nothing |
//! | [`CudaGrouped`], [`CudaOnline`] | host memory | the same, with a draw by groups |
//! | [`DeviceGroups`] | device memory, on the caller's stream | two launches; allocates nothing, waits for nothing |
//! | [`CudaStreamed`] | host memory, the weight from a reader in blocks | reads, copies and multiplies at once |
//! | [`CudaStandalone`] | existing logits in host memory | copies them up, launches, copies the draws down, waits |
//! | [`DeviceStandalone`] | existing logits in device memory, on the caller's stream | one launch; allocates nothing, waits for nothing |
//!
//! One fused kernel is for Hopper, one for every GPU of compute capability 8.0 and up; both multiply bf16 or f16 on tensor
//! cores and, on one GPU, give the same bits (measured on an H200). Across generations only a canonical plan promises the
//! same bits: how a tensor core rounds within a product is its own. Float32 and pairs of different types are multiplied without tensor cores. The layout
//! of device memory decides how fast inputs are read, not whether.
//!
//! The variants with groups (paper Alg. I.2 and I.3) are made by the portable kernel: it leaves log-masses and samples of
//! groups in place of winners, and a second kernel draws from those by a [`GroupRule`].
//!
//! Log-probabilities, lists without replacement and canonical plans are served over host memory: the transformed logits
//! of the rows that ask are stored on the GPU, some rows at a time, and kernels over those sum masses, find the best
//! tokens, and evaluate near ties again in the canonical float64 order.
//!
//! # Features
//! `driver` is all of the above. Without it there is the [`Probe`] alone, which looks at the file system. `rivals` adds
//! [`rivals`], what the benchmark compares with.
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
#![cfg_attr(not(feature = "rivals"), allow(rustdoc::broken_intra_doc_links))]

mod probe;

#[cfg(feature = "driver")]
pub mod abi;
#[cfg(feature = "driver")]
pub mod ahead;
#[cfg(feature = "driver")]
mod answers;
#[cfg(feature = "driver")]
mod architecture;
#[cfg(feature = "driver")]
pub mod cache;
#[cfg(feature = "driver")]
mod compile;
#[cfg(feature = "driver")]
mod device;
#[cfg(feature = "driver")]
mod device_groups;
#[cfg(feature = "driver")]
mod device_matrix;
#[cfg(feature = "driver")]
mod device_standalone;
#[cfg(feature = "driver")]
mod device_tiled;
#[cfg(feature = "driver")]
mod entry;
#[cfg(feature = "driver")]
mod error;
#[cfg(feature = "driver")]
mod frame;
#[cfg(feature = "driver")]
mod fused_hopper;
#[cfg(feature = "driver")]
mod fused_portable;
#[cfg(feature = "driver")]
mod grouped;
#[cfg(feature = "driver")]
mod kernels;
#[cfg(feature = "driver")]
mod launch;
#[cfg(feature = "driver")]
mod machine_code;
#[cfg(feature = "driver")]
mod noise_math;
#[cfg(feature = "driver")]
mod online;
#[cfg(feature = "driver")]
mod resident;
#[cfg(feature = "driver")]
mod resources;
#[cfg(feature = "rivals")]
pub mod rivals;
#[cfg(feature = "driver")]
mod scratch;
#[cfg(feature = "driver")]
mod select;
#[cfg(feature = "driver")]
mod sources;
#[cfg(feature = "driver")]
mod staging;
#[cfg(feature = "driver")]
mod standalone;
#[cfg(feature = "driver")]
mod stored;
#[cfg(feature = "driver")]
mod streamed;
#[cfg(feature = "driver")]
mod tensor_map;
#[cfg(feature = "driver")]
mod tiled;
#[cfg(feature = "driver")]
mod trust;

pub use probe::Probe;

#[cfg(feature = "driver")]
pub use architecture::{Architecture, UnknownArchitecture};
#[cfg(feature = "driver")]
pub use compile::version as compiler;
#[cfg(feature = "driver")]
pub use cudarc;
#[cfg(feature = "driver")]
pub use device::Device;
#[cfg(feature = "driver")]
pub use device_groups::DeviceGroups;
#[cfg(feature = "driver")]
pub use device_matrix::DeviceMatrix;
#[cfg(feature = "driver")]
pub use device_standalone::{DeviceDraws, DeviceStandalone};
#[cfg(feature = "driver")]
pub use device_tiled::{DeviceHead, DeviceTiled, KernelChoice};
#[cfg(feature = "driver")]
pub use entry::{CompilerVersion, Label};
#[cfg(feature = "driver")]
pub use error::CudaError;
#[cfg(feature = "driver")]
pub use grouped::CudaGrouped;
#[cfg(feature = "driver")]
pub use noise_math::NoiseMath;
#[cfg(feature = "driver")]
pub use online::CudaOnline;
#[cfg(feature = "driver")]
pub use resources::Resources;
#[cfg(feature = "driver")]
pub use select::GroupRule;
#[cfg(feature = "driver")]
pub use standalone::CudaStandalone;
#[cfg(feature = "driver")]
pub use streamed::CudaStreamed;
#[cfg(feature = "driver")]
pub use tiled::CudaTiled;
