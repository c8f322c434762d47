//! The physical limit of a GPU: a plain read of device memory.

use crate::record::Gpu;
use cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
use cudarc::driver::{
    CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DriverError, LaunchConfig, PushKernelArg,
};
use cudarc::nvrtc::{Ptx, result, sys};
use flash_sampling::BuildError;
use flash_sampling::cuda::{Architecture, CudaError, Device, compiler};
use flash_sampling_cli::error::CommandError;
use std::ffi::CString;
use std::sync::Arc;

/// Converts an error of the CUDA backend, for `map_err`.
pub fn failed(error: CudaError) -> CommandError {
    BuildError::from(error).into()
}

/// Converts an error of the driver in an action, for `map_err`.
pub fn driver(action: &'static str) -> impl Fn(DriverError) -> CommandError {
    move |DriverError(code)| failed(CudaError::Driver { action, code: code as u32, name: format!("{code:?}") })
}

/// Describes the GPU, for records.
pub fn describe(device: &Device) -> Result<Gpu, CommandError> {
    let (major, minor) = device.capability();
    let driver = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    Ok(Gpu {
        name: device.name().map_err(failed)?,
        capability: format!("{major}.{minor}"),
        multiprocessors: device.multiprocessors(),
        driver: driver.and_then(|text| Some(text.lines().next()?.trim().to_owned())),
        cublas: None,
        nccl: None,
        matrix_flops: None,
    })
}

/// Compiles the source of kernels for a GPU, and loads them.
///
/// # Errors
/// The errors of [`machine_code`]; [`CudaError::Driver`].
pub fn module(source: &str, options: &[&str], device: &Device) -> Result<Arc<CudaModule>, CommandError> {
    let code = machine_code(source, options, device.architecture())?;
    device.context().load_module(Ptx::from_binary(code)).map_err(driver("load a kernel"))
}

/// Compiles the source of kernels, with these options of the compiler.
///
/// # Errors
/// No compiler, or source that the compiler refuses.
pub fn machine_code(source: &str, options: &[&str], architecture: Architecture) -> Result<Vec<u8>, CommandError> {
    if compiler().is_none() {
        return Err(CommandError::usage("libnvrtc cannot be loaded, and the benchmark compiles a kernel"));
    }
    let refused =
        |error| CommandError::usage(format!("the CUDA compiler refused a kernel of the benchmark: {error:?}"));
    let architecture = format!("--gpu-architecture={architecture}");
    let options = [&[&*architecture, "--std=c++17"], options].concat();
    let source = CString::new(source).map_err(|error| CommandError::usage(error.to_string()))?;
    let program = result::create_program(&source, None).map_err(refused)?;
    let (mut size, mut code) = (0, Vec::new());
    // SAFETY: the program lives until its end below; the buffer has the size that the compiler returns.
    let outcome = unsafe {
        let compiled = result::compile_program(program, &options)
            .and_then(|()| sys::nvrtcGetCUBINSize(program, &raw mut size).result())
            .and_then(|()| {
                code.resize(size, 0u8);
                sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()
            });
        compiled.and(result::destroy_program(program))
    };
    outcome.map(|()| code).map_err(refused)
}

/// The kernel that reads bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadKernel {
    /// Loads of 16 bytes by every thread.
    Streaming,
    /// Bulk copies to shared memory, from compute capability 9.0 on.
    Bulk,
}

/// Threads of a streaming block, and blocks per multiprocessor: the largest number that fits.
const STREAMING: (u32, u32) = (512, 4);
/// Bytes of the ring of read.cu: the number of stages times the bytes of a request.
const RING: u32 = 12 * 16384;

/// A plain read of device memory that discards the bytes.
#[derive(Debug)]
pub struct Read {
    function: CudaFunction,
    kernel: ReadKernel,
    multiprocessors: u32,
    /// Written if the words of a thread have one certain value.
    sink: CudaSlice<u32>,
}

impl Read {
    /// Compiles and loads the kernel; `None` if the GPU lacks the instructions.
    pub fn new(kernel: ReadKernel, device: &Device) -> Result<Option<Read>, CommandError> {
        if kernel == ReadKernel::Bulk && device.capability().0 < 9 {
            return Ok(None);
        }
        let failed = driver("load a kernel");
        let name = if kernel == ReadKernel::Bulk { "read_bulk" } else { "read_streaming" };
        let function = module(include_str!("read.cu"), &[], device)?.load_function(name).map_err(&failed)?;
        if kernel == ReadKernel::Bulk {
            let attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, RING as i32).map_err(&failed)?;
        }
        let stream = device.context().new_stream().map_err(&failed)?;
        let sink = stream.alloc_zeros(1).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        Ok(Some(Read { function, kernel, multiprocessors: device.multiprocessors(), sink }))
    }

    /// Enqueues a read of the whole 16-byte blocks of `bytes` bytes at `address`, a multiple of 16.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// `address` is device memory of this device with at least this many bytes, until the launch has run.
    pub unsafe fn launch(&self, stream: &Arc<CudaStream>, address: u64, bytes: u64) -> Result<(), CommandError> {
        let (sink, quads) = (self.sink.device_ptr(self.sink.stream()).0, bytes / 16);
        let grid = |blocks, threads, shared_mem_bytes| LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (threads, 1, 1),
            shared_mem_bytes,
        };
        let mut launch = stream.launch_builder(&self.function);
        // SAFETY: read_streaming takes an address, a count and an address, read_bulk an address and a count, each of 8
        // bytes; the caller owns the memory, this value the sink.
        unsafe {
            match self.kernel {
                ReadKernel::Streaming => launch.arg(&address).arg(&quads).arg(&sink).launch(grid(
                    STREAMING.1 * self.multiprocessors,
                    STREAMING.0,
                    0,
                )),
                ReadKernel::Bulk => launch.arg(&address).arg(&bytes).launch(grid(self.multiprocessors, 32, RING)),
            }
        }
        .map(drop)
        .map_err(driver("launch a kernel"))
    }
}
