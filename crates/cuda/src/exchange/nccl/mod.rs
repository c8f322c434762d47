//! Ranks on GPUs that reduce their draws by NVIDIA's collectives library, NCCL.
#![allow(unsafe_code)]

pub(crate) mod communicator;
mod id;
#[cfg(test)]
mod tests;

use crate::abi::{DeviceAddress, Draw, Reduction, Row, status};
use crate::compile::kernels::{self, KernelSource};
use crate::device::alignment::check_rows;
use crate::device::entries;
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, Kernel, Queue};
use crate::device::scratch::Scratch;
use crate::device::tiled::RowsAndDraws;
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

/// One instance, for every GPU.
pub(crate) static SOURCE: KernelSource = KernelSource::single("reduction.cu", kernels::any);

/// Threads of a block.
const THREADS: u32 = 256;
/// Words that are reduced beside those of the rows, and one that is not.
const REDUCED: usize = 2;
const OWN: usize = 1;

/// Whether the library can be loaded.
#[cfg(not(feature = "linked"))]
pub(crate) fn is_present() -> bool {
    // SAFETY: loads a library by its well-known names; its initialisers are NVIDIA's.
    unsafe { sys::is_culib_present() }
}

/// A program that is linked with the library does not start without it.
#[cfg(feature = "linked")]
pub(crate) fn is_present() -> bool {
    true
}

/// The library's version as it numbers itself, 22803 for 2.28.3; `None` where it cannot be loaded.
pub fn nccl_version() -> Option<i32> {
    is_present().then(|| result::get_nccl_version().ok()).flatten()
}

pub(crate) fn failed(action: &'static str) -> impl Fn(NcclError) -> CudaError {
    move |NcclError(code)| CudaError::Nccl { action, name: format!("{code:?}") }
}

/// One rank of a group of GPUs, whose draws are reduced by one `ncclAllReduce` of a word a row: the draw of the whole
/// vocabulary on every rank. Three launches a call, on the caller's stream after the shard's draws; a call allocates
/// nothing and waits for nothing on the host, so the whole step can be captured into a graph.
///
/// Token and score are those of a sampler without shards, to the last bit; the logit is given as score minus noise. Ranks
/// make the same sequence of launches with the same rows; where they were called otherwise, every row has
/// [`status::OTHER_CALL`].
///
/// A GPU has one rank at most, as the library demands.
#[derive(Debug)]
pub struct DeviceNccl {
    /// Dropped first: it waits for the GPU, as long as the limit allows, and ends what waits there for the other ranks.
    comm: Communicator,
    rank: usize,
    world: usize,
    max_rows: usize,
    mark: u64,
    to_words: Kernel<(Reduction,)>,
    from_words: Kernel<(Reduction,)>,
    device: Arc<Device>,
    words: Scratch,
}

/// A rank that has made all that it needs for itself, and has not met the others. What can fail on one rank alone is done
/// before the ranks meet, where the others would wait for it.
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
    /// Rank `rank` of `world`, for calls of up to `max_rows` rows: loads the kernels and allocates.
    ///
    /// # Errors
    /// * [`CudaError::Unavailable`]: no library.
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

    /// Meets the other ranks of the id, and reduces once with them, so that later calls find their connections. A
    /// collective call that returns when all ranks have made it, each on a thread or process of its own, or when the longer
    /// of `limit` and a minute has passed; the library's own thread then stays behind. [`DeviceNccl::wait`] takes at most
    /// `limit`.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`], without the ranks; [`CudaError::Nccl`], [`CudaError::Driver`].
    pub fn connect(self, id: &NcclId, limit: Duration) -> Result<DeviceNccl, CudaError> {
        let NcclEndpoint { rank, world, max_rows, to_words, from_words, device, words } = self;
        let comm = Communicator::meet(id, rank, world, &device, limit)?;
        let mut nccl = DeviceNccl { comm, rank, world, max_rows, mark: 0, to_words, from_words, device, words };
        let stream = nccl.device.stream()?;
        nccl.reduce(&stream)?;
        nccl.wait(&stream)?;
        Ok(nccl)
    }
}

impl DeviceNccl {
    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Rows of the largest call.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Gives later launches a mark, a number that must be the same on every rank, as the rows are: the number of the call,
    /// say, counted even where a rank failed before its launch. 0 at first. A captured launch keeps the mark that it had.
    pub fn set_mark(&mut self, mark: u64) {
        self.mark = mark;
    }

    /// Makes the draws of the whole vocabulary out of this shard's: enqueues three launches on `stream` and returns. `rows`
    /// and `draws` are those of the shard's own launch; the draws are replaced.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`]: more rows than planned. [`CudaError::Layout`]: rows whose address is not a multiple of 8, draws
    /// whose address is not one of 4. [`CudaError::Nccl`], [`CudaError::Driver`].
    ///
    /// # Safety
    /// * `rows` and `draws` are device memory of this device with one [`abi::Row`](crate::abi::Row) and one
    ///   [`abi::Draw`](crate::abi::Draw) for each of `row_count` rows, until the launches have run.
    /// * No draw is [`UNDECIDED`](crate::abi::status::UNDECIDED), as [`DeviceFilters`](crate::DeviceFilters) leaves some: it
    ///   would come out on every rank as one of an invalid logit. Shards do not filter alone.
    /// * Launches of one value follow each other: on one stream, or ordered by events.
    /// * This value outlives the launches, and every launch of a graph that captured them. Dropping it waits for the GPU, at
    ///   most as long as the limit, so it is not dropped while a stream of the context captures.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        row_count: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function; the words are this value's, as many as it states.
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
        CudaError::check_limits(&[("rows", row_count, self.max_rows)])?;
        check_rows(rows, draws)?;
        if row_count == 0 {
            return Ok(());
        }
        let (words, max_rows) = (self.words.begin_use(), self.max_rows as u32);
        let call = Reduction { words, rows, draws, mark: self.mark, row_count: row_count as u32, max_rows };
        let blocks = call.row_count.div_ceil(THREADS);
        queue.launch(&self.to_words, Grid::of(1, THREADS), (call,))?;
        self.reduce(queue.stream())?;
        queue.launch(&self.from_words, Grid::of(blocks, THREADS), (call,))
    }

    /// Enqueues the reduction of the words.
    fn reduce(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        let comm = self.comm.raw()?;
        stream.context().bind_to_thread().map_err(CudaError::driver("bind the context"))?;
        let words = self.words.begin_use::<u64>().get() as *mut c_void;
        let (kind, maximum) = (sys::ncclDataType_t::ncclUint64, sys::ncclRedOp_t::ncclMax);
        let (count, stream) = (self.max_rows + REDUCED, stream.cu_stream().cast());
        // SAFETY: that many words of this value's, reduced in place; the communicator is alive.
        unsafe { result::all_reduce(words, words, count, kind, maximum, comm, stream) }
            .map(drop)
            .map_err(failed("reduce the draws"))
    }

    /// Waits for the stream. When that takes more than the time limit, or the library finds an error, the group is given up
    /// on this rank, and what waits on the GPU for the other ranks ends.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`], without the ranks, which the library does not tell; [`CudaError::Nccl`],
    /// [`CudaError::Driver`].
    pub fn wait(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        self.comm.wait(stream)?;
        self.words.mark_idle();
        Ok(())
    }

    /// What went wrong in an exchange, from the draws of a call that has run.
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
