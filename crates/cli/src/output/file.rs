//! Files that results are written to at the end.

use crate::error::CommandError;
use std::fs::OpenOptions;
use std::path::Path;

/// Opens a file for writing and leaves it as it is, so that a path that cannot be written is found before the work and
/// not after it. A file that is not there is made, empty.
///
/// # Errors
/// [`CommandError::Write`], naming the file.
pub fn try_path(path: &Path) -> Result<(), CommandError> {
    let opened = OpenOptions::new().create(true).append(true).open(path);
    opened.map(drop).map_err(CommandError::write(path.display().to_string()))
}
