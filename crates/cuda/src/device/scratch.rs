//! Device memory that kernels use by its address, freed after them.
#![allow(unsafe_code)]

use crate::device::gpu::Device;
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::{CudaContext, CudaSlice, DevicePtr, DriverError, result};
use std::sync::Arc;

/// Device memory that launches on the callers' streams use by its address. Dropping it waits for the GPU when launches may
/// be pending, since freeing follows a stream that knows nothing of them.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: CudaSlice<u8>,
    address: u64,
    is_pending: bool,
}

impl Scratch {
    /// `size` bytes of ones, but for the ranges of zeros; they are there when this returns.
    pub(crate) fn new(size: usize, zeros: &[Range<usize>], device: &Arc<Device>) -> Result<Self, CudaError> {
        let failed = CudaError::driver("allocate scratch");
        let stream = device.stream()?;
        let memory = stream.alloc_zeros::<u8>(size).map_err(&failed)?;
        let base = memory.device_ptr(&stream).0;
        let fill = |range: &Range<usize>, byte| {
            let range = range.start.min(size)..range.end.min(size);
            // SAFETY: this is a part of the memory.
            unsafe { result::memset_d8_async(base + range.start as u64, byte, range.len(), stream.cu_stream()) }
        };
        fill(&(0..size), 0xff).map_err(&failed)?;
        zeros.iter().try_for_each(|range| fill(range, 0)).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        Ok(Scratch { memory, address: base, is_pending: false })
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// The device address, for a launch that may be pending from now on.
    pub(crate) fn lend(&mut self) -> u64 {
        self.is_pending = true;
        self.address
    }

    /// Every launch that used the memory has run: its stream was waited for, without an error.
    pub(crate) fn settle(&mut self) {
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
