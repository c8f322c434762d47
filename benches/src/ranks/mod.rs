//! Several GPUs: one decode step with a shard of the vocabulary on each, against one GPU with the whole vocabulary, and
//! against gathered logits.
//!
//! There is one process, with one thread per GPU. Every rank captures a step into a graph and times 100 replays as one,
//! eight times, with a rest before each. All ranks begin at the same time. The time is that of the slowest rank, and
//! the best of eight. The draws of one more replay must be equal to those of one GPU, in token and score, on every
//! rank.
//!
//! | module | content |
//! | --- | --- |
//! | [`filters`] | whole calls with filters |
//! | [`rank`] | one rank: its shard, its stream, and the shared clock |
//! | [`steps`] | the contenders |
//! | [`table`] | times and ratios as text |

pub mod filters;
pub mod rank;
pub mod steps;
pub mod table;

use crate::args::{GpuTransport, RankArgs};
use crate::gpu::read::{describe, failed};
use crate::gpu::section;
use crate::record::Record;
use flash_sampling::cuda::{CudaError, Device, DevicePeers};
use flash_sampling::distributed::{Loopback, Transport, TransportError};
use flash_sampling::{BuildError, ShardError};
use flash_sampling_cli::args::BenchSize;
use flash_sampling_cli::bench::cases::Inputs;
use flash_sampling_cli::bench::record::Section;
use flash_sampling_cli::bench::show;
use flash_sampling_cli::bench::timing::Timing;
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use rank::Rank;
use std::io::Write;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;
use steps::Steps;

/// The whole head on one GPU.
pub const ALONE: &str = "one GPU";
/// A shard without the exchange of draws.
pub const SHARD: &str = "shard alone";
/// cuBLAS on a shard; with a gather of the logits; and with a draw from them.
pub const CUBLAS: [&str; 3] = ["cuBLAS shard", "+ gather of logits", "+ draw"];

/// The time limit of a rank for the others, on the host (where they may be compiling kernels).
const LIMIT: Duration = Duration::from_secs(120);
const GPU_LIMIT: Duration = Duration::from_secs(10);

/// The name of a transport in tables.
pub fn name(transport: GpuTransport) -> &'static str {
    match transport {
        GpuTransport::Peers => "peers",
        GpuTransport::Nccl => "nccl",
    }
}

#[cfg(feature = "nccl")]
use flash_sampling::cuda::nccl_version;

/// No caller uses it without the feature.
#[cfg(not(feature = "nccl"))]
fn nccl_version() -> Option<i32> {
    None
}

/// The shared inputs of all ranks of a group.
#[derive(Debug)]
pub struct Group {
    /// The GPUs, one for each rank.
    pub devices: Vec<Arc<Device>>,
    /// The exchanges to time.
    pub transports: Vec<GpuTransport>,
}

/// Times every head, then prints the table.
///
/// # Errors
/// Fewer GPUs than ranks, errors of the backend, a draw that differs from that of one GPU, Ctrl-C.
pub fn run(
    args: &RankArgs,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let world = usize::from(args.world);
    let group = Group {
        devices: (0..world).map(Device::new).collect::<Result<_, _>>().map_err(failed)?,
        transports: args.transport.clone(),
    };
    for size in args.sizes() {
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let inputs = Inputs::new(size.vocab, size.hidden, most, args.sizes.dtype)?;
        record.sections.extend(head(&size, &inputs, &group, args, interrupt)?);
    }
    let mut gpu = describe(&group.devices[0])?;
    gpu.nccl = group.transports.contains(&GpuTransport::Nccl).then(nccl_version).flatten();
    record.gpu = Some(gpu);
    record.protocol = Some("graph replays, 100 at a time after 0.1 s of rest; slowest rank, best of 8".into());
    show(out, |out| crate::gpu::table::begin(out, record).and_then(|()| table::write(out, record, world)))
}

/// Times one head on all ranks; returns the times of the slowest rank.
fn head(
    size: &BenchSize,
    inputs: &Inputs,
    group: &Group,
    args: &RankArgs,
    interrupt: &Interrupt,
) -> Result<Vec<Section>, CommandError> {
    let most = size.rows.iter().copied().max().unwrap_or(1);
    let peers = DevicePeers::group(&group.devices, most, GPU_LIMIT).map_err(failed)?;
    thread::scope(|scope| {
        let begin = |(transport, peers): (Loopback, DevicePeers)| {
            scope.spawn(move || {
                let rank = Rank::new(transport, group, size, inputs)?;
                let mut steps = Steps::new(rank, group, peers)?;
                let mut sections = Vec::new();
                for &rows in &size.rows {
                    interrupt.check()?;
                    let mut section = section(size, rows, args.sizes.dtype);
                    section.what = format!("a step on {} GPUs", args.world);
                    section.rounds = rank::TIMES * rank::REPLAYS;
                    steps.time(&mut section)?;
                    sections.push(section);
                }
                Ok(sections)
            })
        };
        let transports = Loopback::group(group.devices.len()).into_iter().map(|t| t.with_time_limit(LIMIT));
        let threads = transports.zip(peers).map(begin);
        first(threads.collect::<Vec<_>>())
    })
}

/// Returns the result of the first rank, after all threads have ended. The error of a failed rank precedes the errors
/// of ranks that miss another rank.
fn first<T>(threads: Vec<ScopedJoinHandle<'_, Result<T, CommandError>>>) -> Result<T, CommandError> {
    let panicked = || CommandError::usage("a rank of the benchmark panicked");
    let outcomes: Vec<_> =
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect();
    let (mut found, mut missing) = (None, None);
    for outcome in outcomes {
        match outcome {
            Ok(result) => found = found.or(Some(result)),
            Err(error) if is_of_others(&error) => missing = missing.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    missing.map_or_else(|| found.ok_or_else(|| CommandError::usage("the benchmark had no ranks")), Err)
}

/// Whether the error is that another rank is missing.
fn is_of_others(error: &CommandError) -> bool {
    matches!(
        error,
        CommandError::Build(BuildError::Cuda(CudaError::LateRanks { .. }))
            | CommandError::Build(BuildError::Shard(ShardError::Transport(
                TransportError::PeerLeft { .. } | TransportError::TimedOut { .. } | TransportError::Broken
            )))
    )
}

/// Gathers the bytes of every rank, in order.
fn gather(transport: &mut Loopback, mine: &[u8], gathered: &mut Vec<Vec<u8>>) -> Result<(), CommandError> {
    Ok(transport.all_gather(mine, gathered).map_err(|error| BuildError::from(ShardError::from(error)))?)
}

/// The largest of each time over all ranks; a collective call.
fn slowest(transport: &mut Loopback, mut times: Vec<f64>, gathered: &mut Vec<Vec<u8>>) -> Result<Timing, CommandError> {
    let bytes: Vec<u8> = times.iter().flat_map(|time| time.to_le_bytes()).collect();
    gather(transport, &bytes, gathered)?;
    for theirs in gathered {
        for (slowest, time) in times.iter_mut().zip(theirs.as_chunks::<8>().0) {
            *slowest = slowest.max(f64::from_le_bytes(*time));
        }
    }
    Ok(Timing::of(times))
}
