//! Progress bars: on standard error, and only when it is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `length` steps with the label `what`, hidden if standard error is not a terminal.
pub fn bar(what: &'static str, length: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix} {wide_bar} {human_pos}/{human_len} {eta} {msg}");
    let bar = ProgressBar::new(length).with_prefix(what);
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
