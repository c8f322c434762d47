//! Output that all subcommands share: messages, files, progress bars.

pub(crate) mod line;

use crate::error::CommandError;
use indicatif::{ProgressBar, ProgressStyle};
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

/// A progress bar of `length` steps with the label `what`, hidden if standard error is not a terminal.
pub fn bar(what: &'static str, length: u64) -> ProgressBar {
    let bar = ProgressBar::new(length).with_prefix(what);
    match ProgressStyle::with_template("{prefix} {wide_bar} {human_pos}/{human_len} {eta} {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
