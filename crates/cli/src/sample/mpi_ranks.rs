//! `flash-sampling sample` as one of several processes of MPI.

use super::draw::draw;
use super::source::Source;
use crate::args::SampleArgs;
use crate::error::{CommandError, print_error};
use crate::interrupt::Interrupt;
use crate::sampler;
use flash_sampling::distributed::{Mpi, ShardOptions, TIME_LIMIT, Transport, TransportError};
use flash_sampling::{BuildError, ShardError, ShardMerge, build_rank};
#[cfg(feature = "cuda")]
use flash_sampling::{GpuExchange, cuda::Device};
use std::io::{self, Write};
use tracing::subscriber::{NoSubscriber, with_default};

/// Draws as this process's rank. Rank 0 writes results and log lines; every rank prints its own error.
pub(super) fn run(args: &SampleArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let failed = |error: TransportError| BuildError::from(ShardError::from(error));
    let mut mpi = Mpi::start().map_err(failed)?.with_time_limit(args.transport.time_limit.unwrap_or(TIME_LIMIT));
    let rank = mpi.rank();
    tracing::debug!("{mpi:?}");
    if mpi.world() == 1 {
        tracing::info!("one rank draws from the whole vocabulary: mpirun -n N starts N ranks");
    }
    let options = ShardOptions::new(ShardMerge::Winners);
    let mut draw_rows = |out: &mut dyn Write| {
        let mut source = Source::open(&args.head)?;
        if args.sampler.shadow_file().is_some() {
            // Without a file, each rank makes the shadow of its shard.
            source.head.load_shadow(&args.sampler)?;
        }
        // Borrowed: MPI is shut down after all calls.
        let transport = &mut mpi;
        draw(
            args,
            &source,
            |head, plan| {
                #[cfg(feature = "cuda")]
                if let Some(exchange) = super::gpu_ranks::exchange(&args.transport) {
                    let (rank, world) = (transport.rank_on_host(), transport.world_on_host());
                    if exchange == GpuExchange::Peers && world < transport.world() {
                        return Err(CommandError::usage(
                            "--exchange peers needs all ranks on one machine; use --exchange nccl for several machines",
                        ));
                    }
                    // A launcher may make only one GPU visible to each process.
                    let device = if Device::count() == Ok(1) { 0 } else { rank };
                    return super::gpu_ranks::build(head, plan, transport, device, exchange);
                }
                build_rank(head, &args.sampler.config(plan), transport, options).map_err(sampler::named)
            },
            (out, rank),
            interrupt,
        )
    };
    let outcome = match rank {
        0 => draw_rows(out),
        _ => with_default(NoSubscriber::default(), || draw_rows(&mut io::sink())),
    };
    outcome.or_else(|error| {
        // Printed before the shutdown of MPI, which waits for other ranks; during this wait mpirun may end this
        // process.
        let code = error.exit_code();
        if code != 0 {
            print_error(&format!("rank {rank}: {}", error.one_line()));
        }
        Ok(code)
    })
}
