//! Work over device memory by address: kernel launches, fills and copies on a stream.
#![allow(unsafe_code)]

use crate::abi::DeviceAddress;
use crate::error::CudaError;
use bytemuck::Pod;
use core::ffi::c_void;
use core::marker::PhantomData;
use cudarc::driver::sys::{CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue};
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, result, sys};
use std::sync::Arc;

/// Blocks and threads of a launch, and what a block shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: (u32, u32),
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
    pub(crate) residency: Residency,
}

/// Which blocks of a launch run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residency {
    /// Any.
    Free,
    /// Those of a cluster of so many, of which the grid is a multiple; compute capability 9.0 and up.
    Clusters(u32),
    /// All, so that they may wait for each other. An error where the device has no room for them.
    All,
}

impl Grid {
    /// Blocks in one dimension, without dynamic shared memory.
    pub(crate) fn of(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: (blocks, 1), threads, shared_bytes: 0, residency: Residency::Free }
    }
}

/// The name of a kernel in its source, with the types of its arguments.
#[derive(Debug)]
pub(crate) struct Entry<A> {
    pub(crate) name: &'static str,
    arguments: PhantomData<fn(A)>,
}

impl<A> Entry<A> {
    /// # Safety
    /// The kernel of this name takes these arguments, by value and in this order.
    pub(crate) const unsafe fn new(name: &'static str) -> Self {
        Entry { name, arguments: PhantomData }
    }
}

/// A kernel in a device, with the types of its arguments.
#[derive(Debug)]
pub(crate) struct Kernel<A> {
    function: CudaFunction,
    arguments: PhantomData<fn(A)>,
}

impl<A> Kernel<A> {
    /// The kernel of a loaded module.
    pub(crate) fn load(module: &Arc<CudaModule>, entry: &Entry<A>) -> Result<Self, CudaError> {
        let function = module.load_function(entry.name).map_err(CudaError::driver("load a kernel"))?;
        Ok(Kernel { function, arguments: PhantomData })
    }

    /// The same with a raised limit on dynamic shared memory per block.
    pub(crate) fn with_shared(self, bytes: u32) -> Result<Self, CudaError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.function.set_attribute(attribute, bytes as i32).map_err(CudaError::driver("load a kernel"))?;
        Ok(self)
    }

    /// Blocks of so many threads and so much shared memory that a multiprocessor holds at once.
    pub(crate) fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let blocks = self.function.occupancy_max_active_blocks_per_multiprocessor(threads, shared_bytes as usize, None);
        blocks.map_err(CudaError::driver("load a kernel"))
    }
}

/// The arguments of a kernel.
pub(crate) trait Arguments {
    /// The address of each, valid as long as they are borrowed; the rest is null.
    fn addresses(&self) -> [*mut c_void; 3];
}

fn address<T>(argument: &T) -> *mut c_void {
    (&raw const *argument).cast_mut().cast()
}

impl<A> Arguments for (A,) {
    fn addresses(&self) -> [*mut c_void; 3] {
        [address(&self.0), core::ptr::null_mut(), core::ptr::null_mut()]
    }
}

impl<A, B> Arguments for (A, B) {
    fn addresses(&self) -> [*mut c_void; 3] {
        [address(&self.0), address(&self.1), core::ptr::null_mut()]
    }
}

impl<A, B, C> Arguments for (A, B, C) {
    fn addresses(&self) -> [*mut c_void; 3] {
        [address(&self.0), address(&self.1), address(&self.2)]
    }
}

/// A stream, and the promise that the memory of the work enqueued through this value is there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queue<'s> {
    stream: &'s CudaStream,
}

impl<'s> Queue<'s> {
    /// # Safety
    /// Of all work that is enqueued through this value:
    /// * *Memory*: every address that it is given is device memory of the stream's device, of the size that the work
    ///   states, until the stream has passed the work.
    /// * *Order*: work that writes to the same memory follows each other, on this stream or by events.
    /// * *Rows*: rows, and what they point to, are as [`Row`](crate::abi::Row) and
    ///   [`RowFilters`](crate::abi::RowFilters) state.
    pub(crate) unsafe fn new(stream: &'s CudaStream) -> Self {
        Queue { stream }
    }

    /// The stream.
    pub(crate) fn stream(self) -> &'s CudaStream {
        self.stream
    }

    /// Enqueues a kernel.
    pub(crate) fn launch<A: Arguments>(self, kernel: &Kernel<A>, grid: Grid, arguments: A) -> Result<(), CudaError> {
        let failed = CudaError::driver("launch a kernel");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        let (function, stream) = (kernel.function.cu_function(), self.stream.cu_stream());
        let mut addresses = arguments.addresses();
        let mut attribute = match grid.residency {
            Residency::Free => {
                let (blocks, threads) = ((grid.blocks.0, grid.blocks.1, 1), (grid.threads, 1, 1));
                // SAFETY: the arguments are alive, and of the kernel's types by `Entry::new`; the memory is there by *Memory*.
                let launched = unsafe {
                    result::launch_kernel(function, blocks, threads, grid.shared_bytes, stream, &mut addresses)
                };
                return launched.map_err(failed);
            }
            Residency::Clusters(blocks) => CUlaunchAttribute {
                id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                pad: [0; 4],
                value: CUlaunchAttributeValue {
                    clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 },
                },
            },
            Residency::All => CUlaunchAttribute {
                id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                pad: [0; 4],
                value: CUlaunchAttributeValue { cooperative: 1 },
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks.0,
            gridDimY: grid.blocks.1,
            gridDimZ: 1,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        let extra = core::ptr::null_mut();
        // SAFETY: as above; the attribute lives until the call returns.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, addresses.as_mut_ptr(), extra) }
            .result()
            .map_err(failed)
    }

    /// Fills `count` values with bytes.
    pub(crate) fn fill<T>(self, to: DeviceAddress<T>, byte: u8, count: usize) -> Result<(), CudaError> {
        let failed = CudaError::driver("fill device memory");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: *Memory*.
        unsafe { result::memset_d8_async(to.get(), byte, count * size_of::<T>(), self.stream.cu_stream()) }
            .map_err(failed)
    }

    /// Copies values up, from memory that is not page-locked: the driver has taken them when this returns.
    pub(crate) fn copy_up<T: Pod>(self, from: &[T], to: DeviceAddress<T>) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy inputs to the GPU");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: *Memory*.
        unsafe { result::memcpy_htod_async(to.get(), from, self.stream.cu_stream()) }.map_err(failed)
    }

    /// Copies values down, and waits for the stream.
    pub(crate) fn copy_down<T: Pod>(self, from: DeviceAddress<T>, to: &mut [T]) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy results from the GPU");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: *Memory*; the stream is waited for while `to` is borrowed.
        unsafe { result::memcpy_dtoh_async(to, from.get(), self.stream.cu_stream()) }.map_err(failed)?;
        self.stream.synchronize().map_err(CudaError::driver("run the kernels"))
    }
}
