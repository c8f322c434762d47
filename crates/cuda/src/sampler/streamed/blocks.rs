//! Blocks of a weight on their way: from a reader to memory that the GPU copies from, and from there to the GPU, by turns
//! in two places each.

use crate::abi::DeviceAddress;
use crate::device::gpu::Device;
use crate::device::pinned::page_locked;
use crate::device::scratch::wait;
use crate::error::CudaError;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, PinnedHostSlice};
use std::sync::Arc;

/// Two blocks on the GPU and two beside them in host memory: while one is multiplied the next is copied and the one after
/// is read.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Copies; the sampler's own stream multiplies.
    copies: Arc<CudaStream>,
    places: [Place; 2],
}

#[derive(Debug)]
struct Place {
    pinned: PinnedHostSlice<u8>,
    weight: CudaSlice<u8>,
    /// The weight is there; the weight is no longer needed.
    copied: CudaEvent,
    used: CudaEvent,
}

impl Place {
    fn new(bytes: usize, device: &Device, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let failed = CudaError::driver("allocate a block of the weight");
        let context = device.context();
        let pinned = page_locked(bytes, context)?;
        let weight = stream.alloc_zeros(bytes).map_err(&failed)?;
        let event = || context.new_event(None).map_err(&failed);
        Ok(Place { pinned, weight, copied: event()?, used: event()? })
    }
}

impl Blocks {
    /// Room for blocks of `bytes`, that work on `stream` uses. The memory is there when the stream has passed this.
    pub(super) fn new(bytes: usize, device: &Device, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let places = [Place::new(bytes, device, stream)?, Place::new(bytes, device, stream)?];
        Ok(Blocks { copies: device.stream()?, places })
    }

    /// Where the block that has the number `block` lies.
    pub(super) fn address(&self, block: usize) -> DeviceAddress<u8> {
        let weight = &self.places[block % 2].weight;
        DeviceAddress::of(weight, weight.stream())
    }

    /// Where the `bytes` of a block are to be read to; waits until they may be.
    pub(super) fn place_of(&mut self, block: usize, bytes: usize) -> Result<&mut [u8], CudaError> {
        let failed = CudaError::driver("wait for the copy of a block");
        let place = &mut self.places[block % 2];
        place.copied.synchronize().map_err(&failed)?;
        Ok(&mut place.pinned.as_mut_slice().map_err(&failed)?[..bytes])
    }

    /// Enqueues the copy of a block that was read; what is enqueued on `stream` from now on finds it on the GPU.
    pub(super) fn copy(&mut self, block: usize, bytes: usize, stream: &CudaStream) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy a block of the weight");
        let place = &mut self.places[block % 2];
        self.copies.wait(&place.used).map_err(&failed)?;
        // The events tell when the pinned memory may be written again; dropping this value waits for the copy.
        let read = &place.pinned.as_slice().map_err(&failed)?[..bytes];
        self.copies.memcpy_htod(read, &mut place.weight.slice_mut(..bytes)).map_err(&failed)?;
        place.copied.record(&self.copies).map_err(&failed)?;
        stream.wait(&place.copied).map_err(failed)
    }

    /// What `stream` has been given until now is all that uses the block.
    pub(super) fn release(&mut self, block: usize, stream: &CudaStream) -> Result<(), CudaError> {
        self.places[block % 2].used.record(stream).map_err(CudaError::driver("note the use of a block"))
    }

    /// Waits while something is dropped; whether that went well.
    pub(super) fn wait(&self) -> bool {
        wait(self.copies.context(), || self.copies.synchronize())
    }

    /// Waits for what a call that failed left behind.
    pub(super) fn finish(&mut self) -> Result<(), CudaError> {
        self.copies.synchronize().map_err(CudaError::driver("wait for the copies of blocks"))
    }
}

impl Drop for Blocks {
    /// Copies of a call that failed use this value's memory.
    fn drop(&mut self) {
        self.wait();
    }
}
