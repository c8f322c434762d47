//! A kernel launch with arguments by value.
#![allow(unsafe_code)]

use crate::error::CudaError;
use core::ffi::c_void;
use cudarc::driver::{CudaFunction, CudaStream, result, sys};

/// Blocks and threads of a launch, and what a block shares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: (u32, u32),
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

impl Grid {
    /// Blocks in one dimension, without dynamic shared memory.
    pub(crate) fn of(blocks: u32, threads: u32) -> Grid {
        Grid { blocks: (blocks, 1), threads, shared_bytes: 0 }
    }
}

/// The address of a kernel argument; the argument must live until the launch returns.
pub(crate) fn argument<T>(value: &T) -> *mut c_void {
    (&raw const *value).cast_mut().cast()
}

/// Enqueues a kernel.
///
/// # Safety
/// * `arguments` point to values of the types and number that the kernel takes.
/// * What the kernel reads and writes is device memory of its device, of the sizes it states, until the stream has passed
///   the launch.
pub(crate) unsafe fn launch<const N: usize>(
    function: &CudaFunction,
    stream: &CudaStream,
    grid: Grid,
    mut arguments: [*mut c_void; N],
) -> Result<(), CudaError> {
    let failed = CudaError::driver("launch a kernel");
    stream.context().bind_to_thread().map_err(&failed)?;
    let (blocks, threads) = ((grid.blocks.0, grid.blocks.1, 1), (grid.threads, 1, 1));
    let (function, shared, stream) = (function.cu_function(), grid.shared_bytes, stream.cu_stream());
    // SAFETY: the caller's.
    unsafe { result::launch_kernel(function, blocks, threads, shared, stream, &mut arguments) }.map_err(failed)
}

/// Enqueues a kernel whose blocks come in clusters of `blocks`, of which the grid is a multiple; compute capability 9.0 and up.
///
/// # Safety
/// As [`launch`].
pub(crate) unsafe fn launch_clusters<const N: usize>(
    function: &CudaFunction,
    stream: &CudaStream,
    grid: Grid,
    blocks: u32,
    arguments: [*mut c_void; N],
) -> Result<(), CudaError> {
    let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: blocks, y: 1, z: 1 };
    let attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { clusterDim: cluster },
    };
    // SAFETY: the same contract.
    unsafe { launch_with(function, stream, grid, attribute, arguments) }
}

/// Enqueues a kernel whose blocks are all resident at the same time, so that they may wait for each other. An error where the
/// device has no room for them, whatever else it runs.
///
/// # Safety
/// As [`launch`].
pub(crate) unsafe fn launch_resident<const N: usize>(
    function: &CudaFunction,
    stream: &CudaStream,
    grid: Grid,
    arguments: [*mut c_void; N],
) -> Result<(), CudaError> {
    let attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { cooperative: 1 },
    };
    // SAFETY: the same contract.
    unsafe { launch_with(function, stream, grid, attribute, arguments) }
}

/// # Safety
/// As [`launch`].
unsafe fn launch_with<const N: usize>(
    function: &CudaFunction,
    stream: &CudaStream,
    grid: Grid,
    mut attribute: sys::CUlaunchAttribute,
    mut arguments: [*mut c_void; N],
) -> Result<(), CudaError> {
    let failed = CudaError::driver("launch a kernel");
    stream.context().bind_to_thread().map_err(&failed)?;
    let config = sys::CUlaunchConfig {
        gridDimX: grid.blocks.0,
        gridDimY: grid.blocks.1,
        gridDimZ: 1,
        blockDimX: grid.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared_bytes,
        hStream: stream.cu_stream(),
        attrs: &raw mut attribute,
        numAttrs: 1,
    };
    let extra = core::ptr::null_mut();
    // SAFETY: the attribute lives until the call returns; the rest is the caller's.
    unsafe { sys::cuLaunchKernelEx(&raw const config, function.cu_function(), arguments.as_mut_ptr(), extra) }
        .result()
        .map_err(failed)
}
