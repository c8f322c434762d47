//! The samplers of this crate, one per variant of the paper.

mod detached;
mod group_sequence;
mod grouped;
mod online;
mod standalone;
mod stream;
mod tiled;

pub use detached::DetachedTiled;
pub use grouped::Grouped;
pub use online::Online;
pub use standalone::Standalone;
pub use stream::OnlineStream;
pub use tiled::Tiled;
