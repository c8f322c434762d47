//! The CUDA backend of FlashSampling.
//!
//! The sources of the kernels are in `kernels/`; this build contains **no kernels**: nothing compiles or launches them
//! yet. [`Cuda::new`] therefore always answers [`CudaError::Unavailable`], with what a
//! [`Probe`] of the machine found: GPU device nodes, the version of the kernel driver and the driver library. Nothing
//! is linked and no library is loaded, so the crate builds and runs on every machine.
//!
//! ```
//! use flash_sampling_core::{Head, Matrix, Plan};
//! use flash_sampling_cuda::Cuda;
//!
//! let weight = [0.0f32; 8];
//! let head = Head::new(Matrix::new(&weight, 4, 2)?)?;
//! let error = Cuda::new(head, Plan::default()).unwrap_err();
//! assert!(error.to_string().starts_with("CUDA is unavailable: this build contains no CUDA kernels"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod cuda;
mod error;
mod probe;

pub use cuda::Cuda;
pub use error::CudaError;
pub use probe::Probe;
