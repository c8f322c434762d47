//! Rows of results, as text and as JSON.

mod json;
mod row;
mod text;

pub use json::write_json;
pub use row::{Drawn, RowFailure, RowOutcome};
pub use text::write_text;
