//! Ranks on GPUs that store to one another's memory: NVLink or PCIe peers, in one process or in several on one machine.
#![allow(unsafe_code)]

mod card;
mod mailbox;
#[cfg(test)]
pub(crate) mod tests;

use crate::abi::{self, Draw, MAX_PEERS, PeerState, status};
use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::address::check_rows;
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::device::scratch::wait;
use crate::error::CudaError;
use card::Card;
use core::time::Duration;
use cudarc::driver::{CudaFunction, CudaStream, result};
use flash_sampling_core::Knob;
use mailbox::{Mailbox, Opened, TURNS};
use std::sync::Arc;

/// Threads of a block of the exchange's launch, each for a pair of row and rank.
const THREADS: u32 = 256;

/// One instance, for every GPU.
pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "peers.cu", serves: kernels::any, instances: || vec![instance()] };

fn instance() -> Instance {
    Instance::new(&[])
}

/// A rank that has made its mailbox and has not met the others: every rank sends its [`card`](PeerOffer::card) to every
/// other, by whatever way there is, and [`connects`](PeerOffer::connect).
#[derive(Debug)]
pub struct PeerOffer {
    card: Card,
    mailbox: Arc<Mailbox>,
    kernel: CudaFunction,
    device: Arc<Device>,
}

impl PeerOffer {
    /// Rank `rank` of `world`, on a device, for calls of up to `max_rows` rows: allocates the mailbox, 4192 bytes for each
    /// rank and row, and loads the kernel.
    ///
    /// # Errors
    /// * [`CudaError::TooLarge`]: more than 32 ranks, a rank beyond them, or more than 256 rows.
    /// * [`CudaError::EmptyPlan`]: no rows.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(rank: usize, world: usize, max_rows: usize, device: &Arc<Device>) -> Result<PeerOffer, CudaError> {
        let limits = [
            ("ranks", world, MAX_PEERS),
            ("ranks, this one counted,", rank.saturating_add(1), world),
            ("rows", max_rows, MAX_ROWS),
        ];
        if let Some(&(what, found, limit)) = limits.iter().find(|(_, found, limit)| found > limit) {
            return Err(CudaError::TooLarge { what, found, limit });
        }
        if max_rows == 0 {
            return Err(CudaError::EmptyPlan { knob: Knob::MaxRows });
        }
        let kernel = device.function(&SOURCE, &instance(), "join_peers")?;
        let mailbox = Mailbox::new(world, max_rows, device)?;
        let card = Card {
            process: Card::this_process(),
            mailbox: mailbox.id(),
            rank: rank as u32,
            world: world as u32,
            max_rows: max_rows as u64,
            handle: mailbox.handle(),
        };
        Ok(PeerOffer { card, mailbox, kernel, device: device.clone() })
    }

    /// What the other ranks must know, as bytes for whatever carries them. From now on the mailbox, 4192 bytes for each
    /// rank and row, may be open in another process, and it is not freed before this process ends, unless
    /// [`connect`](PeerOffer::connect) finds all ranks in this process.
    pub fn card(&self) -> Vec<u8> {
        self.mailbox.set_shared(self.card.world > 1);
        self.card.encode()
    }

    /// Opens the mailboxes of all ranks; `cards[r]` is that of rank `r`, this one's included. A wait for another rank takes
    /// at most `limit`. Launch when every rank has connected.
    ///
    /// # Errors
    /// * [`CudaError::Rank`], naming the rank: its card cannot be read, it was planned otherwise, or its memory cannot be
    ///   reached from this device.
    /// * [`CudaError::Driver`].
    pub fn connect(self, cards: &[Vec<u8>], limit: Duration) -> Result<DevicePeers, CudaError> {
        let PeerOffer { card, mailbox, kernel, device } = self;
        let opened = card.decode_all(cards)?;
        if opened.iter().all(|card| card.process == Card::this_process()) {
            mailbox.set_shared(false);
        }
        let opened = opened.iter().map(|card| Opened::new(card, &mailbox, &device)).collect::<Result<Vec<_>, _>>()?;
        let mut mailboxes = [0; MAX_PEERS];
        for (to, mailbox) in mailboxes.iter_mut().zip(&opened) {
            *to = mailbox.address();
        }
        let call = abi::Peers {
            mailboxes,
            rows: 0,
            draws: 0,
            state: mailbox.state(),
            limit: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX),
            pause: 0,
            mark: 0,
            rank: card.rank,
            world: card.world,
            lanes: card.world.next_power_of_two(),
            row_count: 0,
            max_rows: card.max_rows as u32,
            turns: TURNS as u32,
        };
        Ok(DevicePeers { call, kernel, device, limit, is_pending: false, _opened: opened, mailbox })
    }
}

