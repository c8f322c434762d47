//! Whole calls with filters over shards on several GPUs, of samplers over host memory, by the host's clock.
//!
//! A call uploads parameters and hidden states, exchanges data between ranks, and downloads draws. All ranks of the
//! process begin a call at the same time, and the slowest rank counts. One GPU with the whole head draws the same rows,
//! also in whole calls, and the tokens must agree.

use super::{first, gather, slowest};
use crate::args::{GpuTransport, RankArgs};
use crate::filters::cases::Case;
use crate::filters::inputs::Inputs;
use crate::filters::table;
use crate::gpu::read::failed;
use crate::record::Record;
use flash_sampling::cuda::{CudaTiled, Device};
use flash_sampling::distributed::{Loopback, Transport};
use flash_sampling::{CudaRank, CudaRankOptions, GpuExchange, Head, Matrix, PerturbedArgmax, Plan, Samples};
use flash_sampling_cli::bench::record::{Passes, Section};
use flash_sampling_cli::bench::timing::Timing;
use flash_sampling_cli::bench::{add, show};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

/// Timed calls; `WARM` calls precede them.
const CALLS: usize = 20;
const WARM: usize = 4;
/// The time limit of a rank for the others, which may be compiling kernels.
const LIMIT: Duration = Duration::from_secs(120);

/// Times every case on every kind of rows, on all ranks and on one GPU.
///
/// # Errors
/// Fewer GPUs than ranks, errors of the backend, a token that differs, Ctrl-C.
pub fn run(
    args: &RankArgs,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    record.protocol = Some("whole calls by the host's clock, a thread for each rank; slowest rank, best of 20".into());
    for size in args.sizes() {
        let inputs = Inputs::new(size, args.sizes.dtype)?;
        for &transport in &args.transport {
            for section in group(&inputs, transport, usize::from(args.world), interrupt)? {
                add(record, section, out, table::section)?;
            }
        }
    }
    show(out, |out| table::end(out))
}

/// Runs one thread per rank; returns the sections of rank 0.
fn group(
    inputs: &Inputs,
    transport: GpuTransport,
    world: usize,
    interrupt: &Interrupt,
) -> Result<Vec<Section>, CommandError> {
    let loopbacks = || Loopback::group(world).into_iter().map(|t| t.with_time_limit(LIMIT));
    thread::scope(|scope| {
        let begin = |(loopback, clock): (Loopback, Loopback)| {
            scope.spawn(move || Rank::new(inputs, transport, loopback, clock)?.sections(inputs, interrupt))
        };
        first(loopbacks().zip(loopbacks()).map(begin).collect())
    })
}

/// One rank; rank 0 also has the whole head.
struct Rank<'w> {
    sampler: CudaRank<'w, Loopback>,
    alone: Option<CudaTiled<'w>>,
    clock: Loopback,
    name: String,
    out: Samples,
    gathered: Vec<Vec<u8>>,
}

impl<'w> Rank<'w> {
    fn new(
        inputs: &'w Inputs,
        transport: GpuTransport,
        loopback: Loopback,
        clock: Loopback,
    ) -> Result<Rank<'w>, CommandError> {
        let (device, world) = (loopback.rank(), loopback.world());
        let (exchange, by) = match transport {
            GpuTransport::Peers => (GpuExchange::Peers, "peers"),
            GpuTransport::Nccl => (GpuExchange::Nccl, "NCCL"),
        };
        let head = Head::new(inputs.weight.matrix()?)?;
        let max_rows = inputs.size.rows.iter().copied().max().unwrap_or(1);
        let plan = Plan { max_rows, ..Plan::default() };
        let alone = match device {
            0 => Some(CudaTiled::new(head, plan, &Device::new(0).map_err(failed)?).map_err(failed)?),
            _ => None,
        };
        let options = CudaRankOptions { device, exchange };
        let sampler = CudaRank::of_head(head, plan, loopback, &options)?;
        let name = format!("{world} GPUs by {by}");
        Ok(Rank { sampler, alone, clock, name, out: Samples::new(), gathered: Vec::new() })
    }

    /// Times all sections. All ranks use the same order.
    fn sections(mut self, inputs: &Inputs, interrupt: &Interrupt) -> Result<Vec<Section>, CommandError> {
        let mut sections = Vec::new();
        for (kind, states) in &inputs.states {
            for &rows in &inputs.size.rows {
                let input = states.matrix()?.row_range(0..rows);
                let mut both = [&*self.name, "one GPU"]
                    .map(|on| inputs.section(&format!("whole calls on {on}"), *kind, rows, CALLS));
                for (section, alone) in both.iter_mut().zip([false, true]) {
                    let mut of_cases = Vec::new();
                    for case in Case::ALL {
                        interrupt.check()?;
                        of_cases.push(self.time(case, inputs, input, alone)?);
                    }
                    let timings: Vec<_> = of_cases.iter().map(|(timing, ..)| *timing).collect();
                    section.fill(Case::ALL.iter().map(|case| case.name()), &timings);
                    for (entry, (_, passes)) in section.entries.iter_mut().zip(of_cases) {
                        entry.passes = Some(passes);
                    }
                }
                sections.extend(both);
            }
        }
        Ok(sections)
    }

    /// Times the calls of a case; each call has its own position. `alone`: by the whole head, on rank 0. In the first
    /// call of the ranks, their tokens must be equal to those of the whole head.
    fn time(
        &mut self,
        case: Case,
        inputs: &Inputs,
        input: Matrix<'_>,
        alone: bool,
    ) -> Result<(Timing, Passes), CommandError> {
        let (mut times, mut passes) = (Vec::with_capacity(CALLS), Passes::default());
        for call in 0..WARM + CALLS {
            let row = |r: usize| case.row(&inputs.lists, r, r as u64, call as u64);
            let rows: Vec<_> = (0..input.rows()).map(row).collect();
            gather(&mut self.clock, &[], &mut self.gathered)?;
            let Rank { sampler, alone: whole, out, .. } = self;
            let begun = Instant::now();
            match whole {
                _ if !alone => sampler.sample(input, &rows, out)?,
                Some(whole) => whole.sample(input, &rows, out)?,
                None => continue,
            }
            if call >= WARM {
                times.push(begun.elapsed().as_secs_f64());
                out.iter().filter_map(Result::ok).for_each(|row| passes.add(row.passes));
            }
            if let (Some(whole), false, 0) = (whole, alone, call) {
                let mut same = Samples::new();
                whole.sample(input, &rows, &mut same)?;
                let tokens =
                    |samples: &Samples| samples.iter().map(|row| row.map(|row| row.token())).collect::<Vec<_>>();
                if tokens(out) != tokens(&same) {
                    return Err(CommandError::usage(format!("{}: other tokens than those of one GPU", case.name())));
                }
            }
        }
        times.resize(CALLS, 0.0);
        Ok((slowest(&mut self.clock, times, &mut self.gathered)?, passes))
    }
}
