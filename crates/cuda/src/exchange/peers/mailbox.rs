//! Mailboxes: device memory that the receiving rank allocates, and other ranks open and write.
#![allow(unsafe_code)]

use super::descriptor::{HANDLE, PeerDescriptor};
use crate::abi::{DeviceAddress, MAX_PEERS, PeerState, RECORD_BYTES, SLOT_BYTES};
use crate::device::Device;
use crate::error::CudaError;
use core::ffi::c_int;
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The number of mailboxes, used in turn.
pub(crate) const TURNS: usize = 2;

/// Kinds of records.
const KINDS: usize = 2;

/// The mailboxes of this process, for its ranks.
static MAILBOXES: Mutex<Option<HashMap<u64, Weak<Mailbox>>>> = Mutex::new(None);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Device memory for the messages of all ranks to this rank.
///
/// It has slots `[turns, world, max_rows]`, records of rows with filters `[kinds, world, max_rows]`, and this rank's
/// state, all zero at first. Another mailbox has the logits of all shards. Other GPUs and processes write to it, so it does not come from a pool.
#[derive(Debug)]
pub(crate) struct Mailbox {
    id: u64,
    device: Arc<Device>,
    address: DeviceAddress<u8>,
    /// Bytes of the slots, and of the whole mailbox.
    slots: usize,
    size: usize,
    /// Whether other processes may open the mailbox; then it is never freed.
    is_shared: AtomicBool,
}

impl Mailbox {
    /// Allocates a mailbox. The memory is zero when this function returns.
    pub(crate) fn new(world: usize, max_rows: usize, device: &Arc<Device>) -> Result<Arc<Mailbox>, CudaError> {
        let slots = TURNS * world * max_rows * SLOT_BYTES;
        let records = KINDS * world * max_rows * RECORD_BYTES;
        Mailbox::allocate(slots, slots + records + size_of::<PeerState>(), device)
    }

    /// Allocates memory for other messages. The memory is zero when this function returns.
    pub(crate) fn of_bytes(size: usize, device: &Arc<Device>) -> Result<Arc<Mailbox>, CudaError> {
        Mailbox::allocate(0, size, device)
    }

    fn allocate(slots: usize, size: usize, device: &Arc<Device>) -> Result<Arc<Mailbox>, CudaError> {
        let failed = CudaError::driver("allocate a mailbox");
        device.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: the context is bound; the value below owns the memory.
        let address = DeviceAddress::new(unsafe { result::malloc_sync(size) }.map_err(&failed)?);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox { id, device: device.clone(), address, slots, size, is_shared: false.into() });
        // SAFETY: the range is the new allocation; the second call waits for the first.
        unsafe { sys::cuMemsetD8_v2(address.get(), 0, size) }.result().map_err(&failed)?;
        device.context().synchronize().map_err(&failed)?;
        let mut all = MAILBOXES.lock().unwrap_or_else(PoisonError::into_inner);
        let all = all.get_or_insert_default();
        all.retain(|_, mailbox| mailbox.strong_count() > 0);
        all.insert(id, Arc::downgrade(&mailbox));
        Ok(mailbox)
    }

    pub(crate) fn address(&self) -> DeviceAddress<u8> {
        self.address
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The address of the receiving rank's state.
    pub(crate) fn state(&self) -> DeviceAddress<PeerState> {
        self.address.add(self.size - size_of::<PeerState>()).cast()
    }

    /// Reads the receiving rank's state, after its launches have run.
    pub(crate) fn read_state(&self) -> Result<PeerState, CudaError> {
        let failed = CudaError::driver("read the state of an exchange");
        let mut state = [PeerState::default()];
        self.device.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: the state is device memory of this value, with the size of a `PeerState`.
        unsafe { result::memcpy_dtoh_sync(&mut state, self.state().get()) }.map_err(failed)?;
        Ok(state[0])
    }

    /// Bytes before the records.
    pub(crate) fn records(&self) -> u64 {
        self.slots as u64
    }

    /// Sets whether other processes may open the mailbox.
    ///
    /// They may after its descriptor is sent, unless all ranks turn out to be in this process.
    pub(crate) fn set_shared(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Ordering::Relaxed);
    }

    /// The handle that opens the mailbox in another process; zeros if this system has no such handles.
    pub(crate) fn handle(&self) -> [u8; HANDLE] {
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE] };
        let bound = self.device.context().bind_to_thread().is_ok();
        // SAFETY: the address is memory of this value; the pointer is valid for one handle.
        let code = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.address.get()) };
        if bound && code.result().is_ok() { handle.reserved.map(|byte| byte.to_ne_bytes()[0]) } else { [0; HANDLE] }
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        // The driver frees memory that another process maps only after that process unmaps it, and does not report when.
        if *self.is_shared.get_mut() || self.device.context().bind_to_thread().is_err() {
            return;
        }
        // SAFETY: `new` allocated the memory, and it is freed once; every rank of this process that writes to it holds
        // this value.
        let _ = unsafe { result::free_sync(self.address.get()) };
    }
}

