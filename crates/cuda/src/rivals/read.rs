//! The physical limit: a plain read of device memory.
#![allow(unsafe_code)]

use crate::compile::kernels::{self, Instance, KernelSource};
use crate::device::gpu::Device;
use crate::device::launch::{Grid, argument, launch};
use crate::error::CudaError;
use cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DevicePtr};

pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "rivals/read.cu", serves: kernels::any, instances: || vec![instance()] };

fn instance() -> Instance {
    Instance::new(&[])
}

/// How bytes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Loads of 16 bytes by every thread.
    Streaming,
    /// The copy engine fills shared memory; from compute capability 9.0 on.
    Bulk,
}

/// Threads of a block that streams, and blocks on a multiprocessor: all that fit.
const STREAMING: (u32, u32) = (512, 4);
/// Bytes of the ring of read.cu: stages times the bytes of a request.
const RING: u32 = 12 * 16384;

/// A plain read of device memory, which throws away what it reads.
#[derive(Debug)]
pub struct Read {
    function: CudaFunction,
    way: Way,
    multiprocessors: u32,
    /// Where a read that sees one certain value writes.
    sink: CudaSlice<u32>,
}

impl Read {
    /// Compiles and loads the kernel; `None` where the GPU lacks what it takes.
    ///
    /// # Errors
    /// [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(way: Way, device: &Device) -> Result<Option<Read>, CudaError> {
        if way == Way::Bulk && device.capability().0 < 9 {
            return Ok(None);
        }
        let failed = CudaError::driver("load a kernel");
        let module = device.module(&SOURCE, &instance())?;
        let name = match way {
            Way::Streaming => "read_streaming",
            Way::Bulk => "read_bulk",
        };
        let function = module.load_function(name).map_err(&failed)?;
        if way == Way::Bulk {
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, RING as i32).map_err(&failed)?;
        }
        let stream = device.stream()?;
        let sink = stream.alloc_zeros(1).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        Ok(Some(Read { function, way, multiprocessors: device.multiprocessors(), sink }))
    }

    /// Enqueues a read of the whole 16-byte blocks of `bytes` bytes at `address`, a multiple of 16.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// `address` is device memory of this device, of that many bytes, until the launch has run.
    pub unsafe fn launch(&self, stream: &CudaStream, address: u64, bytes: u64) -> Result<(), CudaError> {
        let (sink, quads) = (self.sink.device_ptr(self.sink.stream()).0, bytes / 16);
        // SAFETY: read_streaming takes an address, a count and an address, read_bulk an address and a count, each of 8
        // bytes; the memory is the caller's, the sink this value's.
        unsafe {
            match self.way {
                Way::Streaming => {
                    let grid = Grid::of(STREAMING.1 * self.multiprocessors, STREAMING.0);
                    let arguments = [argument(&address), argument(&quads), argument(&sink)];
                    launch(&self.function, stream, grid, arguments)
                }
                Way::Bulk => {
                    let grid = Grid { shared_bytes: RING, ..Grid::of(self.multiprocessors, 32) };
                    launch(&self.function, stream, grid, [argument(&address), argument(&bytes)])
                }
            }
        }
    }
}
