//! What the benchmark compares with, on a GPU: the physical limit of a read, NVIDIA's matrix product, and softmax with
//! inverse CDF over its logits. For measuring alone; samplers never use it.
//!
//! Everything enqueues on the stream that it is given and allocates nothing there, so events around a call time the
//! work itself.

#[cfg(feature = "nccl")]
mod gather;
mod matmul;
mod read;
mod softmax;

#[cfg(feature = "nccl")]
pub use gather::Gather;
pub use matmul::Matmul;
pub use read::{Read, Way};
pub use softmax::InverseCdf;

#[cfg(test)]
pub(crate) use read::SOURCE as READ;
#[cfg(test)]
pub(crate) use softmax::SOURCE as SOFTMAX;
