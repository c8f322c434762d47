//! The filter benchmarks on a GPU: all inputs are in device memory, and events time each call with a cold cache.

use super::cases::{Case, Lists};
use super::inputs::{Inputs, Kind};
use super::{table, whole_calls};
use crate::args::GpuArgs;
use crate::gpu::clock::{PROTOCOL, calls};
use crate::gpu::head::copy;
use crate::gpu::peers::Peers;
use crate::gpu::read::{driver, failed};
use crate::record::Record;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling::RowParams;
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::{Draw, Row, RowFilters, status};
use flash_sampling::cuda::{
    Device, DeviceFilters, DeviceHead, DeviceMatrix, DeviceTiled, FilterKinds, RowEncoder, RowFeatures,
};
use flash_sampling_cli::bench::record::Passes;
use flash_sampling_cli::bench::timing::Contender;
use flash_sampling_cli::bench::{add, show};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use std::io::Write;
use std::sync::Arc;

/// The number of calls of each case whose draws are checked.
const CHECKED_CALLS: usize = 16;

/// A head in device memory, its sampler, and memory for draws.
struct Bench {
    stream: Arc<CudaStream>,
    tiled: DeviceTiled,
    filters: DeviceFilters,
    draws: CudaSlice<Draw>,
}

/// The parameters of all calls of a case, in device memory; each call uses the next ones.
struct Calls {
    rows: DeviceAddress<Row>,
    filters: Option<DeviceAddress<RowFilters>>,
    is_listed: bool,
    filter_kinds: FilterKinds,
    kinds: RowFeatures,
    of_call: usize,
    calls: usize,
    next: usize,
    _held: (CudaSlice<u8>, CudaSlice<Row>, CudaSlice<RowFilters>),
}

