//! Other ways to a token on a GPU: NVIDIA's matrix product, softmax with inverse CDF over its logits, and NCCL's gather of
//! logits. For measurements only.
//!
//! Every call enqueues on the caller's stream and allocates nothing there, so events around a call time the work itself.

#[cfg(feature = "nccl")]
mod gather;
mod matmul;
mod softmax;

#[cfg(feature = "nccl")]
pub use gather::Gather;
pub use matmul::Matmul;
pub use softmax::InverseCdf;
