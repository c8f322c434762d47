//! Timing on a GPU: events around calls that find a cold cache.

use super::driver;
use crate::bench::timing::{Contender, Timing};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use flash_sampling::cuda::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use flash_sampling::cuda::cudarc::driver::{CudaEvent, CudaSlice, CudaStream};
use std::sync::Arc;

/// What is written before each call: several times the cache of any GPU.
const FLUSH: usize = 256 << 20;
/// Rounds that are enqueued before the host waits, and looks for Ctrl-C.
const AHEAD: usize = 10;

/// Times what is enqueued on a stream.
#[derive(Debug)]
pub struct Clock {
    stream: Arc<CudaStream>,
    flush: CudaSlice<u8>,
}

impl Clock {
    /// A clock for a stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(stream: Arc<CudaStream>) -> Result<Self, CommandError> {
        let flush = stream.alloc_zeros(FLUSH).map_err(driver("allocate memory"))?;
        Ok(Clock { stream, flush })
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Waits for all that was enqueued.
    ///
    /// # Errors
    /// The driver's, also of what ran.
    pub fn wait(&self) -> Result<(), CommandError> {
        self.stream.synchronize().map_err(driver("run what is timed"))
    }

    /// One call between two events, the cache cold.
    fn call(&mut self, contender: &mut Contender<'_>) -> Result<(CudaEvent, CudaEvent), CommandError> {
        let failed = driver("time a call");
        let event = || self.stream.context().new_event(Some(CU_EVENT_DEFAULT)).map_err(&failed);
        let (start, end) = (event()?, event()?);
        self.stream.memset_zeros(&mut self.flush).map_err(&failed)?;
        start.record(&self.stream).map_err(&failed)?;
        (contender.run)()?;
        end.record(&self.stream).map_err(&failed)?;
        Ok((start, end))
    }

    /// Runs all contenders in turn: `warm` rounds that do not count, then `rounds` that do. Each round begins with
    /// another contender.
    ///
    /// # Errors
    /// A contender's error, the driver's; [`CommandError::Interrupted`].
    pub fn in_turn(
        &mut self,
        contenders: &mut [Contender<'_>],
        warm: usize,
        rounds: usize,
        interrupt: &Interrupt,
    ) -> Result<Vec<Timing>, CommandError> {
        let count = contenders.len();
        let mut times = vec![Vec::with_capacity(rounds); count];
        let mut events = Vec::with_capacity(AHEAD * count);
        for round in 0..warm + rounds {
            for turn in 0..count {
                let which = (round + turn) % count;
                let pair = self.call(&mut contenders[which])?;
                events.push((which, round >= warm, pair));
            }
            if (round + 1) % AHEAD == 0 || round + 1 == warm + rounds {
                interrupt.check()?;
                self.wait()?;
                for (which, counts, (start, end)) in events.drain(..) {
                    let milliseconds = start.elapsed_ms(&end).map_err(driver("read a time"))?;
                    if counts {
                        times[which].push(f64::from(milliseconds) * 1e-3);
                    }
                }
            }
        }
        Ok(times.into_iter().map(Timing::of).collect())
    }
}
