//! The Python package `flash_sampling`: the facade over tensors of torch, numpy, JAX and CuPy.
//!
//! | module | content |
//! | --- | --- |
//! | `tensor` | borrowed tensors: matrices, numbers, bitmaps |
//! | `borrow`, `dlpack` | tensors of Python libraries, by numpy's array interface or DLPack |
//! | `column` | one number per row, from a scalar, a sequence or a tensor |
//! | `head`, `sampler`, `params`, `history`, `result`, `noise` | the classes and functions of the package |
//! | `scales`, `gguf` | the scales of a weight of 8-bit elements; the head of a GGUF file |
//! | `rows` | converts the arguments of a call into the parameters of its rows |
//! | `engine`, `cuda` | the Rust sampler behind a Python `Sampler`, on the CPU or on a GPU |
//! | `group` | the ranks of a sampler whose vocabulary is sharded |
//! | `fork` | refuses the threads of a parent process |
//! | `error` | converts errors into Python exceptions |
//!
//! The folder `python` has the package's Python files and the stub file of this module.
#![deny(unsafe_code)]
// `cargo test --lib` would link a test program to Python's library.
#![cfg(not(test))]

mod borrow;
mod column;
mod cuda;
mod device_call;
mod dlpack;
mod engine;
mod error;
mod fork;
mod gguf;
mod group;
mod head;
mod history;
mod noise;
mod params;
mod result;
mod rows;
mod sampler;
mod scales;
mod tensor;

/// The native module of the package.
#[pyo3::pymodule]
mod _lib {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::error::FlashSamplingError;
    #[pymodule_export]
    use crate::head::Head;
    #[pymodule_export]
    use crate::history::History;
    #[pymodule_export]
    use crate::noise::noise;
    #[pymodule_export]
    use crate::params::SamplingParams;
    #[pymodule_export]
    use crate::result::{Draw, Kept, RowSample};
    #[pymodule_export]
    use crate::sampler::Sampler;

    /// The version of NVIDIA's run-time compiler, as (major, minor); `None` if its library cannot be loaded.
    #[pyfunction]
    fn cuda_compiler() -> Option<(u32, u32)> {
        flash_sampling::cuda::compiler().map(|version| (version.major, version.minor))
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        crate::error::add_attributes(module.py())
    }
}
