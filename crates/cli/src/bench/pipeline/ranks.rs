//! Filters over shards on several GPUs: `bench --backend cuda --pipeline --transport peers --world N`.
//!
//! Whole calls of samplers over host memory, by the host's clock: parameters and hidden states go up, draws come down, and
//! ranks exchange what they need between. All ranks of the process begin a call together, and the slowest counts. The same
//! rows are drawn by one GPU that has the whole head, in whole calls too, and the tokens of both are compared.

use super::cases::{Case, Lists};
use super::inputs::Kind;
use super::table;
use crate::args::{BenchArgs, BenchSize, GpuTransport};
use crate::bench::cuda::failed;
use crate::bench::record::{Passes, Record, Section};
use crate::bench::tell;
use crate::bench::timing::Timing;
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::load::Tensor;
use crate::synthetic;
use flash_sampling::cuda::{CudaTiled, Device};
use flash_sampling::distributed::{Loopback, Transport};
use flash_sampling::{
    BuildError, CudaRank, CudaRankOptions, DType, GpuExchange, Head, Matrix, PerturbedArgmax, Plan, Samples, ShardError,
};
use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

/// Calls that are timed, and calls before.
const CALLS: usize = 20;
const WARM: usize = 4;
/// How long a rank waits for the others, which may be compiling kernels.
const LIMIT: Duration = Duration::from_secs(120);

/// What all ranks are given.
struct Inputs {
    weight: Tensor,
    states: Vec<(Kind, Tensor)>,
    lists: Lists,
    size: BenchSize,
    most: usize,
    dtype: DType,
}

impl Inputs {
    fn new(size: BenchSize, dtype: DType) -> Result<Inputs, CommandError> {
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let no_memory = |error: io::Error| CommandError::usage(format!("cannot make a head: {error}"));
        let weight = synthetic::weight(size.vocab, size.hidden, dtype).map_err(no_memory)?;
        let state = |kind: Kind| Ok((kind, kind.states(weight.matrix()?, most, dtype)?));
        let states = Kind::ALL.into_iter().map(state).collect::<Result<_, CommandError>>()?;
        let lists = Lists::new(size.vocab, most);
        Ok(Inputs { weight, states, lists, size, most, dtype })
    }

    fn section(&self, on: &str, kind: Kind, rows: usize) -> Section {
        let what = format!("whole calls on {on}, {} rows", kind.name());
        Section::of_head(what, rows, [self.size.vocab, self.size.hidden], self.dtype, CALLS)
    }
}

/// Times every case on every kind of rows, over all ranks and on one GPU.
///
/// # Errors
/// Fewer GPUs than ranks, what the backend refuses, a token that differs, Ctrl-C.
pub fn run(
    args: &BenchArgs,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    record.protocol = Some("whole calls by the host's clock, a thread for each rank; slowest rank, best of 20".into());
    for size in args.sizes() {
        let inputs = Inputs::new(size, args.dtype.into())?;
        for &transport in &args.transport {
            for section in group(&inputs, transport, args.world, interrupt)? {
                tell(record, section, out, table::section)?;
            }
        }
    }
    Ok(())
}

/// A thread for each rank; the sections of rank 0.
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
        let threads: Vec<_> = loopbacks().zip(loopbacks()).map(begin).collect();
        let panicked = || CommandError::usage("a rank of the benchmark panicked");
        let outcomes = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked())));
        let (mut first, mut failure) = (Vec::new(), None);
        for (rank, outcome) in outcomes.enumerate() {
            match outcome {
                Ok(sections) if rank == 0 => first = sections,
                Ok(_) => {}
                // A rank that fails on its own account says more than those that miss it.
                Err(error) if failure.is_none() || !crate::bench::cuda::ranks::rank::is_of_others(&error) => {
                    failure = Some(error);
                }
                Err(_) => {}
            }
        }
        failure.map_or(Ok(first), Err)
    })
}

/// One rank, and on rank 0 the whole head.
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
        let plan = Plan { max_rows: inputs.most, ..Plan::default() };
        let alone = match device {
            0 => Some(CudaTiled::new(head, plan, &Device::new(0).map_err(failed)?).map_err(failed)?),
            _ => None,
        };
        let options = CudaRankOptions { device, exchange, ..CudaRankOptions::default() };
        let sampler = CudaRank::of_head(head, plan, loopback, &options)?;
        let name = format!("{world} GPUs by {by}");
        Ok(Rank { sampler, alone, clock, name, out: Samples::new(), gathered: Vec::new() })
    }

    /// Everything, in the order that all ranks keep.
    fn sections(mut self, inputs: &Inputs, interrupt: &Interrupt) -> Result<Vec<Section>, CommandError> {
        let mut sections = Vec::new();
        for (kind, states) in &inputs.states {
            for &rows in &inputs.size.rows {
                let input = states.matrix()?.row_range(0..rows);
                let mut both = [inputs.section(&self.name, *kind, rows), inputs.section("one GPU", *kind, rows)];
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

    /// Times the calls of a case, each at a position of its own; `alone`: by the whole head, which rank 0 has. Tokens are those
    /// of the call before the first of the other way.
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
            self.meet(&[])?;
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
        let bytes: Vec<u8> = times.iter().flat_map(|time| time.to_le_bytes()).collect();
        self.meet(&bytes)?;
        for theirs in &self.gathered {
            for (slowest, time) in times.iter_mut().zip(theirs.as_chunks::<8>().0) {
                *slowest = slowest.max(f64::from_le_bytes(*time));
            }
        }
        Ok((Timing::of(times), passes))
    }

    /// Waits for the other ranks and takes their bytes.
    fn meet(&mut self, mine: &[u8]) -> Result<(), CommandError> {
        let met = self.clock.all_gather(mine, &mut self.gathered);
        Ok(met.map_err(|error| BuildError::from(ShardError::from(error)))?)
    }
}