impl Calls {
    fn new(
        case: Case,
        lists: &Lists,
        (rows, calls): (usize, usize),
        vocab: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<Calls, CommandError> {
        let failed = driver("copy the parameters of the calls");
        let params: Vec<RowParams<'_>> = (0..rows).map(|r| case.row(lists, r, r as u64, 0)).collect();
        let mut encoder = RowEncoder::new(0..vocab as u32, vocab as u32);
        let encoded = encoder.encode(&params);
        encoded.map_err(|error| CommandError::usage(format!("a case of the benchmark: {error}")))?;
        let mut held_block = stream.alloc_zeros::<u8>(encoder.len()).map_err(&failed)?;
        let base = DeviceAddress::of(&held_block, stream);
        stream.memcpy_htod(encoder.block(base), &mut held_block).map_err(&failed)?;
        let of_call = |call: u64| encoder.rows().iter().map(move |row| Row { position: call, ..*row });
        let held_rows = stream.clone_htod(&(0..calls as u64).flat_map(of_call).collect::<Vec<_>>()).map_err(&failed)?;
        let filters = encoder.filters();
        let held_filters = stream.clone_htod(filters).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let (rows_at, filters_at) = (DeviceAddress::of(&held_rows, stream), DeviceAddress::of(&held_filters, stream));
        // The kernel with all features takes the lists and masks.
        let kinds = if encoder.features() == RowFeatures::Bare { RowFeatures::Bare } else { RowFeatures::Any };
        Ok(Calls {
            rows: rows_at,
            filters: filters.iter().any(|f| *f != RowFilters::OFF).then_some(filters_at),
            is_listed: filters.iter().any(RowFilters::is_listed),
            filter_kinds: FilterKinds::of(filters).with_rows(kinds),
            kinds,
            of_call: rows,
            calls,
            next: 0,
            _held: (held_block, held_rows, held_filters),
        })
    }

    fn advance(&mut self) -> DeviceAddress<Row> {
        let at = self.next % self.calls * self.of_call;
        self.next += 1;
        self.rows.add(at)
    }
}

impl Bench {
    fn new(
        weight: DeviceMatrix,
        most: usize,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CommandError> {
        let head = DeviceHead::of(weight);
        // SAFETY: the weight is device memory of this size, which the caller holds and no code writes to.
        let tiled = unsafe { DeviceTiled::new(head, most, device) }.map_err(failed)?;
        let filters = DeviceFilters::new(0..weight.rows as u32, most, device).map_err(failed)?;
        let draws = stream.alloc_zeros(most).map_err(driver("allocate memory"))?;
        Ok(Bench { stream: stream.clone(), tiled, filters, draws })
    }

    fn call(&mut self, hidden: &DeviceMatrix, calls: &mut Calls) -> Result<(), CommandError> {
        let (rows, draws) = (calls.advance(), DeviceAddress::of(&self.draws, &self.stream));
        let (stream, tiled) = (&self.stream, &mut self.tiled);
        // SAFETY: hidden states, rows with their lists, filters and draws are device memory of at least `hidden.rows`
        // rows, held by the caller; there is one stream; `RowFilters::of` bounds top-k.
        let launched = unsafe {
            match calls.filters {
                Some(filters) => {
                    let (of_rows, kinds) = ((rows, filters), calls.filter_kinds);
                    if !calls.is_listed {
                        return self.filters.launch(stream, tiled, hidden, of_rows, draws, kinds).map_err(failed);
                    }
                    // Lists exist only on Hopper.
                    match self.filters.launch_listed(stream, tiled, hidden, of_rows, draws) {
                        Ok(false) => self.filters.launch(stream, tiled, hidden, of_rows, draws, kinds),
                        listed => listed.map(drop),
                    }
                }
                None => tiled.launch(stream, hidden, rows, draws, calls.kinds),
            }
        };
        launched.map_err(failed)
    }

    /// Counts the rows that the GPU decides in one pass.
    fn passes(&mut self, hidden: &DeviceMatrix, calls: &mut Calls) -> Result<Passes, CommandError> {
        let mut passes = Passes::default();
        for _ in 0..CHECKED_CALLS {
            self.call(hidden, calls)?;
            let draws = self.stream.clone_dtoh(&self.draws.slice(..hidden.rows)).map_err(driver("copy the draws"))?;
            for draw in draws {
                match draw.status {
                    status::DRAWN => passes.add(1),
                    status::UNDECIDED => passes.add(2),
                    other => return Err(CommandError::usage(format!("a row of the benchmark came to status {other}"))),
                }
            }
        }
        Ok(passes)
    }
}

/// Times every case on every kind of rows. The passes show which rows the GPU decides in one pass.
///
/// If most rows of a case are undecided, its whole calls are timed too. Times of other programs, if given, are for the
/// LLM-like rows.
///
/// # Errors
/// No GPU, errors of the backend, Ctrl-C.
pub fn run(
    args: &GpuArgs,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let (device, mut clock) = crate::gpu::start(args)?;
    let stream = clock.stream().clone();
    let peers = args.peers.as_deref().map(Peers::read).transpose()?;
    record.protocol = Some(PROTOCOL.into());
    for size in args.sizes() {
        let (vocab, hidden_size, rounds) = (size.vocab, size.hidden, size.rounds);
        let inputs = Inputs::new(size, args.sizes.dtype)?;
        let (head, _held_weight) = copy(inputs.weight.matrix()?, &stream)?;
        for (kind, states) in &inputs.states {
            let (all, _held_states) = copy(states.matrix()?, &stream)?;
            for &rows in &inputs.size.rows {
                let hidden = DeviceMatrix { rows, ..all };
                let empty = || inputs.section("fused pipeline", *kind, rows, rounds);
                let mut section = empty();
                let mut passes = Vec::new();
                let mut contenders = Vec::new();
                for case in Case::ALL {
                    let mut bench = Bench::new(head, rows, &device, &stream)?;
                    let count = calls(rounds);
                    let mut calls = Calls::new(case, &inputs.lists, (rows, count), vocab, &stream)?;
                    passes.push(bench.passes(&hidden, &mut calls)?);
                    contenders.push(Contender::new(case.name(), move || bench.call(&hidden, &mut calls)));
                }
                let timings = clock.time(&mut contenders, rounds, interrupt)?;
                section.fill(contenders.iter().map(|contender| contender.name.as_str()), &timings);
                section.entries.iter_mut().zip(passes).for_each(|(entry, passes)| entry.passes = Some(passes));
                if let (Some(peers), Kind::LlmLike) = (&peers, kind) {
                    section.peers = peers.of(vocab, hidden_size, rows);
                }
                drop(contenders);
                let mut open = whole_calls::undecided(&section);
                if *kind == Kind::LlmLike {
                    open.extend([Case::FewLogprobs, Case::Logprobs]);
                }
                add(record, section, out, table::of_one_pass)?;
                if !open.is_empty() {
                    let (cases, of) = ((&*open, &inputs.lists), (head, &hidden));
                    let whole = whole_calls::time(empty(), cases, of, (&device, &stream), interrupt)?;
                    add(record, whole, out, table::section)?;
                }
            }
        }
    }
    record.peers = peers.map(|peers| peers.source);
    show(out, table::end)
}
