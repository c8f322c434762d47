//! The plain kernel: any GPU, any types, one row at a time; draws, and the row's transformed logits (paper App. K).
#![allow(unsafe_code)]

use crate::abi::{Call, HeadTransform};
use crate::device::Device;
use crate::device_tiled::{DeviceHead, DeviceMatrix};
use crate::error::CudaError;
use crate::fused_hopper::MAX_ROWS;
use crate::kernels::{self, Instance, KernelSource};
use core::ffi::c_void;
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, DevicePtr, result};
use flash_sampling_core::DType;
use std::sync::Arc;

/// One instance, for every GPU.
pub(crate) static SOURCE: KernelSource =
    KernelSource { file: "dense.cu", serves: kernels::any, instances: || vec![instance()] };

fn instance() -> Instance {
    Instance::new(&[]).cold()
}

/// Threads of a block, each with a token.
const THREADS: u32 = 256;

/// The kernels in a device.
#[derive(Debug)]
pub(crate) struct DenseKernels {
    row: CudaFunction,
    conclude: CudaFunction,
}

impl DenseKernels {
    pub(crate) fn load(device: &Device) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE, &instance())?;
        let function = |name| module.load_function(name).map_err(CudaError::driver("load a kernel"));
        Ok(DenseKernels { row: function("dense_row")?, conclude: function("dense_conclude")? })
    }
}

/// What is multiplied: the twin of the struct in dense.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Inputs {
    weight: u64,
    hidden: u64,
    logits: u64,
    weight_stride: u64,
    hidden_stride: u64,
    weight_type: u32,
    hidden_type: u32,
    row: u32,
    draw: u32,
}
const _: () = assert!(size_of::<Inputs>() == 56);

fn type_code(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 0,
        DType::F16 => 1,
        DType::F32 => 2,
    }
}

/// The plain kernel, planned for a head.
#[derive(Debug)]
pub(crate) struct Dense {
    kernels: Arc<DenseKernels>,
    head: DeviceHead,
    /// Ordered bits of the best winner a row, the first invalid logit a row.
    scratch: CudaSlice<u64>,
    /// `[tokens]`.
    logits: CudaSlice<f32>,
}

impl Dense {
    /// Plans for launches of up to 256 rows. The head's pointers are as [`DeviceTiled::new`] asks.
    ///
    /// [`DeviceTiled::new`]: crate::DeviceTiled::new
    pub(crate) fn new(head: DeviceHead, device: &Device, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let allocate = CudaError::driver("allocate scratch");
        let mut initial = vec![0u64; 2 * MAX_ROWS];
        initial[MAX_ROWS..].fill(u64::MAX);
        let scratch = stream.clone_htod(&initial).map_err(&allocate)?;
        let logits = stream.alloc_zeros(head.weight.rows).map_err(&allocate)?;
        stream.synchronize().map_err(&allocate)?;
        Ok(Dense { kernels: device.dense()?, head, scratch, logits })
    }

    /// Enqueues row `row` of `hidden`: its transformed logits, and its draw into `draws` when `draw` says so.
    ///
    /// # Safety
    /// As [`DeviceTiled::launch`](crate::DeviceTiled::launch), for `hidden` of any type and stride; `row` is one of its
    /// rows, and below 256.
    pub(crate) unsafe fn row(
        &mut self,
        stream: &CudaStream,
        hidden: &DeviceMatrix,
        rows: u64,
        draws: u64,
        row: usize,
        draw: bool,
    ) -> Result<(), CudaError> {
        let failed = CudaError::driver("launch the plain kernel");
        let (weight, tokens) = (self.head.weight, self.head.weight.rows as u32);
        let scratch = self.scratch.device_ptr(self.scratch.stream()).0;
        let call = Call {
            rows,
            bias: self.head.bias.unwrap_or(0),
            best: scratch,
            invalid: scratch + 8 * MAX_ROWS as u64,
            logits: 0,
            arrived: 0,
            draws,
            head: HeadTransform { soft_cap: self.head.soft_cap.unwrap_or(0.0), scale: self.head.scale },
            row_count: hidden.rows as u32,
            hidden: hidden.cols as u32,
            first_token: self.head.first_token,
            tokens,
        };
        let inputs = Inputs {
            weight: weight.address,
            hidden: hidden.address,
            logits: self.logits.device_ptr(self.logits.stream()).0,
            weight_stride: weight.row_stride as u64,
            hidden_stride: hidden.row_stride as u64,
            weight_type: type_code(weight.dtype),
            hidden_type: type_code(hidden.dtype),
            row: row as u32,
            draw: draw.into(),
        };
        let mut arguments = [(&raw const call).cast_mut().cast::<c_void>(), (&raw const inputs).cast_mut().cast()];
        stream.context().bind_to_thread().map_err(&failed)?;
        let mut launch = |function: &CudaFunction, blocks: u32, threads: u32| {
            let function = function.cu_function();
            // SAFETY: both kernels take a Call and Inputs by value, whose layouts are asserted; scratch and logits are
            // this value's, sized by `new`; the rest is the caller's.
            unsafe {
                let stream = stream.cu_stream();
                result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), 0, stream, &mut arguments)
            }
        };
        launch(&self.kernels.row, tokens.div_ceil(THREADS), THREADS).map_err(&failed)?;
        if draw { launch(&self.kernels.conclude, 1, 1).map_err(&failed) } else { Ok(()) }
    }

    /// Copies the logits of the last row down, and waits.
    pub(crate) fn logits(&self, stream: &Arc<CudaStream>, out: &mut Vec<f32>) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy the logits of a row");
        out.resize(self.logits.len(), 0.0);
        stream.memcpy_dtoh(&self.logits, out).map_err(&failed)?;
        stream.synchronize().map_err(&failed)
    }
}
