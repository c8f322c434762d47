//! `flash-sampling sample`: tokens for rows of hidden states.

mod draw;
#[cfg(feature = "cuda")]
mod gpu_ranks;
mod job;
mod json;
#[cfg(feature = "mpi")]
mod mpi_ranks;
mod row;
mod source;
mod text;

use crate::args::SampleArgs;
#[cfg(feature = "cuda")]
use crate::args::TransportName;
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::sampler;
use draw::draw;
use source::Source;
use std::io::Write;

/// Draws, and writes row by row. The exit code is 1 if a row failed.
///
/// # Errors
/// Bad flags and files, a backend that fails, ranks that disagree or are missing, Ctrl-C.
pub fn run(args: &SampleArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    args.transport.check_built(&args.sampler.backend)?;
    args.transport.check(&args.sampler)?;
    args.rows.check(&args.sampler)?;
    match args.transport.transport {
        #[cfg(feature = "cuda")]
        Some(TransportName::Peers | TransportName::Nccl) => return gpu_ranks::run(args, out, interrupt),
        #[cfg(feature = "mpi")]
        Some(_) => return mpi_ranks::run(args, out, interrupt),
        _ => {}
    }
    let mut source = Source::open(&args.head)?;
    source.head.load_shadow(&args.sampler)?;
    draw(args, &source, |head, plan| sampler::build(head, &args.sampler, plan), (out, 0), interrupt)
}
