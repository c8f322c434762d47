//! Rows of results, as text and as JSON, files to write to, and names from files in messages.

mod file;
mod json;
pub(crate) mod line;
mod row;
mod text;

pub use file::try_path;
pub use json::write_json;
pub use row::{Drawn, KeptTokens, RowFailure, RowOutcome};
pub(crate) use text::rounded;
pub use text::write_text;
