//! Output that all subcommands share: messages, files, progress bars.

mod file;
pub(crate) mod line;
pub mod progress;

pub use file::try_path;
