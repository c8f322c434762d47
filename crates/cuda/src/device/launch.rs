//! Kernel launches, fills and copies on a stream.
#![allow(unsafe_code)]

use crate::abi::DeviceAddress;
use crate::error::CudaError;
use bytemuck::Pod;
use core::ffi::c_void;
use core::marker::PhantomData;
use cudarc::driver::sys::{CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue};
use cudarc::driver::{CudaFunction, CudaModule, CudaStream, result, sys};
use std::sync::Arc;

/// The shape of a launch: blocks, threads, and shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: (u32, u32),
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) shared_bytes: u32,
    pub(crate) residency: Residency,
}

/// Which blocks of a launch run at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residency {
    /// No guarantee.
    Free,
    /// The blocks of a cluster of this size. The grid is a multiple of the size; needs compute capability 9.0.
    Clusters(u32),
    /// No guarantee, and blocks may start before the launch before this one has finished. The kernel waits for that
    /// launch itself; needs compute capability 9.0.
    Early,
    /// All blocks, so blocks may wait for each other. The launch fails if the device cannot hold all of them.
    All,
}

impl Grid {
    /// A grid in one dimension, without dynamic shared memory.
    pub(crate) fn of(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: (blocks, 1), threads, shared_bytes: 0, residency: Residency::Free }
    }
}

/// A kernel's name in its source, with the types of its arguments.
#[derive(Debug)]
pub(crate) struct Entry<A> {
    pub(crate) name: &'static str,
    arguments: PhantomData<fn(A)>,
}

impl<A> Entry<A> {
    /// Declares a kernel.
    ///
    /// # Safety
    /// The kernel of this name takes arguments of types `A`, by value and in this order.
    pub(crate) const unsafe fn new(name: &'static str) -> Self {
        Entry { name, arguments: PhantomData }
    }
}

/// A loaded kernel, with the types of its arguments.
#[derive(Debug)]
pub(crate) struct Kernel<A> {
    function: CudaFunction,
    arguments: PhantomData<fn(A)>,
}

impl<A> Kernel<A> {
    pub(crate) fn load(module: &Arc<CudaModule>, entry: &Entry<A>) -> Result<Self, CudaError> {
        let function = module.load_function(entry.name).map_err(CudaError::driver("load a kernel"))?;
        Ok(Kernel { function, arguments: PhantomData })
    }

    /// Raises the kernel's limit on dynamic shared memory per block.
    pub(crate) fn with_shared(self, bytes: u32) -> Result<Self, CudaError> {
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.function.set_attribute(attribute, bytes as i32).map_err(CudaError::driver("load a kernel"))?;
        Ok(self)
    }

    /// The number of blocks of this size that a multiprocessor holds at the same time.
    pub(crate) fn blocks_per_multiprocessor(&self, threads: u32, shared_bytes: u32) -> Result<u32, CudaError> {
        let blocks = self.function.occupancy_max_active_blocks_per_multiprocessor(threads, shared_bytes as usize, None);
        blocks.map_err(CudaError::driver("load a kernel"))
    }
}

pub(crate) trait Arguments {
    /// The addresses of the arguments, valid while `self` is borrowed; unused entries are null.
    fn addresses(&self) -> [*mut c_void; 4];
}

const NONE: *mut c_void = core::ptr::null_mut();

fn address<T>(argument: &T) -> *mut c_void {
    (&raw const *argument).cast_mut().cast()
}

impl<A> Arguments for (A,) {
    fn addresses(&self) -> [*mut c_void; 4] {
        [address(&self.0), NONE, NONE, NONE]
    }
}

impl<A, B> Arguments for (A, B) {
    fn addresses(&self) -> [*mut c_void; 4] {
        [address(&self.0), address(&self.1), NONE, NONE]
    }
}

impl<A, B, C> Arguments for (A, B, C) {
    fn addresses(&self) -> [*mut c_void; 4] {
        [address(&self.0), address(&self.1), address(&self.2), NONE]
    }
}

impl<A, B, C, D> Arguments for (A, B, C, D) {
    fn addresses(&self) -> [*mut c_void; 4] {
        [address(&self.0), address(&self.1), address(&self.2), address(&self.3)]
    }
}