/// One rank of a group of GPUs: makes the draws of all shards out of each rank's own, without a host or a library between
/// (paper Alg. 1, lines 10 to 16). One small launch a call, on the caller's stream after the shard's draws; it allocates
/// nothing and waits for nothing on the host, so the whole step can be captured into a graph and replayed.
///
/// Every rank sends 32 bytes a row to every rank, and waits on the GPU until all have sent theirs. Every rank then has the
/// same draws: token, score and logit of the whole vocabulary, to the last bit those of a sampler without shards; of
/// invalid logits a raw one, then the lowest token.
///
/// Ranks make the same sequence of launches. One that does not come within the time limit leaves its row with
/// [`status::LATE_RANK`], one that was called with other rows, seeds, positions, draws, temperatures, masks where others have
/// none or another [mark](DevicePeers::set_mark) with [`status::OTHER_CALL`]; [`DevicePeers::check`] makes errors of these. After a
/// late rank the group is broken: later launches neither send nor wait. A rank that left out a launch finds what the others
/// sent in it when it makes its next one; only rows or a mark that differ tell it so.
///
/// Each rank waits by its own clock: one that comes at the very end of the others' limit finds what they sent, and draws,
/// where they already have given up. It learns so at its next launch, in which they send nothing. What must not differ
/// between ranks for one step is therefore to be kept only when that step has succeeded on all of them.
#[derive(Debug)]
pub struct DevicePeers {
    call: abi::Peers,
    kernel: CudaFunction,
    device: Arc<Device>,
    limit: Duration,
    /// Launches may be pending.
    is_pending: bool,
    /// Held for the kernel, which knows their addresses.
    _opened: Vec<Opened>,
    mailbox: Arc<Mailbox>,
}

impl DevicePeers {
    /// All ranks of a group within this process, one for each device, in order. A device may have several ranks, for tests,
    /// if nothing that waits stands before their launches in a queue of the device (see `CUDA_DEVICE_MAX_CONNECTIONS`).
    ///
    /// # Errors
    /// As [`PeerOffer::new`] and [`PeerOffer::connect`].
    pub fn group(devices: &[Arc<Device>], max_rows: usize, limit: Duration) -> Result<Vec<DevicePeers>, CudaError> {
        let offer = |(rank, device)| PeerOffer::new(rank, devices.len(), max_rows, device);
        let offers = devices.iter().enumerate().map(offer).collect::<Result<Vec<_>, _>>()?;
        let cards: Vec<_> = offers.iter().map(PeerOffer::card).collect();
        offers.into_iter().map(|offer| offer.connect(&cards, limit)).collect()
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.call.rank as usize
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.call.world as usize
    }

