//! One rank: its shard of the head, its stream, and the clock of all ranks.

use super::{GPU_LIMIT, Group, gather, slowest};
use crate::gpu::head::copy;
use crate::gpu::read::{driver, failed};
use cudarc::driver::sys::{CUevent_flags::CU_EVENT_DEFAULT, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling::cuda::DeviceAddress;
use flash_sampling::cuda::abi::{Draw, Row, status};
use flash_sampling::cuda::{CudaError, Device, DeviceHead, DeviceMatrix};
use flash_sampling::distributed::{Loopback, Transport};
use flash_sampling_cli::args::BenchSize;
use flash_sampling_cli::bench::cases::Inputs;
use flash_sampling_cli::bench::timing::Timing;
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::input::synthetic::Logits;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Replays that are timed as one.
pub const REPLAYS: usize = 100;
/// The number of such times.
pub const TIMES: usize = 8;
/// Untimed replays before them.
const WARM: usize = 20;
/// Idle time before each of the times, so that the GPU is equally cool for all steps.
const REST: Duration = Duration::from_millis(100);

/// Enqueues a step on a stream.
pub type Step<'a> = dyn FnMut(&CudaStream) -> Result<(), CommandError> + 'a;

/// One rank: its shard of the head, its stream, and the clock of all ranks.
#[derive(Debug)]
pub struct Rank {
    transport: Loopback,
    /// Its GPU.
    pub device: Arc<Device>,
    /// Its stream.
    pub stream: Arc<CudaStream>,
    /// Its shard.
    pub shard: DeviceHead,
    /// The whole head, on rank 0; its shard is a part of it.
    pub whole: Option<DeviceHead>,
    hidden: DeviceMatrix,
    /// The parameters of the rows of all ranks: the rivals draw from the logits of every rank.
    pub rows: DeviceAddress<Row>,
    gathered: Vec<Vec<u8>>,
    _held: (CudaSlice<u8>, CudaSlice<u8>, CudaSlice<Row>),
}

impl Rank {
    /// Copies the shard and the hidden states of the largest batch to the rank's GPU; on rank 0 the whole weight.
    ///
    /// # Errors
    /// Errors of the driver, or a vocabulary that does not divide evenly among the ranks.
    pub fn new(transport: Loopback, group: &Group, size: &BenchSize, inputs: &Inputs) -> Result<Rank, CommandError> {
        let (rank, world) = (transport.rank(), transport.world());
        if !size.vocab.is_multiple_of(8 * world) {
            return Err(CommandError::usage(format!("{} tokens cannot be shared out among {world} GPUs", size.vocab)));
        }
        let tokens = size.vocab / world;
        let device = group.devices[rank].clone();
        let stream = device.context().new_stream().map_err(driver("make a stream"))?;
        let weight = inputs.weight()?;
        let part = if rank == 0 { 0..size.vocab } else { rank * tokens..(rank + 1) * tokens };
        let (there, held_weight) = copy(weight.row_range(part), &stream)?;
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let (hidden, held_hidden) = copy(inputs.states(Logits::Peaked, most)?, &stream)?;
        let head = |weight, first_token| DeviceHead { first_token, ..DeviceHead::of(weight) };
        let row = |seed| Row { seed, position: 5, inv_temperature: 1.0, ..Row::default() };
        let rows: Vec<_> = (0..world * most).map(|row_of| row((row_of % most) as u64)).collect();
        let held_rows = stream.clone_htod(&rows).map_err(driver("copy the parameters"))?;
        let rows_at = DeviceAddress::of(&held_rows, &stream);
        stream.synchronize().map_err(driver("copy the inputs"))?;
        Ok(Rank {
            transport,
            device,
            stream,
            shard: head(DeviceMatrix { rows: tokens, ..there }, (rank * tokens) as u32),
            whole: (rank == 0).then(|| head(there, 0)),
            hidden,
            rows: rows_at,
            gathered: Vec::new(),
            _held: (held_weight, held_hidden, held_rows),
        })
    }

    /// This rank's number.
    pub fn number(&self) -> usize {
        self.transport.rank()
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.transport.world()
    }

    /// Rows of the largest batch.
    pub fn most(&self) -> usize {
        self.hidden.rows
    }

    /// The first rows of hidden states.
    pub fn states(&self, rows: usize) -> DeviceMatrix {
        DeviceMatrix { rows, ..self.hidden }
    }

    /// Gathers the bytes of every rank, in order.
    ///
    /// # Errors
    /// A missing rank.
    pub fn gather(&mut self, mine: &[u8]) -> Result<&[Vec<u8>], CommandError> {
        gather(&mut self.transport, mine, &mut self.gathered)?;
        Ok(&self.gathered)
    }

    /// Waits for the stream, at most for the longest time of the steps: with a missing rank, the GPU may wait forever.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`], errors of the driver.
    pub fn finish(&self) -> Result<(), CommandError> {
        let waiting = driver("wait for the steps");
        let done = self.stream.record_event(None).map_err(&waiting)?;
        let begun = Instant::now();
        while !done.try_is_complete().map_err(&waiting)? {
            if begun.elapsed() > GPU_LIMIT {
                return Err(failed(CudaError::LateRanks { ranks: Vec::new(), limit: GPU_LIMIT }));
            }
            std::hint::spin_loop();
        }
        self.stream.synchronize().map_err(waiting)
    }

    /// Captures a step, and times its replays on all ranks at the same time. Without a step, only takes part in the
    /// timing of the others. The times are from the slowest rank.
    ///
    /// At the end `draws` has the draws of one more replay; its earlier content is cleared.
    ///
    /// # Errors
    /// Errors of the step and the driver, a missing rank.
    pub fn time(
        &mut self,
        step: Option<&mut Step<'_>>,
        draws: Option<&mut CudaSlice<Draw>>,
    ) -> Result<Timing, CommandError> {
        let (failed, stream) = (driver("time a step"), self.stream.clone());
        let graph = match step {
            None => None,
            Some(step) => {
                // The first call may do more than later ones, so it is not captured.
                step(&stream)?;
                self.finish()?;
                stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(&failed)?;
                let captured = step(&stream);
                let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(&failed)?;
                captured?;
                graph
            }
        };
        let replay = |count: usize| match &graph {
            Some(graph) => (0..count).try_for_each(|_| graph.launch()),
            None => Ok(()),
        };
        replay(WARM).map_err(&failed)?;
        let mut times = Vec::with_capacity(TIMES);
        for _ in 0..TIMES {
            self.finish()?;
            std::thread::sleep(REST);
            self.gather(&[])?;
            let event = || stream.context().new_event(Some(CU_EVENT_DEFAULT));
            let (start, end) = (event().map_err(&failed)?, event().map_err(&failed)?);
            start.record(&stream).map_err(&failed)?;
            replay(REPLAYS).map_err(&failed)?;
            end.record(&stream).map_err(&failed)?;
            self.finish()?;
            times.push(f64::from(start.elapsed_ms(&end).map_err(&failed)?) * 1e-3 / REPLAYS as f64);
        }
        if let Some(draws) = draws {
            let none = Draw { token: u32::MAX, score: f32::NAN, logit: f32::NAN, status: status::NO_FINITE_LOGIT };
            stream.memcpy_htod(&vec![none; draws.len()], draws).map_err(&failed)?;
            replay(1).map_err(&failed)?;
            self.finish()?;
        }
        slowest(&mut self.transport, times, &mut self.gathered)
    }
}
