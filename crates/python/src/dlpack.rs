//! The DLPack protocol: takes a tensor from a Python capsule, or from functions of the tensor's library.
#![allow(unsafe_code)]

use core::ffi::{CStr, c_int, c_void};
use core::ptr::{self, NonNull};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use pyo3::{ffi, intern};
use std::sync::Arc;

/// `DLDevice` of dlpack.h.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

/// DLPack's device types: host memory, GPU memory, page-locked host memory, managed memory.
pub(crate) const HOST: i32 = 1;
pub(crate) const CUDA: i32 = 2;
pub(crate) const CUDA_HOST: i32 = 3;
pub(crate) const CUDA_MANAGED: i32 = 13;

/// `DLDataType` of dlpack.h.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataType {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor` of dlpack.h.
#[repr(C)]
struct RawTensor {
    data: *mut u8,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *const i64,
    /// In elements; null = contiguous.
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensor` of dlpack.h.
#[repr(C)]
struct Managed {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned` of dlpack.h.
#[repr(C)]
struct ManagedVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    flags: u64,
    tensor: RawTensor,
}

/// `DLPackExchangeAPI` of dlpack.h: functions of a library for tensors of a Python type.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: *const c_void,
    from_object: Option<unsafe extern "C" fn(*mut c_void, *mut *mut ManagedVersioned) -> c_int>,
    to_object: *const c_void,
    view_of_object: *const c_void,
    current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// Exports a tensor by the functions of its library, with the library's current stream of the tensor's device (0 on the
/// CPU). Returns `None` if the type has no such functions, or if they fail: then `__dlpack__` describes the error.
/// torch has the functions since version 2.10; other packages can add them to older versions.
///
/// On the CPU, an export by `__dlpack__` takes 12 us, and this export 0.7 us.
///
/// # Errors
/// Another major version of DLPack.
pub(crate) fn exchange(object: &Bound<'_, PyAny>) -> PyResult<Option<(Tensor, u64)>> {
    let py = object.py();
    let Some(capsule) = object.get_type().getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? else {
        return Ok(None);
    };
    let Ok(capsule) = capsule.cast::<PyCapsule>() else { return Ok(None) };
    let Ok(api) = capsule.pointer_checked(Some(c"dlpack_exchange_api")) else { return Ok(discard_error(py)) };
    let api: NonNull<ExchangeApi> = api.cast();
    // SAFETY: a capsule of this name has this type, which lives as long as the process. In every version, this type
    // begins with the major version.
    if unsafe { *api.cast::<u32>().as_ptr() } != 1 {
        return Ok(None);
    }
    // SAFETY: as above, in version 1.
    let ExchangeApi { from_object: Some(from_object), current_stream: Some(current_stream), .. } =
        (unsafe { api.as_ref() })
    else {
        return Ok(None);
    };
    let mut managed = ptr::null_mut();
    // SAFETY: an object of the type that has the functions, and this thread is attached to Python.
    let failed = unsafe { from_object(object.as_ptr().cast(), &mut managed) } != 0;
    let managed = match NonNull::new(managed) {
        Some(managed) if !failed => managed,
        _ => return Ok(discard_error(py)),
    };
    let tensor = of_versioned(managed)?;
    let Device { kind, id } = tensor.device;
    let mut stream = ptr::null_mut();
    // SAFETY: a device of the library, and this thread is attached to Python.
    if matches!(kind, CUDA | CUDA_MANAGED) && unsafe { current_stream(kind, id, &mut stream) } != 0 {
        return Ok(discard_error(py));
    }
    Ok(Some((tensor, stream as u64)))
}

/// Takes the current Python error, if there is one, and returns `None`.
fn discard_error<T>(py: Python<'_>) -> Option<T> {
    drop(PyErr::take(py));
    None
}