    /// Rows of the largest call.
    pub fn max_rows(&self) -> usize {
        self.call.max_rows as usize
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Gives later launches a mark, a number that must be the same on every rank, as the rows are: the number of the call,
    /// say, counted even where a rank failed before its launch. 0 at first. A captured launch keeps the mark that it had.
    pub fn set_mark(&mut self, mark: u64) {
        self.call.mark = mark;
    }

    /// Makes the draws of the whole vocabulary out of this shard's: enqueues one launch on `stream` and returns. `rows` and
    /// `draws` are the device addresses that the shard's own launch was given; the draws are replaced.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`]: more rows than planned. [`CudaError::Layout`]: rows whose address is not a multiple of 8, draws
    /// whose address is not one of 4. [`CudaError::Driver`].
    ///
    /// # Safety
    /// * `rows` and `draws` are device memory of this device with one [`abi::Row`](crate::abi::Row) and one
    ///   [`abi::Draw`](crate::abi::Draw) for each of `row_count` rows, until the launch has run.
    /// * No draw is [`UNDECIDED`](crate::abi::status::UNDECIDED), as [`DeviceFilters`](crate::DeviceFilters) leaves some: it
    ///   would come out on every rank as one of an invalid logit. Shards do not filter alone.
    /// * Every rank of the group has connected.
    /// * Launches of one value follow each other: on one stream, or ordered by events.
    /// * This value outlives the launch, and every launch of a graph that captured it. Dropping it waits for the GPU when
    ///   launches may be pending, so it is not dropped while a stream of the context captures.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        rows: u64,
        draws: u64,
        row_count: usize,
    ) -> Result<(), CudaError> {
        let call = self.call(rows, draws, row_count)?;
        if row_count == 0 {
            return Ok(());
        }
        self.is_pending = true;
        let blocks = (call.row_count * call.lanes).div_ceil(THREADS);
        // SAFETY: the kernel takes Peers by value, whose layout abi asserts; mailboxes and state are held by this value
        // and sized for as many rows and ranks; the rest is the caller's.
        unsafe { launch(&self.kernel, stream, Grid::of(blocks, THREADS), [argument(&call)]) }
    }

    /// The arguments of a step of the exchange; `rows` and `draws` are device addresses.
    ///
    /// # Errors
    /// [`CudaError::TooLarge`]: more rows than planned. [`CudaError::Layout`]: misaligned rows or draws.
    fn call(&self, rows: u64, draws: u64, row_count: usize) -> Result<abi::Peers, CudaError> {
        let limit = self.max_rows();
        if row_count > limit {
            return Err(CudaError::TooLarge { what: "rows", found: row_count, limit });
        }
        check_rows(rows, draws)?;
        Ok(abi::Peers { rows, draws, row_count: row_count as u32, ..self.call })
    }

    /// [`DevicePeers::call`] for a kernel that makes the exchange within it, and that is launched next.
    ///
    /// # Errors
    /// As [`DevicePeers::call`].
    pub(crate) fn call_within(&mut self, rows: u64, draws: u64, row_count: usize) -> Result<abi::Peers, CudaError> {
        let call = self.call(rows, draws, row_count)?;
        self.is_pending |= row_count > 0;
        Ok(call)
    }

    /// What went wrong in an exchange, from the draws of a call that has run.
    ///
    /// # Errors
    /// [`CudaError::LateRanks`], [`CudaError::OtherCall`]; [`CudaError::Driver`] when the state cannot be read.
    pub fn check(&self, draws: &[Draw]) -> Result<(), CudaError> {
        // A rank with fewer rows than this one differs in the first, and is late for the last.
        if let Some((row, draw)) = draws.iter().enumerate().find(|(_, draw)| draw.status == status::OTHER_CALL) {
            return Err(CudaError::OtherCall { rank: Some(draw.token as usize), row: Some(row) });
        }
        if draws.iter().all(|draw| draw.status != status::LATE_RANK) {
            return Ok(());
        }
        let late = self.state()?.late;
        let ranks = (0..MAX_PEERS).filter(|rank| late >> rank & 1 == 1).collect();
        Err(CudaError::LateRanks { ranks, limit: self.limit })
    }

    /// Every launch has run: its stream was waited for, without an error.
    pub(crate) fn settle(&mut self) {
        self.is_pending = false;
    }

    /// The arguments of a launch that exchanges records, behind one that exchanges the draws of the same rows.
    pub(crate) fn records(&mut self) -> abi::PeerRecords {
        self.is_pending = true;
        abi::PeerRecords { peers: self.call, offset: self.mailbox.records() }
    }

    fn state(&self) -> Result<PeerState, CudaError> {
        let failed = CudaError::driver("read the state of an exchange");
        let mut bytes = [0u8; size_of::<PeerState>()];
        self.device.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: the state is device memory of that size, which this value holds.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.call.state) }.map_err(failed)?;
        Ok(bytemuck::cast(bytes))
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
