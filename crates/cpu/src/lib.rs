//! FlashSampling on the CPU: the draw fused into the LM-head matmul.
#![doc = ""]

mod canonical;
mod dot;
mod engine;
mod error;
mod isa;
mod options;
mod perturb;
mod standalone;
mod state;
mod tile;
mod tiled;
mod words;

pub use error::CpuError;
pub use isa::{Isa, ParseIsaError};
pub use options::CpuOptions;
pub use standalone::Standalone;
pub use tiled::Tiled;
