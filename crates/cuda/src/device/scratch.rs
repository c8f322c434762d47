//! Device memory that kernels use by its address, freed after them.
#![allow(unsafe_code)]

use crate::abi::DeviceAddress;
use crate::device::gpu::Device;
use crate::device::launch::Queue;
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::{CudaContext, CudaSlice, DriverError};
use std::sync::Arc;

/// Device memory that launches on the callers' streams use by its address. Dropping it waits for the GPU when launches may
/// be pending, since freeing follows a stream that knows nothing of them.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: CudaSlice<u8>,
    address: DeviceAddress<u8>,
    is_pending: bool,
}

impl Scratch {
    /// `size` bytes of ones, but for the ranges of zeros; they are there when this returns.
    pub(crate) fn new(size: usize, zeros: &[Range<usize>], device: &Arc<Device>) -> Result<Self, CudaError> {
        let failed = CudaError::driver("allocate scratch");
        let stream = device.scratch_stream();
        let memory = stream.alloc_zeros::<u8>(size).map_err(&failed)?;
        let address = DeviceAddress::of(&memory, stream);
        // SAFETY: *Memory*: every range is a part of the memory just allocated, which this value frees after the launches.
        let queue = unsafe { Queue::new(stream) };
        queue.fill(address, 0xff, size)?;
        for range in zeros {
            let range = range.start.min(size)..range.end.min(size);
            queue.fill(address.add(range.start), 0, range.len())?;
        }
        stream.synchronize().map_err(&failed)?;
        Ok(Scratch { memory, address, is_pending: false })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// The device address, for a launch that may be pending from now on.
    pub(crate) fn begin_use<T>(&mut self) -> DeviceAddress<T> {
        self.is_pending = true;
        self.address.cast()
    }

    /// Every launch that used the memory has run: its stream was waited for, without an error.
    pub(crate) fn mark_idle(&mut self) {
        self.is_pending = false;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.is_pending {
            return;
        }
        let context = self.memory.context();
        wait(context, || context.synchronize());
    }
}

/// Waits while something is dropped; whether that went well. The binding returns an error that it noted earlier in place of
/// waiting, so the wait is tried twice, and the error is noted again for whoever asks next.
pub(crate) fn wait(context: &CudaContext, synchronize: impl Fn() -> Result<(), DriverError>) -> bool {
    let Err(earlier) = synchronize() else { return true };
    let again = synchronize();
    context.record_err::<()>(Err(earlier));
    again.is_ok()
}
