//! The exchange of draws over NCCL, NVIDIA's library for collectives.
#![allow(unsafe_code)]

pub(crate) mod communicator;
mod id;

use crate::abi::{DeviceAddress, Draw, Reduction, Row, status};
use crate::compile::{KernelSource, kernels};
use crate::device::{Device, Grid, Kernel, MAX_ROWS, Queue, RowsAndDraws, Scratch, check_rows, entries};
use crate::error::CudaError;
use communicator::Communicator;
use core::ffi::{c_int, c_void};
use core::time::Duration;
use cudarc::driver::CudaStream;
use cudarc::nccl::result::{self, NcclError};
use cudarc::nccl::sys;
use flash_sampling_core::Knob;
use std::sync::Arc;

pub use id::NcclId;

/// One instance, for all GPUs.
pub(crate) static SOURCE: KernelSource = KernelSource::single("reduction.cu", kernels::any);

const THREADS: u32 = 256;
/// Reduced words besides one per row, and words that are not reduced.
const REDUCED: usize = 2;
const OWN: usize = 1;

/// Whether NCCL can be loaded.
#[cfg(not(feature = "linked"))]
pub(crate) fn is_present() -> bool {
    // SAFETY: loads NCCL by its well-known names; its initialisers are NVIDIA's.
    unsafe { sys::is_culib_present() }
}

/// Always true: a program that is linked with NCCL does not start without it.
#[cfg(feature = "linked")]
pub(crate) fn is_present() -> bool {
    true
}

/// The NCCL version as its own number, for example 22803 for 2.28.3; `None` if NCCL cannot be loaded.
pub fn nccl_version() -> Option<i32> {
    is_present().then(|| result::get_nccl_version().ok()).flatten()
}

pub(crate) fn failed(action: &'static str) -> impl Fn(NcclError) -> CudaError {
    move |NcclError(code)| CudaError::Nccl { action, name: format!("{code:?}") }
}

/// One rank of a group of GPUs that merges the draws of all shards by one `ncclAllReduce`, with one word per row.
///
/// Every rank has the same draws of the whole vocabulary. A call is three launches on the caller's stream, after the
/// shard's draws. It allocates nothing and does not block the host, so a graph can capture the whole step.
///
/// Token and score have the bits of a sampler without shards; the logit is the score minus the noise. All ranks make
/// the same sequence of launches with the same rows; after a mismatch, every row has [`status::OTHER_CALL`].
///
/// NCCL allows at most one rank per GPU.
#[derive(Debug)]
pub struct DeviceNccl {
    /// Dropped first: dropping waits for the GPU until the timeout, then aborts work that waits for other ranks.
    comm: Communicator,
    /// The kernels and the memory, which were loaded and allocated before the connection.
    endpoint: NcclEndpoint,
    mark: u64,
}

/// What a rank loads and allocates before it connects.
///
/// Failures of a single rank happen here, because the other ranks would wait for it while they connect.
#[derive(Debug)]
pub struct NcclEndpoint {
    rank: usize,
    world: usize,
    max_rows: usize,
    to_words: Kernel<(Reduction,)>,
    from_words: Kernel<(Reduction,)>,
    device: Arc<Device>,
    words: Scratch,
}

impl NcclEndpoint {
    /// Rank `rank` of `world`, for calls of up to `max_rows` rows: loads the kernels and allocates the memory.
    ///
    /// # Errors
    /// * [`CudaError::Unavailable`]: NCCL cannot be loaded.
    /// * [`CudaError::TooLarge`]: more than 256 rows, or a rank beyond the world; [`CudaError::EmptyPlan`]: no rows.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(rank: usize, world: usize, max_rows: usize, device: &Arc<Device>) -> Result<NcclEndpoint, CudaError> {
        if !is_present() {
            return Err(CudaError::unavailable("the library libnccl cannot be loaded"));
        }
        let most = c_int::MAX as usize;
        CudaError::check_limits(&[
            ("ranks", world, most),
            ("ranks, this one counted,", rank.saturating_add(1), world),
            ("rows", max_rows, MAX_ROWS),
        ])?;
        if max_rows == 0 {
            return Err(CudaError::EmptyPlan { knob: Knob::MaxRows });
        }
        let to_words = device.function(&SOURCE, &SOURCE.instance(), &entries::TO_WORDS)?;
        let from_words = device.function(&SOURCE, &SOURCE.instance(), &entries::FROM_WORDS)?;
        let size = 8 * (max_rows + REDUCED + OWN);
        let all_zero = 0..size;
        let words = Scratch::new(size, &[all_zero], device)?;
        Ok(NcclEndpoint { rank, world, max_rows, to_words, from_words, device: device.clone(), words })
    }

    /// Connects with the other ranks of the id, and runs one reduction, which sets up NCCL's connections.
    ///
    /// All ranks call this function, each on its own thread or process. It returns when all ranks have called it, or
    /// after the longer of `limit` and a minute. After this timeout, an internal thread stays blocked in NCCL.
    /// [`DeviceNccl::wait`] takes at most `limit`.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`] without ranks; [`CudaError::Nccl`], [`CudaError::Driver`].
    pub fn connect(self, id: &NcclId, limit: Duration) -> Result<DeviceNccl, CudaError> {
        let comm = Communicator::connect(id, self.rank, self.world, &self.device, limit)?;
        let mut nccl = DeviceNccl { comm, endpoint: self, mark: 0 };
        let stream = nccl.endpoint.device.stream()?;
        nccl.reduce(&stream)?;
        nccl.wait(&stream)?;
        Ok(nccl)
    }
}

