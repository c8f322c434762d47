//! Timing on a GPU: events around calls with a cold cache.

use crate::gpu::read::driver;
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream};
use flash_sampling_cli::bench::timing::{Contender, Timing};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use std::sync::Arc;
use std::time::Duration;

/// Bytes written before each call: several times the cache of any GPU.
const FLUSH: usize = 256 << 20;
/// Calls that are enqueued before the host waits and checks for Ctrl-C.
const AHEAD: usize = 125;

/// The timing protocol, for records.
pub const PROTOCOL: &str = "blocks: rest, warm-ups, timed calls; all contenders again in opposite order; the cache full of \
                            lines that were written";

/// The number of warm-up calls before `rounds` timed calls.
fn warm(rounds: usize) -> usize {
    rounds.div_ceil(4)
}

/// The number of calls of one contender, warm-ups included.
pub fn calls(rounds: usize) -> usize {
    2 * (warm(rounds) + rounds)
}

/// Times work on a stream. Each contender runs in its own block, after a rest in which the GPU cools.
#[derive(Debug)]
pub struct Clock {
    rest: Duration,
    stream: Arc<CudaStream>,
    flush: CudaSlice<u8>,
}

impl Clock {
    /// A clock for a stream, with a rest of this length before each block.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(rest: Duration, stream: Arc<CudaStream>) -> Result<Self, CommandError> {
        let flush = stream.alloc_zeros(FLUSH).map_err(driver("allocate memory"))?;
        Ok(Clock { rest, stream, flush })
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    fn wait(&self) -> Result<(), CommandError> {
        self.stream.synchronize().map_err(driver("run what is timed"))
    }

    /// Enqueues one call between two events, with a cold cache.
    fn call(&mut self, contender: &mut Contender<'_>) -> Result<(CudaEvent, CudaEvent), CommandError> {
        let failed = driver("time a call");
        let event = || self.stream.context().new_event(Some(CU_EVENT_DEFAULT)).map_err(&failed);
        let (start, end) = (event()?, event()?);
        self.stream.memset_zeros(&mut self.flush).map_err(driver("fill the cache"))?;
        start.record(&self.stream).map_err(&failed)?;
        (contender.run)()?;
        end.record(&self.stream).map_err(&failed)?;
        Ok((start, end))
    }

    /// Times all contenders in order, then all in reverse order. A block has a quarter of `rounds` untimed calls, then
    /// `rounds` timed ones.
    ///
    /// # Errors
    /// Errors of a contender and the driver; [`CommandError::Interrupted`].
    pub fn time(
        &mut self,
        contenders: &mut [Contender<'_>],
        rounds: usize,
        interrupt: &Interrupt,
    ) -> Result<Vec<Timing>, CommandError> {
        let count = contenders.len();
        let mut times = vec![Vec::with_capacity(2 * rounds); count];
        for which in (0..count).chain((0..count).rev()) {
            let (contender, times) = (&mut contenders[which], &mut times[which]);
            self.wait()?;
            std::thread::sleep(self.rest);
            (0..warm(rounds)).try_for_each(|_| (contender.run)())?;
            self.wait()?;
            let mut left = rounds;
            while left > 0 {
                interrupt.check()?;
                let ahead = left.min(AHEAD);
                let calls = (0..ahead).map(|_| self.call(contender)).collect::<Result<Vec<_>, _>>()?;
                self.wait()?;
                for (start, end) in calls {
                    let milliseconds = start.elapsed_ms(&end).map_err(driver("read a time"))?;
                    times.push(f64::from(milliseconds) * 1e-3);
                }
                left -= ahead;
            }
        }
        Ok(times.into_iter().map(Timing::of).collect())
    }
}
