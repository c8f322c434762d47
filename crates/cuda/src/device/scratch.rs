//! Device memory that kernels use by address, freed after their launches.
#![allow(unsafe_code)]

use crate::abi::DeviceAddress;
use crate::device::{Device, Queue};
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::{CudaContext, CudaSlice, DriverError};
use std::sync::Arc;

/// Device memory that launches on the callers' streams use by address.
///
/// Dropping waits for the GPU if launches may be pending, since the freeing stream is not ordered after them.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: CudaSlice<u8>,
    address: DeviceAddress<u8>,
    is_pending: bool,
}

impl Scratch {
    /// Allocates `size` bytes of ones, with ranges of zeros. The memory is initialised when this function returns.
    pub(crate) fn new(size: usize, zeros: &[Range<usize>], device: &Arc<Device>) -> Result<Self, CudaError> {
        let failed = CudaError::driver("allocate scratch");
        let stream = device.scratch_stream();
        let memory = stream.alloc_zeros::<u8>(size).map_err(&failed)?;
        let address = DeviceAddress::of(&memory, stream);
        // SAFETY: *Memory*: every range is part of the new allocation, which this value frees after the launches.
        let queue = unsafe { Queue::new(stream) };
        queue.fill(address, 0xff, size)?;
        for range in zeros {
            let range = range.start.min(size)..range.end.min(size);
            queue.fill(address.add(range.start), 0, range.len())?;
        }
        stream.synchronize().map_err(&failed)?;
        Ok(Scratch { memory, address, is_pending: false })
    }

    /// Allocates a copy of values.
    pub(crate) fn of(values: &[f64], device: &Arc<Device>) -> Result<Self, CudaError> {
        let (failed, stream) = (CudaError::driver("allocate scratch"), device.scratch_stream());
        let mut scratch = Scratch::new(size_of_val(values), &[], device)?;
        stream.memcpy_htod(bytemuck::cast_slice::<_, u8>(values), &mut scratch.memory).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        Ok(scratch)
    }

    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// The device address, for a launch that may be pending from this call on.
    pub(crate) fn begin_use<T>(&mut self) -> DeviceAddress<T> {
        self.is_pending = true;
        self.address.cast()
    }

    /// Records that every launch that used the memory has run. The caller has waited for the stream, without an error.
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

/// Waits during a drop. Returns whether the wait succeeded.
///
/// Instead of waiting, the binding may return an earlier error. The second attempt waits, and the earlier error is
/// recorded again for the next caller.
pub(crate) fn wait(context: &CudaContext, synchronize: impl Fn() -> Result<(), DriverError>) -> bool {
    let Err(earlier) = synchronize() else { return true };
    let again = synchronize();
    context.record_err::<()>(Err(earlier));
    again.is_ok()
}
