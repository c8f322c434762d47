//! From the embedded sources to machine code that a GPU takes. Needs no GPU.
//!
//! ```text
//! kernels + sources -> machine_code -> a file of a folder (cache, kept_kernel, trust)
//!                                   -> the compiler (nvrtc), and then into the cache
//! ahead             -> the compiler for every kernel, with what each takes (resources)
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
