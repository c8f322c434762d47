//! `flash-sampling kernels`: CUDA kernels compiled ahead of time.

mod build;
mod list;

use crate::args::KernelsCommand;
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use serde_json::Value;
use std::io::{self, Write};

/// Runs a subcommand. The exit code is 1 if `build --check` finds a fault in a hot kernel.
///
/// # Errors
/// Bad flags, no compiler, a folder that cannot be used, Ctrl-C.
pub fn run(command: &KernelsCommand, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    match command {
        KernelsCommand::Build(args) => build::build(args, out, interrupt),
        KernelsCommand::List { format } => list::list(*format, out),
    }
}

fn write_json(out: &mut dyn Write, lines: impl IntoIterator<Item = Value>) -> io::Result<()> {
    lines.into_iter().try_for_each(|line| writeln!(out, "{line}"))
}
