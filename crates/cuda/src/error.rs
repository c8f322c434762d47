//! Why there is no CUDA sampler.

use crate::probe::Probe;

/// Why there is no CUDA sampler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// This build contains no CUDA kernels; the probe says whether the machine could run any.
    #[error("CUDA is unavailable: this build contains no CUDA kernels (on this machine: {probe})")]
    Unavailable {
        /// What was looked for and found.
        probe: Probe,
    },
}
