//! `flash-sampling sample` as one rank of several.

use crate::args::SampleArgs;
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::run::tell;
use crate::source::Source;
use crate::{sample, sampler};
use flash_sampling::distributed::{Mpi, ShardOptions, TIME_LIMIT, Transport, TransportError};
use flash_sampling::{BuildError, ShardError, build_rank};
#[cfg(feature = "cuda")]
use flash_sampling::{GpuExchange, cuda::Device};
use std::io::{self, Write};
use tracing::subscriber::{NoSubscriber, with_default};

/// Draws as this rank of those that mpirun started. Rank 0 writes results and notes; every rank says why it failed.
///
/// # Errors
/// As [`sample::run`].
pub(crate) fn run(args: &SampleArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let failed = |error: TransportError| BuildError::from(ShardError::from(error));
    let mut mpi = Mpi::start().map_err(failed)?.with_time_limit(args.transport.time_limit.unwrap_or(TIME_LIMIT));
    let rank = mpi.rank();
    tracing::debug!("{mpi:?}");
    if mpi.world() == 1 {
        tracing::info!("one rank draws from the whole vocabulary: mpirun -n N starts N of them");
    }
    let options =
        ShardOptions { check_tokens: args.transport.check_tokens, ..ShardOptions::new(sampler::merge(&args.sampler)) };
    let mut drawn = |out: &mut dyn Write| {
        let source = Source::open(&args.head)?;
        // Borrowed: it is shut down when all is done.
        let transport = &mut mpi;
        sample::draw(
            args,
            &source,
            |head, plan| {
                #[cfg(feature = "cuda")]
                if let Some(exchange) = crate::gpus::exchange(&args.transport) {
                    let (rank, world) = (transport.rank_on_host(), transport.world_on_host());
                    if exchange == GpuExchange::Peers && world < transport.world() {
                        return Err(CommandError::usage(
                            "--exchange peers is for ranks on one machine; of several it is --exchange nccl",
                        ));
                    }
                    let device = args.transport.gpu_on_host(rank, world, Device::count().ok())?;
                    return crate::gpus::build(head, plan, transport, device, exchange, &args.transport);
                }
                let config = sampler::config(&args.sampler, plan, head.vocab_size() as usize);
                build_rank(head, &config, transport, options).map_err(sampler::named)
            },
            (out, rank),
            interrupt,
        )
    };
    let outcome = if rank == 0 { drawn(out) } else { with_default(NoSubscriber::default(), || drawn(&mut io::sink())) };
    outcome.or_else(|error| {
        // Now: shutting MPI down waits for ranks that may have given this one up, and mpirun may end it before that.
        let code = error.exit_code();
        if code != 0 {
            tell(&format!("rank {rank}: {}", error.one_line()));
        }
        Ok(code)
    })
}
