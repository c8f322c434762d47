//! Compiles the embedded sources to machine code for a GPU. Needs no GPU.
//!
//! ```text
//! kernels + sources -> loader -> a file in a folder (cache, cached_kernel, permissions)
//!                             -> or the compiler (nvrtc), and then a file in the cache
//! ahead             -> the compiler for every kernel, with the resources of each (resources)
//! ```

pub mod ahead;
pub(crate) mod architecture;
pub mod cache;
pub(crate) mod cached_kernel;
mod instructions;
pub(crate) mod kernels;
pub(crate) mod loader;
pub(crate) mod nvrtc;
mod permissions;
pub(crate) mod resources;
pub(crate) mod sources;

pub(crate) use architecture::Architecture;
pub(crate) use cached_kernel::{CompilerVersion, KernelHeader};
pub(crate) use kernels::{Instance, KernelSource};
pub(crate) use loader::Request;
pub(crate) use resources::Resources;