/// A stream for work whose memory is valid, by the promise of [`Queue::new`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queue<'s> {
    stream: &'s CudaStream,
}

impl<'s> Queue<'s> {
    /// # Safety
    /// For all work that this value enqueues:
    /// * *Memory*: every address is device memory of the stream's device. The memory has the size that the work states,
    ///   and stays valid until the stream has finished the work.
    /// * *Order*: two pieces of work that use the same memory are ordered by the stream or by events, if one writes.
    /// * *Rows*: rows, and all memory behind their addresses, meet the documentation of [`Row`](crate::abi::Row) and
    ///   [`RowFilters`](crate::abi::RowFilters).
    pub(crate) unsafe fn new(stream: &'s CudaStream) -> Self {
        Queue { stream }
    }

    pub(crate) fn stream(self) -> &'s CudaStream {
        self.stream
    }

    pub(crate) fn launch<A: Arguments>(self, kernel: &Kernel<A>, grid: Grid, arguments: A) -> Result<(), CudaError> {
        let failed = CudaError::driver("launch a kernel");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        let (function, stream) = (kernel.function.cu_function(), self.stream.cu_stream());
        let mut addresses = arguments.addresses();
        let mut attribute = match grid.residency {
            Residency::Free => {
                let (blocks, threads) = ((grid.blocks.0, grid.blocks.1, 1), (grid.threads, 1, 1));
                // SAFETY: the arguments are alive, and have the kernel's types by `Entry::new`; *Memory*, *Order* and
                // *Rows* hold by `Queue::new`.
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
            Residency::Early => CUlaunchAttribute {
                id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                pad: [0; 4],
                value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
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
        // SAFETY: the arguments are alive, and have the kernel's types by `Entry::new`; *Memory*, *Order* and *Rows*
        // hold by `Queue::new`. The attribute lives until the call returns.
        unsafe { sys::cuLaunchKernelEx(&raw const config, function, addresses.as_mut_ptr(), extra) }
            .result()
            .map_err(failed)
    }

    /// Sets every byte of `count` values.
    pub(crate) fn fill<T>(self, to: DeviceAddress<T>, byte: u8, count: usize) -> Result<(), CudaError> {
        let failed = CudaError::driver("fill device memory");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: *Memory* and *Order* of `Queue::new`.
        unsafe { result::memset_d8_async(to.get(), byte, count * size_of::<T>(), self.stream.cu_stream()) }
            .map_err(failed)
    }

    /// Sets every word of `count` values, whose size is a multiple of 4 bytes.
    pub(crate) fn fill_words<T>(self, to: DeviceAddress<T>, word: u32, count: usize) -> Result<(), CudaError> {
        let failed = CudaError::driver("fill device memory");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        let (words, stream) = (count * size_of::<T>() / 4, self.stream.cu_stream());
        // SAFETY: *Memory* and *Order* of `Queue::new`.
        unsafe { sys::cuMemsetD32Async(to.get(), word, words, stream) }.result().map_err(failed)
    }

    /// Copies values to the device, from pageable memory. The driver has read the values when this function returns.
    pub(crate) fn copy_up<T: Pod>(self, from: &[T], to: DeviceAddress<T>) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy inputs to the GPU");
        self.stream.context().bind_to_thread().map_err(&failed)?;
        // SAFETY: *Memory* and *Order* of `Queue::new`.
        unsafe { result::memcpy_htod_async(to.get(), from, self.stream.cu_stream()) }.map_err(failed)
    }

    /// Waits for the stream, and copies values to pageable host memory. A copy that waits itself holds a lock of the
    /// driver.
    pub(crate) fn copy_down<T: Pod>(self, from: DeviceAddress<T>, to: &mut [T]) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy results from the GPU");
        self.stream.synchronize().map_err(CudaError::driver("run the kernels"))?;
        // SAFETY: *Memory* and *Order* of `Queue::new`. This function waits for the stream while `to` is borrowed.
        unsafe { result::memcpy_dtoh_async(to, from.get(), self.stream.cu_stream()) }.map_err(&failed)?;
        self.stream.synchronize().map_err(failed)
    }
}
