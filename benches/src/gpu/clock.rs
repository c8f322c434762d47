//! Timing on a GPU: events around calls that find a cold cache.

use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr};
use flash_sampling::cuda::Device;
use flash_sampling_cli::bench::cuda::{Read, Way, driver};
use flash_sampling_cli::bench::timing::{Contender, Timing};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use std::sync::Arc;
use std::time::Duration;

/// What is written or read before each call: several times the cache of any GPU.
const FLUSH: usize = 256 << 20;
/// Calls that are enqueued before the host waits, and looks for Ctrl-C.
const AHEAD: usize = 125;

/// In which order contenders are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Each by itself, after a pause in which the GPU cools; then all once more in the opposite order. The clocks are
    /// those of a GPU that has power to spare.
    Blocks {
        /// How long the GPU rests before each block.
        rest: Duration,
    },
    /// By turns without a pause, each round beginning with another one. Large products then run into the GPU's power
    /// limit, and its clocks fall, for all contenders alike.
    Sustained,
}

impl Protocol {
    fn describe(self) -> &'static str {
        match self {
            Protocol::Blocks { .. } => "blocks: rest, warm-ups, timed calls; all contenders again in opposite order",
            Protocol::Sustained => "sustained: by turns without a pause",
        }
    }

    /// Blocks or rounds of all contenders.
    fn passes(self) -> usize {
        match self {
            Protocol::Blocks { .. } => 2,
            Protocol::Sustained => 1,
        }
    }

    /// Calls of one contender, warm-ups among them.
    pub fn calls(self, rounds: usize) -> usize {
        self.passes() * (warm(rounds) + rounds)
    }
}

/// Warm-ups before `rounds` timed calls.
fn warm(rounds: usize) -> usize {
    rounds.div_ceil(4)
}

/// What a call finds in the GPU's cache, whose lines are others' in any case.
#[derive(Debug)]
pub enum Cache {
    /// Lines that were written: what a call leaves of them needs no way to memory, what it pushes out does.
    Written,
    /// Lines that were read: what a call stores has room at once.
    Read(Read),
}

impl Cache {
    /// As `--clean-cache` asks.
    ///
    /// # Errors
    /// The compiler's, the driver's.
    pub fn new(is_clean: bool, device: &Device) -> Result<Self, CommandError> {
        let read = if is_clean { Read::new(Way::Streaming, device)? } else { None };
        Ok(read.map_or(Cache::Written, Cache::Read))
    }

    fn describe(&self) -> &'static str {
        match self {
            Cache::Written => "the cache full of lines that were written",
            Cache::Read(_) => "the cache full of lines that were read",
        }
    }
}

/// Times what is enqueued on a stream.
#[derive(Debug)]
pub struct Clock {
    protocol: Protocol,
    cache: Cache,
    stream: Arc<CudaStream>,
    flush: CudaSlice<u8>,
}

/// A call between two events: whose it is, and whether it counts.
struct Pending {
    which: usize,
    counts: bool,
    start: CudaEvent,
    end: CudaEvent,
}

impl Clock {
    /// A clock for a stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(protocol: Protocol, cache: Cache, stream: Arc<CudaStream>) -> Result<Self, CommandError> {
        let flush = stream.alloc_zeros(FLUSH).map_err(driver("allocate memory"))?;
        Ok(Clock { protocol, cache, stream, flush })
    }

    /// For records.
    pub fn describe(&self) -> String {
        format!("{}; {}", self.protocol.describe(), self.cache.describe())
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// The protocol.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Waits for all that was enqueued.
    fn wait(&self) -> Result<(), CommandError> {
        self.stream.synchronize().map_err(driver("run what is timed"))
    }

    fn fill_cache(&mut self) -> Result<(), CommandError> {
        match &self.cache {
            Cache::Written => self.stream.memset_zeros(&mut self.flush).map_err(driver("fill the cache")),
            Cache::Read(read) => {
                let address = self.flush.device_ptr(&self.stream).0;
                // SAFETY: the memory is this value's, and as long as the stream.
                unsafe { read.launch(&self.stream, address, FLUSH as u64) }
            }
        }
    }

    /// Enqueues one call between two events, the cache cold.
    fn call(&mut self, which: usize, contender: &mut Contender<'_>, counts: bool) -> Result<Pending, CommandError> {
        let failed = driver("time a call");
        let event = || self.stream.context().new_event(Some(CU_EVENT_DEFAULT)).map_err(&failed);
        let (start, end) = (event()?, event()?);
        self.fill_cache()?;
        start.record(&self.stream).map_err(&failed)?;
        (contender.run)()?;
        end.record(&self.stream).map_err(&failed)?;
        Ok(Pending { which, counts, start, end })
    }

    /// Times all contenders: a quarter of `rounds` calls that do not count, then `rounds` that do, in each pass of the
    /// protocol.
    ///
    /// # Errors
    /// A contender's error, the driver's; [`CommandError::Interrupted`].
    pub fn time(
        &mut self,
        contenders: &mut [Contender<'_>],
        rounds: usize,
        interrupt: &Interrupt,
    ) -> Result<Vec<Timing>, CommandError> {
        let (count, warm) = (contenders.len(), warm(rounds));
        let mut times = vec![Vec::with_capacity(2 * rounds); count];
        match self.protocol {
            Protocol::Blocks { rest } => {
                for which in (0..count).chain((0..count).rev()) {
                    self.wait()?;
                    std::thread::sleep(rest);
                    for _ in 0..warm {
                        (contenders[which].run)()?;
                    }
                    self.wait()?;
                    self.run(contenders, (0..rounds).map(|_| (which, true)), &mut times, interrupt)?;
                }
            }
            Protocol::Sustained => {
                let turn = |round| (0..count).map(move |turn| ((round + turn) % count, round >= warm));
                self.run(contenders, (0..warm + rounds).flat_map(turn), &mut times, interrupt)?;
            }
        }
        Ok(times.into_iter().map(Timing::of).collect())
    }

    fn run(
        &mut self,
        contenders: &mut [Contender<'_>],
        calls: impl Iterator<Item = (usize, bool)>,
        times: &mut [Vec<f64>],
        interrupt: &Interrupt,
    ) -> Result<(), CommandError> {
        let mut calls = calls.peekable();
        let mut pending = Vec::with_capacity(AHEAD);
        while calls.peek().is_some() {
            interrupt.check()?;
            for (which, counts) in calls.by_ref().take(AHEAD) {
                pending.push(self.call(which, &mut contenders[which], counts)?);
            }
            self.wait()?;
            for Pending { which, counts, start, end } in pending.drain(..) {
                let milliseconds = start.elapsed_ms(&end).map_err(driver("read a time"))?;
                if counts {
                    times[which].push(f64::from(milliseconds) * 1e-3);
                }
            }
        }
        Ok(())
    }
}
