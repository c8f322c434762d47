//! Output that all subcommands share: messages, files, progress bars, plots.

mod file;
pub(crate) mod line;
pub mod plot;
pub mod progress;

pub use file::try_path;
