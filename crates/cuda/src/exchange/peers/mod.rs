//! The exchange between ranks whose GPUs store into each other's memory.
//!
//! The GPUs are NVLink or PCIe peers of one machine. The ranks run in one process or in several.
#![allow(unsafe_code)]

mod descriptor;
mod gathered;
mod mailbox;
#[cfg(test)]
mod tests;

use crate::abi::{self, DeviceAddress, Draw, MAX_PEERS, Row, status};
use crate::compile::{KernelSource, kernels};
use crate::device::{Device, Grid, Kernel, MAX_ROWS, Queue, RowsAndDraws, check_rows, entries, wait};
use crate::error::CudaError;
use core::time::Duration;
use cudarc::driver::CudaStream;
use descriptor::PeerDescriptor;
use flash_sampling_core::Knob;
use gathered::GatheredLogits;
pub(crate) use gathered::{GatheredRows, LogitMatrix};
use mailbox::{Mailbox, MappedMailbox, TURNS};
use std::sync::Arc;

/// Threads per block of the exchange's launch. Each thread handles a pair of row and rank.
const THREADS: u32 = 256;

/// The kernel of the exchange, with one instance for all GPUs.
pub(crate) static SOURCE: KernelSource = KernelSource::single("peers.cu", kernels::any);

/// A rank that has allocated its mailbox and is not yet connected to the other ranks.
///
/// Every rank sends its [`descriptor`](PeerEndpoint::descriptor) to every other rank over any channel, and then
/// [`connects`](PeerEndpoint::connect).
#[derive(Debug)]
pub struct PeerEndpoint {
    descriptor: PeerDescriptor,
    mailbox: Arc<Mailbox>,
    kernel: Kernel<(abi::Peers,)>,
    device: Arc<Device>,
}

impl PeerEndpoint {
    /// Plans rank `rank` of `world` on a device, for calls of up to `max_rows` rows.
    ///
    /// Allocates the mailbox, 4192 bytes per rank and row, and loads the kernel.
    ///
    /// # Errors
    /// * [`CudaError::TooLarge`]: more than 32 ranks, a rank that is not below `world`, or more than 256 rows.
    /// * [`CudaError::EmptyPlan`]: no rows.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(rank: usize, world: usize, max_rows: usize, device: &Arc<Device>) -> Result<PeerEndpoint, CudaError> {
        CudaError::check_limits(&[
            ("ranks", world, MAX_PEERS),
            ("ranks, this one counted,", rank.saturating_add(1), world),
            ("rows", max_rows, MAX_ROWS),
        ])?;
        if max_rows == 0 {
            return Err(CudaError::EmptyPlan { knob: Knob::MaxRows });
        }
        let kernel = device.function(&SOURCE, &SOURCE.instance(), &entries::JOIN_PEERS)?;
        let mailbox = Mailbox::new(world, max_rows, device)?;
        let descriptor = PeerDescriptor {
            process: PeerDescriptor::this_process(),
            mailbox: mailbox.id(),
            rank: rank as u32,
            world: world as u32,
            max_rows: max_rows as u64,
            vocab_size: 0,
            handle: mailbox.handle(),
        };
        Ok(PeerEndpoint { descriptor, mailbox, kernel, device: device.clone() })
    }

    /// Returns the bytes that the other ranks need in order to connect.
    ///
    /// After this call another process may hold the mailbox open, 4192 bytes per rank and row. So the mailbox is not
    /// freed before this process ends, unless all ranks of [`connect`](PeerEndpoint::connect) are in this process.
    pub fn descriptor(&self) -> Vec<u8> {
        self.mailbox.set_shared(self.descriptor.world > 1);
        self.descriptor.encode()
    }

    /// Opens the mailboxes of all ranks; `descriptors[r]` is the descriptor of rank `r`, this rank included.
    ///
    /// A wait for another rank takes at most `limit`. Launch only after every rank has connected.
    ///
    /// # Errors
    /// * [`CudaError::Rank`] names a rank whose descriptor is unreadable, whose plan differs, or whose memory this
    ///   device cannot reach.
    /// * [`CudaError::Driver`].
    pub fn connect(self, descriptors: &[Vec<u8>], limit: Duration) -> Result<DevicePeers, CudaError> {
        let PeerEndpoint { descriptor, mailbox, kernel, device } = self;
        let (opened, mailboxes) = MappedMailbox::all(&descriptor, descriptors, &mailbox, &device)?;
        let call = abi::Peers {
            mailboxes,
            rows: DeviceAddress::NULL,
            draws: DeviceAddress::NULL,
            state: mailbox.state(),
            limit: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX),
            pause: 0,
            mark: 0,
            rank: descriptor.rank,
            world: descriptor.world,
            lanes: descriptor.world.next_power_of_two(),
            row_count: 0,
            max_rows: descriptor.max_rows as u32,
            turns: TURNS as u32,
        };
        let (is_pending, gathered) = (false, None);
        Ok(DevicePeers { call, kernel, device, limit, is_pending, gathered, _opened: opened, mailbox })
    }
}

