//! `flash-sampling sample` on the GPUs of this process: one rank, one shard of the vocabulary and one thread per GPU.

use super::draw::draw;
use super::source::Source;
use crate::args::{ExchangeName, SampleArgs, TransportArgs};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::sampler;
use flash_sampling::cuda::{CudaError, Device};
use flash_sampling::distributed::{Loopback, TIME_LIMIT, Transport, TransportError};
use flash_sampling::{
    BuildError, CudaRank, CudaRankOptions, GpuExchange, Head, PerturbedArgmax, Plan, SampleError, ShardError,
};
use std::io::{self, Write};
use std::thread;
use tracing::subscriber::{NoSubscriber, with_default};

/// Draws on all visible GPUs, which exchange their draws directly. Rank 0 writes results and log lines.
pub(super) fn run(args: &SampleArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let devices = 0..Device::count().map_err(BuildError::from)?;
    let Some(exchange) = exchange(&args.transport) else {
        return Err(CommandError::usage("GPUs of one process exchange by peers or nccl, not by host"));
    };
    let limit = args.transport.time_limit.unwrap_or(TIME_LIMIT);
    let source = Source::open(&args.head)?;
    let draw_rows = |transport: Loopback, device: usize, out: &mut dyn Write| {
        let (rank, transport) = (transport.rank(), transport.with_time_limit(limit));
        draw(args, &source, |head, plan| build(head, plan, transport, device, exchange), (out, rank), interrupt)
    };
    let outcomes: Vec<Result<u8, CommandError>> = thread::scope(|scope| {
        let mut ranks = Loopback::group(devices.len()).into_iter().zip(devices);
        let first = ranks.next();
        let draw_rows = &draw_rows;
        let others: Vec<_> = ranks
            .map(|(transport, device)| {
                scope.spawn(move || {
                    with_default(NoSubscriber::default(), || draw_rows(transport, device, &mut io::sink()))
                })
            })
            .collect();
        let panicked = || CommandError::usage("a rank panicked");
        let mine = first.map(|(transport, device)| draw_rows(transport, device, out));
        let others = others.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(panicked())));
        mine.into_iter().chain(others).collect()
    });
    // The error of a failed rank explains more than the errors of ranks that wait for it.
    let (missing, own): (Vec<_>, Vec<_>) =
        outcomes.into_iter().partition(|outcome| outcome.as_ref().is_err_and(is_missing_rank));
    let codes: Vec<u8> = own.into_iter().collect::<Result<_, _>>()?;
    missing.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(codes.first().copied().unwrap_or_default())
}

/// The exchange between GPUs; `None` for an exchange by the host.
pub(super) fn exchange(args: &TransportArgs) -> Option<GpuExchange> {
    match args.exchange() {
        ExchangeName::Host => None,
        ExchangeName::Peers => Some(GpuExchange::Peers),
        ExchangeName::Nccl => Some(GpuExchange::Nccl),
    }
}

/// Builds the sampler of one rank on a GPU.
pub(super) fn build<'w, T: Transport + 'w>(
    head: Head<'w>,
    plan: Plan,
    transport: T,
    device: usize,
    exchange: GpuExchange,
) -> Result<Box<dyn PerturbedArgmax + 'w>, CommandError> {
    let options = CudaRankOptions { device, exchange };
    let rank = CudaRank::of_head(head, plan, transport, &options).map_err(sampler::named)?;
    Ok(Box::new(rank))
}

/// Whether another rank is missing or late.
fn is_missing_rank(error: &CommandError) -> bool {
    let is_late = |error: &CudaError| matches!(error, CudaError::LateRanks { .. } | CudaError::Nccl { .. });
    let is_gone = |error: &ShardError| {
        let ShardError::Transport(error) = error else { return false };
        matches!(error, TransportError::PeerLeft { .. } | TransportError::TimedOut { .. } | TransportError::Broken)
    };
    match error {
        CommandError::Build(BuildError::Cuda(error)) => is_late(error),
        CommandError::Build(BuildError::Shard(error)) => is_gone(error),
        CommandError::Sample(SampleError::Backend { source, .. }) => {
            source.downcast_ref().is_some_and(is_late) || source.downcast_ref().is_some_and(is_gone)
        }
        _ => false,
    }
}
