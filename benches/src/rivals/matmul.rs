//! NVIDIA's matrix product.

use crate::gpu::read::driver;
use core::ffi::{c_int, c_void};
use cudarc::cublas::result::{self, CublasError};
use cudarc::cublas::sys;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flash_sampling::DType;
use flash_sampling::cuda::DeviceMatrix;
use flash_sampling_cli::error::CommandError;
use std::sync::Arc;

/// Bytes of the product's workspace.
const WORKSPACE: usize = 64 << 20;

/// cuBLAS: `hidden [rows, cols] x weight [vocab, cols]^T`, summed in float32, stored in the type of the inputs.
#[derive(Debug)]
pub struct Matmul {
    handle: sys::cublasHandle_t,
    stream: Arc<CudaStream>,
    _workspace: CudaSlice<u8>,
}

fn failed(action: &'static str) -> impl Fn(CublasError) -> CommandError {
    move |CublasError(code)| CommandError::usage(format!("cuBLAS failed to {action}: {code:?}"))
}

impl Matmul {
    /// Opens the library for products on `stream`; `None` if the library is missing.
    ///
    /// # Errors
    /// Errors of the library and the driver.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Option<Matmul>, CommandError> {
        // SAFETY: loads NVIDIA's library by its known names, which runs its initialisers.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let workspace = stream.alloc_zeros(WORKSPACE).map_err(driver("allocate a workspace"))?;
        stream.context().bind_to_thread().map_err(driver("bind the context"))?;
        let handle = result::create_handle().map_err(failed("start"))?;
        let matmul = Matmul { handle, stream: stream.clone(), _workspace: workspace };
        // SAFETY: the handle was just made and the stream is alive; this value holds both.
        unsafe { result::set_stream(handle, stream.cu_stream().cast()) }.map_err(failed("take the stream"))?;
        let address = matmul._workspace.device_ptr(stream).0 as *mut c_void;
        // SAFETY: device memory of that size, freed after the handle.
        unsafe { sys::cublasSetWorkspace_v2(handle, address, WORKSPACE) }
            .result()
            .map_err(failed("take a workspace"))?;
        Ok(Some(matmul))
    }

    /// The version of the library, as 130100 for 13.1.
    pub fn version(&self) -> i32 {
        let mut version: c_int = 0;
        // SAFETY: the handle is alive; an integer to write to.
        let code = unsafe { sys::cublasGetVersion_v2(self.handle, &raw mut version) };
        if code.result().is_ok() { version } else { 0 }
    }

    /// Enqueues `out [rows, vocab]` of bf16 or f16 at the device address `out`, with contiguous rows.
    ///
    /// # Errors
    /// Types or widths that do not fit, errors of the library.
    ///
    /// # Safety
    /// The matrices and `out` are device memory of the stream's device, of the stated sizes, until the work has run.
    pub unsafe fn launch(&self, weight: &DeviceMatrix, hidden: &DeviceMatrix, out: u64) -> Result<(), CommandError> {
        let wrong = |reason| Err(CommandError::usage(format!("operands of a product: {reason}")));
        let of = match (weight.dtype, hidden.dtype) {
            (DType::BF16, DType::BF16) => sys::cudaDataType_t::CUDA_R_16BF,
            (DType::F16, DType::F16) => sys::cudaDataType_t::CUDA_R_16F,
            _ => return wrong("they are not both bf16 or both f16"),
        };
        if weight.cols != hidden.cols {
            return wrong("their widths differ");
        }
        let (one, zero) = (1.0f32, 0.0f32);
        let scalar = |value: &f32| core::ptr::from_ref(value).cast::<c_void>();
        let operand = |matrix: &DeviceMatrix| (matrix.address.get() as *const c_void, matrix.row_stride as c_int);
        let ((a, lda), (b, ldb)) = (operand(weight), operand(hidden));
        let (vocab, rows, cols) = (weight.rows as c_int, hidden.rows as c_int, weight.cols as c_int);
        self.stream.context().bind_to_thread().map_err(driver("bind the context"))?;
        // Row-major [rows, vocab] is column-major [vocab, rows], so the library computes the transposed product.
        // SAFETY: the handle is alive; sizes and strides are those of the matrices; memory by this function's contract.
        unsafe {
            result::gemm_ex(
                self.handle,
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                vocab,
                rows,
                cols,
                scalar(&one),
                a,
                of,
                lda,
                b,
                of,
                ldb,
                scalar(&zero),
                out as *mut c_void,
                of,
                vocab,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .map_err(failed("multiply"))
    }
}

impl Drop for Matmul {
    fn drop(&mut self) {
        // SAFETY: made by `new` and destroyed once. Drop has no caller to report an error to.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
