//! Rows of results, as text and as JSON, and files to write to.

mod file;
mod json;
mod row;
mod text;

pub use file::try_path;
pub use json::write_json;
pub use row::{Drawn, KeptTokens, RowFailure, RowOutcome};
pub(crate) use text::rounded;
pub use text::write_text;