/// The owner of a tensor's memory. Its drop returns the memory to the producer.
enum Owner {
    Plain(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

// SAFETY: the drop calls the producer's deleter while attached to Python, from any thread, as DLPack allows. Nothing
// else uses the pointer.
unsafe impl Send for Owner {}
// SAFETY: no method of a shared reference uses the pointer.
unsafe impl Sync for Owner {}

impl Drop for Owner {
    fn drop(&mut self) {
        // Python cannot be attached while the interpreter shuts down; the end of the process frees the memory.
        Python::try_attach(|_| {
            // SAFETY: the pointer is from a capsule that `take` marked as used, or from `exchange`, so this is the only
            // call of the deleter.
            unsafe {
                match self {
                    Owner::Plain(managed) => {
                        managed.as_ref().deleter.iter().for_each(|delete| delete(managed.as_ptr()));
                    }
                    Owner::Versioned(managed) => {
                        managed.as_ref().deleter.iter().for_each(|delete| delete(managed.as_ptr()));
                    }
                }
            }
        });
    }
}

/// A tensor taken from a capsule.
pub(crate) struct Tensor {
    pub(crate) data: *const u8,
    pub(crate) device: Device,
    pub(crate) dtype: DataType,
    pub(crate) shape: Vec<usize>,
    /// In elements.
    pub(crate) strides: Vec<isize>,
    pub(crate) is_read_only: bool,
    pub(crate) owner: Arc<dyn Send + Sync>,
}

/// Takes the tensor of a capsule, and marks the capsule as used.
///
/// # Errors
/// The object is not a DLPack capsule with a tensor, or has an unsupported major version of DLPack.
pub(crate) fn take(capsule: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let capsule = capsule.cast::<PyCapsule>()?;
    if capsule.is_valid_checked(Some(c"dltensor_versioned")) {
        of_versioned(rename(capsule, c"dltensor_versioned", c"used_dltensor_versioned")?)
    } else {
        let managed: NonNull<Managed> = rename(capsule, c"dltensor", c"used_dltensor")?;
        let owner = Owner::Plain(managed);
        // SAFETY: a capsule of this name has this type, and the tensor is valid until `owner` calls the deleter.
        Ok(unsafe { read(&managed.as_ref().tensor, owner) })
    }
}

/// Takes a tensor of DLPack's version 1.
fn of_versioned(managed: NonNull<ManagedVersioned>) -> PyResult<Tensor> {
    let owner = Owner::Versioned(managed);
    // SAFETY: the producer made the value; version and deleter have the same place in every version.
    let major = unsafe { managed.as_ref() }.major;
    if major != 1 {
        return Err(PyBufferError::new_err(format!("DLPack {major} is not supported: 1 is")));
    }
    // SAFETY: the producer's tensor is valid until its deleter is called, which `owner` does.
    let tensor = unsafe { read(&managed.as_ref().tensor, owner) };
    // SAFETY: as above; `tensor` has the owner.
    let is_read_only = unsafe { managed.as_ref() }.flags & 1 == 1;
    Ok(Tensor { is_read_only, ..tensor })
}

/// Returns the pointer of a capsule, and renames the capsule to mark it as used.
fn rename<T>(capsule: &Bound<'_, PyCapsule>, name: &'static CStr, used: &'static CStr) -> PyResult<NonNull<T>> {
    let pointer = capsule.pointer_checked(Some(name))?;
    // SAFETY: a valid capsule, a name that lives forever, and this thread is attached to Python.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    Ok(pointer.cast())
}

/// Reads the fields of a tensor.
///
/// # Safety
/// The tensor comes from a producer and is valid.
unsafe fn read(tensor: &RawTensor, owner: Owner) -> Tensor {
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |at: *const i64| {
        let is_list = ndim > 0 && !at.is_null();
        // SAFETY: by the contract, `shape` and `strides` have `ndim` elements each.
        is_list.then(|| unsafe { core::slice::from_raw_parts(at, ndim) }.to_vec())
    };
    let shape = list(tensor.shape).unwrap_or_default();
    let shape: Vec<usize> = shape.into_iter().map(|len| usize::try_from(len).unwrap_or(0)).collect();
    let strides = list(tensor.strides).map(|strides| strides.into_iter().map(|stride| stride as isize).collect());
    let strides = strides.unwrap_or_else(|| contiguous(&shape));
    let data = tensor.data.wrapping_add(tensor.byte_offset as usize);
    let (device, dtype, owner) = (tensor.device, tensor.dtype, Arc::new(owner));
    Tensor { data, device, dtype, shape, strides, is_read_only: false, owner }
}

/// The strides of a contiguous tensor.
pub(crate) fn contiguous(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at].max(1) as isize;
    }
    strides
}
