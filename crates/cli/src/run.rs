//! From the command line to the exit code.

use crate::args::{self, Cli, Command, MAX_THREADS};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::line;
use crate::{bench, copies, generate, info, sample, verify};
use clap::Parser;
use clap::error::ErrorKind;
use std::env;
use std::ffi::OsString;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;

/// The environment variable that says which notes are wanted.
const LOG: &str = "FLASH_SAMPLING_LOG";
/// The environment variable that says how many threads there are where `--threads` does not.
const THREADS: &str = "RAYON_NUM_THREADS";

/// Runs the command: results on standard output, notes and one line for an error on standard error.
///
/// The exit code is 0; 1 when a row or a law failed; 2 for bad usage or files; 130 after Ctrl-C.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let said = env::var(LOG).unwrap_or_default();
    let level = if said.is_empty() { "info" } else { &said };
    let Ok(level) = level.parse::<LevelFilter>() else {
        return fail(2, &format!("{LOG} is {said:?}; it may be off, error, warn, info, debug or trace"));
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        // A note that cannot be written is dropped: to say so on standard error would panic.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .init();
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
            _ => return fail(2, &args::one_line(&error)),
        },
    };
    if let Err(error) = check_threads() {
        return fail(error.exit_code(), &error.one_line());
    }
    let interrupt = Interrupt::listen();
    let mut out = BufWriter::new(io::stdout().lock());
    let outcome = dispatch(&cli.command, &mut out, &interrupt);
    let flushed = out.flush().map_err(CommandError::write("to standard output"));
    match outcome.and_then(|code| flushed.map(|()| code)) {
        Ok(code) => ExitCode::from(code),
        Err(error) if error.exit_code() == 0 => ExitCode::SUCCESS,
        Err(error) => fail(error.exit_code(), &error.one_line()),
    }
}

/// Refuses a number of threads that nobody means. 0 means as many as there are cores, as where it is not set.
fn check_threads() -> Result<(), CommandError> {
    let Some(text) = env::var_os(THREADS) else { return Ok(()) };
    match text.to_str().and_then(|text| text.parse().ok()) {
        Some(0..=MAX_THREADS) => Ok(()),
        _ => Err(CommandError::usage(format!("{THREADS} is {text:?}, not 0 to {MAX_THREADS}"))),
    }
}

fn dispatch(command: &Command, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    copies::tell(command);
    match command {
        Command::Generate(args) => generate::run(args, out, interrupt),
        Command::Sample(args) => sample::run(args, out, interrupt),
        Command::Verify(args) => verify::run(args, out, interrupt),
        Command::Bench(args) => bench::run(args, out, interrupt),
        #[cfg(feature = "cuda")]
        Command::Kernels(command) => crate::kernels::run(command, out, interrupt),
        #[cfg(not(feature = "cuda"))]
        Command::Kernels(_) => Err(flash_sampling::BuildError::NotBuilt { feature: "cuda" }.into()),
        Command::Info { format } => info::run(*format, out),
    }
}

fn fail(code: u8, message: &str) -> ExitCode {
    tell(message);
    ExitCode::from(code)
}

/// One line for an error on standard error, in one write, as other ranks write there too.
pub(crate) fn tell(message: &str) {
    // A closed standard error leaves nobody to tell.
    let _ = io::stderr().write_all(format!("error: {}\n", line::message(message)).as_bytes());
}
