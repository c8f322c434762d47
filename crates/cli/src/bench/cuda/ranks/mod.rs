//! `flash-sampling bench --backend cuda --transport peers,nccl --world N`: one step of decoding on several GPUs with a shard
//! of the vocabulary each, against one GPU that has the whole, and against gathering logits.
//!
//! One process, a thread for each GPU. A step is captured into a graph on every rank; 100 replays are timed as one, eight
//! times with a rest between, all ranks beginning together. The slowest rank counts, then the fastest of the eight. The
//! draws of one more replay are compared with those of the one GPU, token and score, on every rank.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`rank`] | one rank: its shard, its stream, and the clock |
//! | [`steps`] | what is timed |
//! | [`table`] | times and ratios as text |

pub mod rank;
pub mod steps;
pub mod table;

use super::{describe, failed, section};
use crate::args::{BenchArgs, BenchSize, GpuTransport};
use crate::bench::cases::Inputs;
use crate::bench::record::{Record, Section};
use crate::bench::{save, show};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use flash_sampling::cuda::{Device, DevicePeers};
use flash_sampling::distributed::Loopback;
use rank::Rank;
use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use steps::Steps;

/// The whole head on one GPU.
pub const ALONE: &str = "one GPU";
/// A shard, its draws not exchanged.
pub const SHARD: &str = "shard alone";
/// cuBLAS on a shard; with the logits gathered; and a draw from them.
pub const CUBLAS: [&str; 3] = ["cuBLAS shard", "+ gather of logits", "+ draw"];

/// How long a rank waits for the others: on the host, compiling kernels among what it waits for, and on the GPU.
const LIMIT: Duration = Duration::from_secs(120);
const GPU_LIMIT: Duration = Duration::from_secs(10);

/// A transport's name in tables.
pub fn name(transport: GpuTransport) -> &'static str {
    match transport {
        GpuTransport::Peers => "peers",
        GpuTransport::Nccl => "nccl",
    }
}

#[cfg(feature = "nccl")]
use flash_sampling::cuda::nccl_version;

/// Without the feature nobody asks.
#[cfg(not(feature = "nccl"))]
fn nccl_version() -> Option<i32> {
    None
}

/// What all ranks of a group are given.
#[derive(Debug)]
pub struct Group {
    /// The GPUs, one for each rank.
    pub devices: Vec<Arc<Device>>,
    /// How draws cross, each timed.
    pub transports: Vec<GpuTransport>,
}

/// Times everything asked for, prints the table, writes the record.
///
/// # Errors
/// Fewer GPUs than ranks, what the backend refuses, a draw that differs from that of one GPU, files that cannot be written,
/// Ctrl-C.
pub fn run(args: &BenchArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let group = Group {
        devices: (0..args.world).map(Device::new).collect::<Result<_, _>>().map_err(failed)?,
        transports: args.transport.clone(),
    };
    let mut record = Record { quick: args.quick, ..Record::begin() };
    for size in args.sizes() {
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let inputs = Inputs::new(size.vocab, size.hidden, most, args.dtype.into())?;
        record.sections.extend(head(&size, &inputs, &group, args, interrupt)?);
    }
    let mut gpu = describe(&group.devices[0])?;
    gpu.nccl = group.transports.contains(&GpuTransport::Nccl).then(nccl_version).flatten();
    record.gpu = Some(gpu);
    record.protocol = Some("graph replays, 100 at a time after 0.1 s of rest; slowest rank, best of 8".into());
    show(out, |out| super::table::begin(out, &record).and_then(|()| table::write(out, &record, args.world)))?;
    save(&record, args)?;
    Ok(0)
}

/// All ranks over one head; the times of the slowest.
fn head(
    size: &BenchSize,
    inputs: &Inputs,
    group: &Group,
    args: &BenchArgs,
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
                    let mut section = section(size, rows, args.dtype.into());
                    section.what = format!("a step on {} GPUs", args.world);
                    section.rounds = rank::TIMES * rank::REPLAYS;
                    steps.time(&mut section)?;
                    sections.push(section);
                }
                Ok(sections)
            })
        };
        let transports = Loopback::group(group.devices.len()).into_iter().map(|t| t.with_time_limit(LIMIT));
        let threads: Vec<_> = transports.zip(peers).map(begin).collect();
        let panicked = || CommandError::usage("a rank of the benchmark panicked");
        let outcomes: Vec<Result<_, CommandError>> =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).collect();
        // A rank that fails on its own account says more than those that miss it.
        let (mut sections, mut missing) = (None, None);
        for outcome in outcomes {
            match outcome {
                Ok(found) => sections = sections.or(Some(found)),
                Err(error) if rank::is_of_others(&error) => missing = missing.or(Some(error)),
                Err(error) => return Err(error),
            }
        }
        let no_rank = || CommandError::usage("the benchmark had no ranks");
        missing.map_or_else(|| sections.ok_or_else(no_rank), Err)
    })
}
