//! The program `flash-sampling-bench`.

use clap::Parser;
use flash_sampling_benches::args::{Cli, Command};
use flash_sampling_benches::record::Record;
use flash_sampling_benches::{cpu, filters};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use std::process::ExitCode;

fn run(command: &Command) -> Result<(), CommandError> {
    let (sizes, out, interrupt) = (command.sizes(), &mut std::io::stdout().lock(), &Interrupt::listen());
    command.check()?;
    let mut record = Record::begin(sizes.quick);
    match command {
        Command::Cpu(args) if args.filters => filters::cpu::run(args, &mut record, out, interrupt),
        Command::Cpu(args) => cpu::run(args, &mut record, out, interrupt),
        #[cfg(feature = "cuda")]
        Command::Gpu(args) if args.filters => filters::cuda::run(args, &mut record, out, interrupt),
        #[cfg(feature = "cuda")]
        Command::Gpu(args) => flash_sampling_benches::gpu::run(args, &mut record, out, interrupt),
        #[cfg(feature = "cuda")]
        Command::Ranks(args) if args.filters => {
            flash_sampling_benches::ranks::filters::run(args, &mut record, out, interrupt)
        }
        #[cfg(feature = "cuda")]
        Command::Ranks(args) => flash_sampling_benches::ranks::run(args, &mut record, out, interrupt),
    }?;
    flash_sampling_cli::bench::save(&record, sizes.json.as_deref())
}

fn main() -> ExitCode {
    match run(&Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", error.one_line());
            ExitCode::from(error.exit_code())
        }
    }
}