/// A mailbox as mapped on another rank's device.
#[derive(Debug)]
pub(crate) enum MappedMailbox {
    /// A mailbox of this process.
    Here(Arc<Mailbox>),
    /// A mailbox of another process, mapped into this process.
    There {
        /// The mapped address.
        address: DeviceAddress<u8>,
        /// The device of the mapping.
        device: Arc<Device>,
    },
}

impl MappedMailbox {
    /// Maps the mailboxes of all ranks, for stores from `device`, and returns them with their addresses. `own` and `mine`
    /// are the descriptor and the mailbox of this rank.
    pub(crate) fn all(
        own: &PeerDescriptor,
        descriptors: &[Vec<u8>],
        mine: &Mailbox,
        device: &Arc<Device>,
    ) -> Result<(Vec<MappedMailbox>, [DeviceAddress<u8>; MAX_PEERS]), CudaError> {
        let peers = own.decode_all(descriptors)?;
        if peers.iter().all(|peer| peer.process == PeerDescriptor::this_process()) {
            mine.set_shared(false);
        }
        let mapped = peers.iter().map(|peer| MappedMailbox::new(peer, mine, device)).collect::<Result<Vec<_>, _>>()?;
        let mut addresses = [DeviceAddress::NULL; MAX_PEERS];
        addresses.iter_mut().zip(&mapped).for_each(|(address, mailbox)| *address = mailbox.address());
        Ok((mapped, addresses))
    }

    /// Maps the mailbox of a peer, for stores from `device`.
    fn new(peer: &PeerDescriptor, mine: &Mailbox, device: &Arc<Device>) -> Result<MappedMailbox, CudaError> {
        let rank = peer.rank as usize;
        device.context().bind_to_thread().map_err(CudaError::driver("bind the context"))?;
        if peer.process == PeerDescriptor::this_process() {
            let all = MAILBOXES.lock().unwrap_or_else(PoisonError::into_inner);
            let found = all.as_ref().and_then(|all| all.get(&peer.mailbox)).and_then(Weak::upgrade);
            let Some(mailbox) = found.filter(|mailbox| (mailbox.slots, mailbox.size) == (mine.slots, mine.size)) else {
                return Err(CudaError::Rank { rank, what: "has gone, or has another mailbox".into() });
            };
            drop(all);
            if !Arc::ptr_eq(&mailbox.device, device) {
                enable(device, &mailbox.device, rank)?;
            }
            return Ok(MappedMailbox::Here(mailbox));
        }
        let handle = sys::CUipcMemHandle { reserved: peer.handle.map(|byte| byte as core::ffi::c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        let unreachable = |code: sys::CUresult| CudaError::Rank {
            rank,
            what: format!("is in another process whose memory cannot be opened here ({code:?})"),
        };
        // SAFETY: the pointer is valid for one address; the driver checks the handle.
        let code = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) };
        if code.result().is_err() {
            return Err(unreachable(code));
        }
        let opened = MappedMailbox::There { address: DeviceAddress::new(address), device: device.clone() };
        let (mut base, mut size) = (0, 0);
        // SAFETY: the address was just mapped; the pointers are valid for one value each.
        let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address) };
        if code.result().is_err() {
            return Err(unreachable(code));
        }
        if base != address || size < mine.size {
            return Err(CudaError::Rank { rank, what: "has a mailbox of another size".into() });
        }
        Ok(opened)
    }

    pub(crate) fn address(&self) -> DeviceAddress<u8> {
        match self {
            MappedMailbox::Here(mailbox) => mailbox.address,
            MappedMailbox::There { address, .. } => *address,
        }
    }
}

impl Drop for MappedMailbox {
    fn drop(&mut self) {
        if let MappedMailbox::There { address, device } = self
            && device.context().bind_to_thread().is_ok()
        {
            // SAFETY: `new` mapped the memory, and it is unmapped once, after the launches that store there.
            let _ = unsafe { sys::cuIpcCloseMemHandle(address.get()) };
        }
    }
}

/// Lets kernels of `device` store to the memory of `other`.
fn enable(device: &Device, other: &Device, rank: usize) -> Result<(), CudaError> {
    let (mine, theirs) = (device.context().cu_device(), other.context().cu_device());
    let mut can: c_int = 0;
    // SAFETY: both devices are of the driver; the pointer is valid for one number.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, mine, theirs) }
        .result()
        .map_err(CudaError::driver("ask for peer access"))?;
    if can == 0 {
        return Err(CudaError::Rank { rank, what: "is on a GPU that this one cannot reach".into() });
    }
    // SAFETY: the context of this device is bound; the other context lives as long as the process.
    let code = unsafe { sys::cuCtxEnablePeerAccess(other.context().cu_ctx(), 0) };
    if code == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
        return Ok(());
    }
    code.result().map_err(CudaError::driver("enable peer access"))
}
