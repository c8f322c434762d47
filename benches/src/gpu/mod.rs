//! One GPU: the fused kernel against cuBLAS, samplers over its logits, and the ceilings.
//!
//! There is one process and one stream. Before each timed call 256 MiB are written, so that no part of the weight is in
//! the cache. Events around the call time it.
//!
//! | module | content |
//! | --- | --- |
//! | [`clock`] | events, and the cold cache |
//! | [`head`] | weight, hidden states and row parameters in device memory |
//! | [`contenders`] | the contenders |
//! | [`host`] | the time of the processor for a call |
//! | [`peers`] | times of other programs, from a file |
//! | [`read`] | a plain read of device memory |
//! | [`table`] | times and ratios as text |

pub mod clock;
pub mod contenders;
pub mod head;
pub mod host;
pub mod peers;
pub mod read;
pub mod table;

use crate::args::GpuArgs;
use crate::gpu::read::{describe, driver, failed};
use crate::record::{Gpu, Record};
use clock::Clock;
use contenders::Contenders;
use flash_sampling::DType;
use flash_sampling::cuda::Device;
use flash_sampling_cli::args::BenchSize;
use flash_sampling_cli::bench::record::Section;
use flash_sampling_cli::bench::show;
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use flash_sampling_cli::output::bar;
use head::OnDevice;
use peers::Peers;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// Our draw of Gaussian logits, and of LLM-like ones.
pub const OURS: [&str; 2] = ["tiled, gaussian", "tiled, peaked"];
/// cuBLAS, then softmax and inverse CDF.
pub const INVERSE: &str = "cuBLAS + inverse CDF";

/// The rest of the GPU before a block of calls.
const REST: Duration = Duration::from_millis(250);

/// cuBLAS, then our sampler of logits.
pub const STANDALONE: &str = "cuBLAS + standalone";
/// Our sampler of float32 logits that exist before the call; and a plain read of these logits.
pub const EXISTING: [&str; 2] = ["standalone, float32", "float32 logits, read"];
/// The portable kernel; at temperature 0; and with stored float32 logits.
pub const PORTABLE: [&str; 3] = ["portable, peaked", "portable, greedy", "portable, logits kept"];

/// The draws of a head with a shadow: at temperature 0, of Gaussian logits, and of LLM-like ones.
pub const SHADOW: [&str; 3] = ["shadow, greedy", "shadow, gaussian", "shadow, peaked"];
/// The draw of LLM-like logits from a shadow by the portable kernel.
pub const PORTABLE_SHADOW: &str = "portable, shadow";

/// The draws of a head in fp8: at temperature 0, of Gaussian logits, of LLM-like ones, and of LLM-like ones by the
/// portable kernel.
pub const FP8: [&str; 4] = ["fp8, greedy", "fp8, gaussian", "fp8, peaked", "fp8, portable"];
/// Plain reads of the head in fp8.
pub const FP8_READS: [&str; 2] = ["fp8, read", "fp8, read, bulk copies"];

/// Our draw of peaked logits with log Z.
pub const LOG_Z: &str = "tiled, log Z";

/// The number of calls whose host time is measured.
const CALLS: usize = 1000;

/// Opens the first GPU, and a clock on a stream of this GPU.
///
/// # Errors
/// No GPU, errors of the compiler and the driver.
pub fn start(args: &GpuArgs) -> Result<(Arc<Device>, Clock), CommandError> {
    let device = Device::new(0).map_err(failed)?;
    let stream = device.context().new_stream().map_err(driver("make a stream"))?;
    let clock = Clock::new(if args.sizes.quick { Duration::ZERO } else { REST }, stream)?;
    Ok((device, clock))
}

/// Times every head, and prints the table of each head when it is done.
///
/// # Errors
/// No GPU, errors of the backend, files that cannot be read, Ctrl-C.
pub fn run(
    args: &GpuArgs,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let peers = args.peers.as_deref().map(Peers::read).transpose()?;
    let (device, mut clock) = start(args)?;
    record.protocol = Some(clock::PROTOCOL.into());
    for size in args.sizes() {
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let head = OnDevice::new(&size, most, args, clock.stream())?;
        let mut contenders = Contenders::new(&head, args.portable, &device, clock.stream())?;
        let flops = match &record.gpu {
            Some(gpu) => gpu.matrix_flops,
            None => {
                let (cublas, matrix_flops) = (contenders.cublas_version(), contenders.matrix_flops(&mut clock)?);
                record.gpu = Some(Gpu { cublas, matrix_flops, ..describe(&device)? });
                show(out, |out| table::begin(out, record))?;
                matrix_flops
            }
        };
        // The time of a read does not depend on the number of rows.
        let reads = contenders.reads(size.rounds, &mut clock, interrupt)?;
        let bar = bar("timing", size.rows.len() as u64);
        let first = record.sections.len();
        for &rows in &size.rows {
            bar.set_message(format!("{} x {}, rows {rows}", size.vocab, size.hidden));
            let mut section = section(&size, rows, args.sizes.dtype);
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
            let count = if args.sizes.quick { 10 } else { CALLS };
            record.calls.extend(host::times(&head, rows, count, &device, clock.stream(), interrupt)?);
        }
    }
    record.peers = peers.map(|peers| peers.source);
    show(out, |out| table::end(out, record))
}

/// A section without entries.
pub fn section(size: &BenchSize, rows: usize, dtype: DType) -> Section {
    Section::of_head("matmul and draw", rows, [size.vocab, size.hidden], dtype, size.rounds)
}
