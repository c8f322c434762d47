//! Options for the use of the machine.

use crate::error::CpuError;
use crate::isa::Isa;

/// Options of all samplers of this crate. By default, samplers use the best instruction set and rayon's global pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// The instruction set of the dot products; `None` = the fastest for the types.
    pub isa: Option<Isa>,
    /// `Some(1)`: the caller's thread; `Some(n)`: the sampler's own pool; `None`: rayon's global pool.
    pub threads: Option<usize>,
}

/// More threads than today's machines have cores.
const MAX_THREADS: usize = 1024;

/// The threads of a sampler.
#[derive(Debug)]
pub(crate) enum Threads {
    /// The caller's thread.
    One,
    /// The sampler's own pool, or rayon's global pool.
    Pool(Option<rayon::ThreadPool>),
}

impl Threads {
    pub(crate) fn new(threads: Option<usize>) -> Result<Self, CpuError> {
        match threads {
            Some(1) => Ok(Threads::One),
            Some(threads) if threads == 0 || threads > MAX_THREADS => {
                Err(CpuError::ThreadCount { threads, limit: MAX_THREADS })
            }
            Some(n) => {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build()?;
                Ok(Threads::Pool(Some(pool)))
            }
            None if rayon::current_num_threads() == 1 => Ok(Threads::One),
            None => Ok(Threads::Pool(None)),
        }
    }

    pub(crate) fn count(&self) -> usize {
        match self {
            Threads::One => 1,
            Threads::Pool(Some(pool)) => pool.current_num_threads(),
            Threads::Pool(None) => rayon::current_num_threads(),
        }
    }

    /// Runs `work` on these threads.
    pub(crate) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match self {
            Threads::Pool(Some(pool)) => pool.install(work),
            _ => work(),
        }
    }
}