/// One rank of a group of GPUs, which merges the draws of all shards (paper Alg. 1, lines 10 to 16).
///
/// A call is one small launch on the caller's stream, after the launch that draws from the shard. No host and no
/// library takes part in the exchange. The launch allocates nothing and blocks no host thread, so a graph can capture
/// and replay the whole step.
///
/// Every rank sends 32 bytes per row to every rank, and waits on the GPU for the draws of all ranks. Every rank then
/// has the same draws of the whole vocabulary: token, score and logit have the bits of a sampler without shards. If a
/// row has invalid logits, the draw reports one of these: a raw logit before a transformed one, then the lowest token.
///
/// All ranks make the same sequence of launches. [`DevicePeers::check`] turns two statuses into errors:
/// * [`status::LATE_RANK`]: a rank did not send the row within the time limit. The group is then broken, and later
///   launches neither send nor wait.
/// * [`status::OTHER_CALL`]: a rank was called with another number of rows, seed, position, draw, temperature or
///   [mark](DevicePeers::set_mark), or only some of the ranks have a mask.
///
/// A rank that skips a launch receives, in its next launch, the draws that the other ranks sent for the skipped launch.
/// Only a difference in rows or mark reveals this mismatch.
///
/// Each rank measures the time limit on its own clock. A rank that arrives at the very end of the others' limit may
/// still draw, although the others have timed out. This rank learns of the timeout in its next launch, in which the
/// others send nothing. So a caller keeps state that must not differ between ranks only after the step has succeeded on
/// all ranks.
#[derive(Debug)]
pub struct DevicePeers {
    call: abi::Peers,
    kernel: Kernel<(abi::Peers,)>,
    device: Arc<Device>,
    limit: Duration,
    is_pending: bool,
    /// For calls that do not wait, with filters or log-probabilities, once connected.
    gathered: Option<GatheredLogits>,
    /// Keeps the mailboxes open, since the kernel has their addresses.
    _opened: Vec<MappedMailbox>,
    mailbox: Arc<Mailbox>,
}

