//! Other ways from hidden states to a token on a GPU, for measurements only: NVIDIA's matrix product, softmax with
//! inverse CDF over its logits, and NCCL's gather of logits.
//!
//! Every call enqueues on the caller's stream and allocates no memory, so events around a call time the work itself.

#[cfg(feature = "nccl")]
mod gather;
mod matmul;
mod softmax;

#[cfg(feature = "nccl")]
pub use gather::Gather;
pub use matmul::Matmul;
pub use softmax::InverseCdf;
