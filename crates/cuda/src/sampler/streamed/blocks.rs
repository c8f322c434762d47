//! Double-buffered transfer of weight blocks, from a reader to pinned memory and from there to the GPU.

use crate::abi::DeviceAddress;
use crate::device::{Device, page_locked, wait};
use crate::error::CudaError;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, PinnedHostSlice};
use std::sync::Arc;

/// Two blocks on the GPU and two in pinned host memory: one block is multiplied while the next one is copied and the
/// one after is read.
#[derive(Debug)]
pub(super) struct Blocks {
    /// The stream for copies; the sampler's own stream multiplies.
    copies: Arc<CudaStream>,
    places: [Place; 2],
}

#[derive(Debug)]
struct Place {
    pinned: PinnedHostSlice<u8>,
    weight: CudaSlice<u8>,
    /// Recorded after the copy of the weight (`copied`) and after its last use (`used`).
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
    /// Allocates blocks of `bytes` for work on `stream`. The memory is valid for later work on the stream.
    pub(super) fn new(bytes: usize, device: &Device, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let places = [Place::new(bytes, device, stream)?, Place::new(bytes, device, stream)?];
        Ok(Blocks { copies: device.stream()?, places })
    }

    /// The device address of block `block`.
    pub(super) fn address(&self, block: usize) -> DeviceAddress<u8> {
        let weight = &self.places[block % 2].weight;
        DeviceAddress::of(weight, weight.stream())
    }

    /// The host buffer for the `bytes` of a block; waits until the buffer is free.
    pub(super) fn place_of(&mut self, block: usize, bytes: usize) -> Result<&mut [u8], CudaError> {
        let failed = CudaError::driver("wait for the copy of a block");
        let place = &mut self.places[block % 2];
        place.copied.synchronize().map_err(&failed)?;
        Ok(&mut place.pinned.as_mut_slice().map_err(&failed)?[..bytes])
    }

    /// Enqueues the copy of a block that was read; later work on `stream` waits for the copy.
    pub(super) fn copy(&mut self, block: usize, bytes: usize, stream: &CudaStream) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy a block of the weight");
        let place = &mut self.places[block % 2];
        self.copies.wait(&place.used).map_err(&failed)?;
        // The events show when the pinned memory is free; dropping this value waits for the copy.
        let read = &place.pinned.as_slice().map_err(&failed)?[..bytes];
        self.copies.memcpy_htod(read, &mut place.weight.slice_mut(..bytes)).map_err(&failed)?;
        place.copied.record(&self.copies).map_err(&failed)?;
        stream.wait(&place.copied).map_err(failed)
    }

    /// Ends the use of a block: all work that uses it is already enqueued on `stream`.
    pub(super) fn release(&mut self, block: usize, stream: &CudaStream) -> Result<(), CudaError> {
        self.places[block % 2].used.record(stream).map_err(CudaError::driver("note the use of a block"))
    }

    /// Waits for the copies during a drop. Returns whether the wait succeeded.
    pub(super) fn wait(&self) -> bool {
        wait(self.copies.context(), || self.copies.synchronize())
    }

    /// Waits for the pending copies of a failed call.
    pub(super) fn finish(&mut self) -> Result<(), CudaError> {
        self.copies.synchronize().map_err(CudaError::driver("wait for the copies of blocks"))
    }
}

impl Drop for Blocks {
    /// Waits: copies of a failed call use this value's memory.
    fn drop(&mut self) {
        self.wait();
    }
}
