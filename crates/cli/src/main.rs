//! The `flash-sampling` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    flash_sampling_cli::run(std::env::args_os())
}
