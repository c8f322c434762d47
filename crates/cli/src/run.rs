//! From the command line to the exit code.

use crate::args::{self, Cli, Command, TransportName};
use crate::error::{CommandError, print_error};
use crate::interrupt::Interrupt;
use crate::{bench, generate, info, sample, shadow, verify};
use clap::Parser;
use clap::error::ErrorKind;
use std::env;
use std::ffi::OsString;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;

/// The environment variable of the log level.
const LOG: &str = "FLASH_SAMPLING_LOG";
/// The environment variable of the number of threads, for samplers without a number in `--backend`.
const THREADS: &str = "RAYON_NUM_THREADS";
/// Maximum of threads, as in the library.
const MAX_THREADS: usize = 1024;

/// Runs the command. Results go to standard output, log lines and one line for an error to standard error.
///
/// The exit code is 0 for success, 1 if a row or a law failed, 2 for bad usage or files, and 130 after Ctrl-C.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let given = env::var(LOG).unwrap_or_default();
    let level = if given.is_empty() { "info" } else { &given };
    let Ok(level) = level.parse::<LevelFilter>() else {
        return fail(2, &format!("{LOG} is {given:?}; it may be off, error, warn, info, debug or trace"));
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        // A log line that cannot be written is dropped; a report of it on standard error would panic.
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

/// Refuses a number of threads out of range. 0 is one thread per processor, the default.
fn check_threads() -> Result<(), CommandError> {
    let Some(text) = env::var_os(THREADS) else { return Ok(()) };
    match text.to_str().and_then(|text| text.parse().ok()) {
        Some(0..=MAX_THREADS) => Ok(()),
        _ => Err(CommandError::usage(format!("{THREADS} is {text:?}, not 0 to {MAX_THREADS}"))),
    }
}

fn dispatch(command: &Command, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    warn_of_mpirun(command);
    match command {
        Command::Generate(args) => generate::run(args, out, interrupt),
        Command::Sample(args) => sample::run(args, out, interrupt),
        Command::Verify(args) => verify::run(args, out, interrupt),
        Command::Bench(args) => bench::run(args, out, interrupt),
        Command::Shadow(args) => shadow::run(args, out, interrupt),
        #[cfg(feature = "cuda")]
        Command::Kernels(command) => crate::kernels::run(command, out, interrupt),
        #[cfg(not(feature = "cuda"))]
        Command::Kernels(_) => Err(flash_sampling::BuildError::NotBuilt { feature: "cuda" }.into()),
        Command::Info { format } => info::run(*format, out),
    }
}

fn fail(code: u8, message: &str) -> ExitCode {
    print_error(message);
    ExitCode::from(code)
}

/// Environment variables with the number of processes and the rank: of Open MPI, and of MPICH and its relatives.
const LAUNCHERS: [(&str, &str); 2] = [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")];

/// Warns once, in rank 0, that every process does the whole work, if a launcher started several processes that share no work.
fn warn_of_mpirun(command: &Command) {
    let expects_ranks = match command {
        Command::Sample(args) => args.transport.transport == Some(TransportName::Mpi),
        Command::Shadow(_) | Command::Kernels(_) | Command::Info { .. } => true,
        Command::Generate(_) | Command::Verify(_) | Command::Bench(_) => false,
    };
    let number = |name: &str| env::var(name).ok()?.parse::<usize>().ok();
    let started = LAUNCHERS.iter().find_map(|(size, rank)| Some((number(size)?, number(rank)?)));
    if let Some((world @ 2.., 0)) = started.filter(|_| !expects_ranks) {
        tracing::warn!(
            "mpirun started {world} processes, and each does the whole work; `sample --transport mpi` gives each a shard \
             of the vocabulary"
        );
    }
}
