//! `flash-sampling bench --backend cuda`: the fused kernel against cuBLAS, samplers over its logits, and the ceilings.
//!
//! One process, one stream. Before each timed call 256 MiB are written, so that nothing of the weight is in the cache;
//! events around the call time it. [`clock::Protocol`] says in which order contenders are called.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`clock`] | events, and the cold cache |
//! | [`head`] | weight, hidden states and row parameters in device memory |
//! | [`contenders`] | what is timed |
//! | [`host`] | what a call costs the processor |
//! | [`ranks`] | a step on several GPUs |
//! | [`peers`] | times of other programs, from a file |
//! | [`table`] | times and ratios as text |

pub mod clock;
pub mod contenders;
pub mod head;
pub mod host;
pub mod peers;
pub mod ranks;
pub mod table;

use crate::args::{BenchArgs, BenchSize};
use crate::bench::record::{Gpu, Memory, Record, Section};
use crate::bench::{save, show};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::line;
use crate::progress;
use clock::{Cache, Clock, Protocol};
use contenders::Contenders;
use flash_sampling::cuda::cudarc::driver::DriverError;
use flash_sampling::cuda::{CudaError, Device, Probe};
use flash_sampling::{BuildError, DType};
use head::OnDevice;
use peers::Peers;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// Ours, on logits that are one Gaussian, and as language models have them.
pub const OURS: [&str; 2] = ["tiled, gaussian", "tiled, peaked"];
/// cuBLAS, then softmax and inverse CDF.
pub const INVERSE: &str = "cuBLAS + inverse CDF";

/// How long the GPU rests before a block of calls.
const REST: Duration = Duration::from_millis(250);

/// cuBLAS, then our sampler over existing logits.
pub const STANDALONE: &str = "cuBLAS + standalone";
/// Our sampler over float32 logits, which exist before the call; and a plain read of those logits.
pub const EXISTING: [&str; 2] = ["standalone, float32", "float32 logits, read"];
/// The portable kernel; at temperature 0; and a draw that keeps the float32 logits.
pub const PORTABLE: [&str; 3] = ["portable, peaked", "portable, greedy", "portable, logits kept"];

/// The draw on peaked logits that tells log Z too.
pub const LOG_Z: &str = "tiled, log Z";

/// Calls whose host time is taken.
const CALLS: usize = 1000;

/// For `map_err`: a failure of the CUDA backend.
pub(crate) fn failed(error: CudaError) -> CommandError {
    BuildError::from(error).into()
}

/// For `map_err`: a failure of the driver while doing something.
pub(crate) fn driver(action: &'static str) -> impl Fn(DriverError) -> CommandError {
    move |DriverError(code)| failed(CudaError::Driver { action, code: code as u32, name: format!("{code:?}") })
}

/// Times everything asked for, prints each head's table as it is done, writes the record and the picture.
///
/// # Errors
/// No GPU, what the backend refuses, files that cannot be read or written, Ctrl-C.
pub fn run(args: &BenchArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    if !args.transport.is_empty() {
        return ranks::run(args, out, interrupt);
    }
    let peers = args.peers.as_deref().map(Peers::read).transpose()?;
    let device = Device::new(0).map_err(failed)?;
    let stream = device.context().new_stream().map_err(driver("make a stream"))?;
    let protocol = match (args.sustained, args.quick) {
        (true, _) => Protocol::Sustained,
        (false, quick) => Protocol::Blocks { rest: if quick { Duration::ZERO } else { REST } },
    };
    let mut clock = Clock::new(protocol, Cache::new(args.clean_cache, &device)?, stream)?;
    let mut record = Record { quick: args.quick, protocol: Some(clock.describe()), ..Record::begin() };
    for size in args.sizes() {
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let head = OnDevice::new(&size, most, args.dtype.into(), clock.stream())?;
        let mut contenders = Contenders::new(&head, args.portable, &device, clock.stream())?;
        let flops = match &record.gpu {
            Some(gpu) => gpu.matrix_flops,
            None => {
                let (cublas, matrix_flops) = (contenders.cublas_version(), contenders.matrix_flops(&mut clock)?);
                record.gpu = Some(Gpu { cublas, matrix_flops, ..describe(&device)? });
                show(out, |out| table::begin(out, &record))?;
                matrix_flops
            }
        };
        // A read is the same for any number of rows.
        let reads = contenders.reads(size.rounds, &mut clock, interrupt)?;
        let bar = progress::bar("timing", size.rows.len() as u64);
        let first = record.sections.len();
        for &rows in &size.rows {
            bar.set_message(format!("{} x {}, {}", size.vocab, size.hidden, line::count(rows, "row")));
            let mut section = section(&size, rows, args.dtype.into());
            contenders.time(&mut section, &mut clock, interrupt)?;
            section.entries.splice(0..0, reads.iter().cloned());
            if let Some(peers) = &peers {
                section.peers = peers.of(size.vocab, size.hidden, rows);
            }
            record.sections.push(section);
            bar.inc(1);
        }
        bar.finish_and_clear();
        show(out, |out| table::head(out, &record.sections[first..], flops))?;
        let ends = [size.rows.iter().min(), size.rows.iter().max()];
        for &rows in ends.into_iter().flatten() {
            let count = if args.quick { 10 } else { CALLS };
            record.calls.extend(host::times(&head, rows, count, &device, clock.stream(), interrupt)?);
        }
        let logits = (most * size.vocab * size_of::<f32>()) as u64;
        let peak = Some(contenders.scratch_bytes() as u64);
        record.memory.push(Memory { what: "tiled".into(), rows: most, peak, logits });
    }
    record.peers = peers.map(|peers| peers.source);
    show(out, |out| table::end(out, &record))?;
    save(&record, args)?;
    Ok(0)
}

fn describe(device: &Arc<Device>) -> Result<Gpu, CommandError> {
    let (major, minor) = device.capability();
    Ok(Gpu {
        name: device.name().map_err(failed)?,
        capability: format!("{major}.{minor}"),
        multiprocessors: device.multiprocessors(),
        driver: Probe::of_this_machine().driver,
        cublas: None,
        nccl: None,
        matrix_flops: None,
    })
}

fn section(size: &BenchSize, rows: usize, dtype: DType) -> Section {
    Section::of_head("matmul and draw", rows, [size.vocab, size.hidden], dtype, size.rounds)
}