impl DeviceNccl {
    /// The maximum number of rows of a call.
    pub fn max_rows(&self) -> usize {
        self.endpoint.max_rows
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.endpoint.device
    }

    /// Sets the mark of later launches, a number that must be equal on every rank, as the rows must.
    ///
    /// For example, a mark counts the calls, including calls that failed on a rank before its launch. The mark is 0 at
    /// first. A captured launch keeps its mark.
    pub fn set_mark(&mut self, mark: u64) {
        self.mark = mark;
    }

    /// Replaces this shard's draws by draws of the whole vocabulary: enqueues three launches on `stream` and returns.
    ///
    /// `rows` and `draws` are those of the shard's own launch.
    ///
    /// # Errors
    /// * [`CudaError::TooLarge`]: more rows than planned.
    /// * [`CudaError::Layout`]: the address of the rows is not a multiple of 8, or the address of the draws not of 4.
    /// * [`CudaError::Nccl`], [`CudaError::Driver`].
    ///
    /// # Safety
    /// * `rows` and `draws` are device memory of this device with one [`abi::Row`](crate::abi::Row) and one
    ///   [`abi::Draw`](crate::abi::Draw) for each of `row_count` rows, until the launches have run.
    /// * No draw is [`UNDECIDED`](crate::abi::status::UNDECIDED), a status of [`DeviceFilters`](crate::DeviceFilters).
    ///   The exchange would make it an invalid logit on every rank. A shard cannot filter alone.
    /// * Launches of one value follow each other: on one stream, or ordered by events.
    /// * This value outlives the launches, and every launch of a graph that captured them. Dropping this value waits
    ///   for the GPU, at most until the timeout, so it is not dropped while a stream of the context captures.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        row_count: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function; this value owns the words, as many as it states.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue(queue, (rows, draws), row_count)
    }

    /// [`DeviceNccl::launch`].
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        (rows, draws): RowsAndDraws,
        row_count: usize,
    ) -> Result<(), CudaError> {
        CudaError::check_limits(&[("rows", row_count, self.endpoint.max_rows)])?;
        check_rows(rows, draws)?;
        if row_count == 0 {
            return Ok(());
        }
        let (words, max_rows) = (self.endpoint.words.begin_use(), self.endpoint.max_rows as u32);
        let call = Reduction { words, rows, draws, mark: self.mark, row_count: row_count as u32, max_rows };
        let blocks = call.row_count.div_ceil(THREADS);
        queue.launch(&self.endpoint.to_words, Grid::of(1, THREADS), (call,))?;
        self.reduce(queue.stream())?;
        queue.launch(&self.endpoint.from_words, Grid::of(blocks, THREADS), (call,))
    }

    /// Enqueues the reduction of the words.
    fn reduce(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        let comm = self.comm.raw()?;
        stream.context().bind_to_thread().map_err(CudaError::driver("bind the context"))?;
        let words = self.endpoint.words.begin_use::<u64>().get() as *mut c_void;
        let (kind, maximum) = (sys::ncclDataType_t::ncclUint64, sys::ncclRedOp_t::ncclMax);
        let (count, stream) = (self.endpoint.max_rows + REDUCED, stream.cu_stream().cast());
        // SAFETY: this value owns that many words, which NCCL reduces in place; the communicator is alive.
        unsafe { result::all_reduce(words, words, count, kind, maximum, comm, stream) }
            .map(drop)
            .map_err(failed("reduce the draws"))
    }

    /// Waits for the stream. After a timeout or an NCCL error, aborts this rank's communicator and its work on the GPU.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`] without ranks, because NCCL does not report them; [`CudaError::Nccl`],
    /// [`CudaError::Driver`].
    pub fn wait(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        self.comm.wait(stream)?;
        self.endpoint.words.mark_idle();
        Ok(())
    }

    /// Returns the error of an exchange, if any, from the draws of a call that has run.
    ///
    /// # Errors
    /// [`CudaError::OtherCall`].
    pub fn check(&self, draws: &[Draw]) -> Result<(), CudaError> {
        match draws.iter().any(|draw| draw.status == status::OTHER_CALL) {
            true => Err(CudaError::OtherCall { rank: None, row: None }),
            false => Ok(()),
        }
    }
}