impl DevicePeers {
    /// Connects all ranks of a group within this process, one for each device, in order.
    ///
    /// For tests, a device may have several ranks. No waiting work may then precede their launches in a hardware queue
    /// of the device (see `CUDA_DEVICE_MAX_CONNECTIONS`).
    ///
    /// # Errors
    /// As [`PeerEndpoint::new`] and [`PeerEndpoint::connect`].
    pub fn group(devices: &[Arc<Device>], max_rows: usize, limit: Duration) -> Result<Vec<DevicePeers>, CudaError> {
        let endpoint = |(rank, device)| PeerEndpoint::new(rank, devices.len(), max_rows, device);
        let endpoints = devices.iter().enumerate().map(endpoint).collect::<Result<Vec<_>, _>>()?;
        let descriptors: Vec<_> = endpoints.iter().map(PeerEndpoint::descriptor).collect();
        endpoints.into_iter().map(|endpoint| endpoint.connect(&descriptors, limit)).collect()
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> usize {
        self.call.rank as usize
    }

    /// Returns the number of rows of the largest call.
    pub fn max_rows(&self) -> usize {
        self.call.max_rows as usize
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Sets the mark of later launches, a number that must be equal on every rank, as the rows must.
    ///
    /// For example, a mark counts the calls, also the calls in which a rank fails before its launch. The mark is 0 at
    /// first. A captured launch keeps its mark.
    pub fn set_mark(&mut self, mark: u64) {
        self.call.mark = mark;
    }

    /// Replaces this shard's draws by the draws of the whole vocabulary: enqueues one launch on `stream` and returns.
    ///
    /// `rows` and `draws` are those of the shard's own launch.
    ///
    /// # Errors
    /// * [`CudaError::TooLarge`]: more rows than planned.
    /// * [`CudaError::Layout`]: the address of the rows is not a multiple of 8, or the address of the draws not of 4.
    /// * [`CudaError::Driver`].
    ///
    /// # Safety
    /// * `rows` and `draws` are device memory of this device with one [`abi::Row`](crate::abi::Row) and one
    ///   [`abi::Draw`](crate::abi::Draw) for each of `row_count` rows, until the launch has run.
    /// * No draw is [`UNDECIDED`](crate::abi::status::UNDECIDED), a status of [`DeviceFilters`](crate::DeviceFilters).
    ///   The exchange would make it an invalid logit on every rank. A shard cannot filter alone.
    /// * Every rank of the group has connected.
    /// * Launches of one value follow each other: on one stream, or ordered by events.
    /// * This value outlives the launch, and every launch of a graph that captured it. Dropping this value waits for
    ///   the GPU if launches may be pending, so it is not dropped while a stream of the context captures.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        row_count: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function; this value owns mailboxes and state, sized for as many rows and ranks.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue(queue, (rows, draws), row_count)
    }

    /// [`DevicePeers::launch`].
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        (rows, draws): RowsAndDraws,
        row_count: usize,
    ) -> Result<(), CudaError> {
        let call = self.call(rows, draws, row_count)?;
        if row_count == 0 {
            return Ok(());
        }
        let blocks = (call.row_count * call.lanes).div_ceil(THREADS);
        queue.launch(&self.kernel, Grid::of(blocks, THREADS), (call,))
    }

    /// Builds the arguments of a step of the exchange, for a kernel that is launched next.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`]: more rows than planned. [`CudaError::Layout`]: misaligned rows or draws.
    pub(crate) fn call(
        &mut self,
        rows: DeviceAddress<Row>,
        draws: DeviceAddress<Draw>,
        row_count: usize,
    ) -> Result<abi::Peers, CudaError> {
        CudaError::check_limits(&[("rows", row_count, self.max_rows())])?;
        check_rows(rows, draws)?;
        self.is_pending |= row_count > 0;
        Ok(abi::Peers { rows, draws, row_count: row_count as u32, ..self.call })
    }

    /// Returns the error of an exchange, if any, from the draws of a call that has run.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`], [`CudaError::OtherCall`]; [`CudaError::Driver`] if the state is unreadable.
    pub fn check(&self, draws: &[Draw]) -> Result<(), CudaError> {
        // Mismatches come first: a rank with fewer rows mismatches in its own rows, and is late for the other rows.
        if let Some((row, draw)) = draws.iter().enumerate().find(|(_, draw)| draw.status == status::OTHER_CALL) {
            return Err(CudaError::OtherCall { rank: Some(draw.token as usize), row: Some(row) });
        }
        match draws.iter().any(|draw| draw.status == status::LATE_RANK) {
            true => Err(self.late_ranks(self.mailbox.read_state()?.late)),
            false => Ok(()),
        }
    }

    /// Returns the error of late ranks, if any. The caller has waited for every launch.
    pub(crate) fn check_late(&self) -> Result<(), CudaError> {
        match self.mailbox.read_state()?.late {
            0 => Ok(()),
            late => Err(self.late_ranks(late)),
        }
    }

    fn late_ranks(&self, late: u32) -> CudaError {
        let ranks = (0..MAX_PEERS).filter(|rank| late >> rank & 1 == 1).collect();
        CudaError::LateRanks { ranks, limit: self.limit }
    }

    /// Records that every launch has run. The caller has waited for the stream, without an error.
    pub(crate) fn mark_idle(&mut self) {
        self.is_pending = false;
    }

    /// Builds the arguments of a launch that exchanges records, after the exchange of the same rows' draws.
    pub(crate) fn records(&mut self) -> abi::PeerRecords {
        self.is_pending = true;
        abi::PeerRecords { peers: self.call, offset: self.mailbox.records() }
    }
}

impl Drop for DevicePeers {
    fn drop(&mut self) {
        if self.is_pending {
            let context = self.device.context();
            wait(context, || context.synchronize());
        }
    }
}
