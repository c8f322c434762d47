//! Output files.

use crate::error::CommandError;
use std::fs::OpenOptions;
use std::path::Path;

/// Checks before the work that a file can be written. The content of an existing file stays; a missing file is created
/// empty.
///
/// # Errors
/// [`CommandError::Write`], which names the file.
pub fn try_path(path: &Path) -> Result<(), CommandError> {
    let opened = OpenOptions::new().create(true).append(true).open(path);
    opened.map(drop).map_err(CommandError::write(path.display().to_string()))
}
