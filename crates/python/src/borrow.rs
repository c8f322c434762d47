//! Borrows tensors of Python libraries, by numpy's array interface or by DLPack.

use crate::dlpack;
use crate::error::{FlashSamplingError, invalid, invalid_type};
use crate::tensor::{Kind, Place, Tensor};
use pyo3::exceptions::{PyException, PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::Arc;

/// DLPack's codes of unsupported 8-bit floats.
const FLOAT8: [(u8, &str); 4] =
    [(11, "float8_e4m3fnuz"), (12, "float8_e5m2"), (13, "float8_e5m2fnuz"), (14, "float8_e8m0fnu")];

impl Tensor {
    /// Borrows the memory of an object with `__array_interface__` (numpy) or `__dlpack__` (torch, JAX, CuPy).
    ///
    /// # Errors
    /// `TypeError` if the object is not a tensor; `what` is the argument's name.
    pub(crate) fn borrow(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Tensor> {
        Tensor::try_borrow(object, what)?.ok_or_else(|| {
            let found = object.get_type().name().map(|name| name.to_string()).unwrap_or_default();
            let expected = "must be a tensor: an array of numpy, or any object with __dlpack__ (torch, JAX, CuPy)";
            PyTypeError::new_err(format!("{what} {expected}, not {found}"))
        })
    }

    /// Borrows a tensor as [`Tensor::borrow`], but returns `None` if the object is not a tensor.
    pub(crate) fn try_borrow(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Option<Tensor>> {
        Tensor::of_object(object, what).map_err(|error| of_library(object, what, error))
    }

    fn of_object(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Option<Tensor>> {
        if let Some((tensor, stream)) = dlpack::exchange(object)? {
            return Tensor::of_exported(tensor, stream, what).map(Some);
        }
        if let Some(interface) = object.getattr_opt("__array_interface__")? {
            let interface = interface.cast::<PyDict>()?;
            // The interface of a numpy scalar has the address of a temporary copy.
            let is_scalar = interface.get_item("shape")?.is_none_or(|shape| shape.len().is_ok_and(|n| n == 0));
            if is_scalar { Ok(None) } else { Tensor::of_numpy(object, interface, what).map(Some) }
        } else if object.hasattr("__dlpack__")? {
            Tensor::of_dlpack(object, what).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Borrows a numpy array by its array interface: only numpy 2.1 and later export read-only arrays by DLPack.
    fn of_numpy(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>, what: &str) -> PyResult<Tensor> {
        let get = |key: &str| -> PyResult<Bound<'_, PyAny>> {
            interface.get_item(key)?.ok_or_else(|| PyTypeError::new_err(format!("{what} has no {key}")))
        };
        let typestr: String = get("typestr")?.extract()?;
        let (data, is_read_only): (usize, bool) = get("data")?.extract()?;
        let shape: Vec<usize> = get("shape")?.extract()?;
        let kind = typestr.chars().nth(1).unwrap_or(' ');
        let size = typestr.get(2..).and_then(|size| size.parse().ok()).unwrap_or(0);
        // The types of the package ml_dtypes, which JAX uses, have only names.
        let name = || {
            let name = object.getattr("dtype").and_then(|dtype| dtype.getattr("name")?.extract());
            name.unwrap_or_else(|_| typestr.clone())
        };
        let kind = match (kind, size) {
            ('b', 1) => Kind::Bool,
            ('i', 1 | 2 | 4 | 8) => Kind::Int,
            ('u', 1 | 2 | 4 | 8) => Kind::UInt,
            ('f', 2 | 4 | 8) => Kind::Float,
            ('V', 2) if name() == "bfloat16" => Kind::BFloat,
            ('V', 1) if name() == "float8_e4m3fn" => Kind::Float8,
            _ => return Err(invalid_type(format!("{what} has an unsupported element type, {}", name()))),
        };
        if typestr.starts_with(if cfg!(target_endian = "little") { '>' } else { '<' }) {
            return Err(PyTypeError::new_err(format!("{what} has a byte order other than this machine's")));
        }
        let strides = match interface.get_item("strides")?.filter(|strides| !strides.is_none()) {
            Some(bytes) => {
                let bytes: Vec<isize> = bytes.extract()?;
                // Only a view of a structured array has a stride that is not a multiple of the element size.
                if bytes.iter().any(|stride| stride % size as isize != 0) {
                    return Err(invalid(what, format!("{what} has strides within an element")));
                }
                bytes.iter().map(|stride| stride / size as isize).collect()
            }
            None => dlpack::contiguous(&shape),
        };
        let owner = Arc::new(object.clone().unbind());
        let (data, place, stream) = (data as *const u8, Place::Host, 0);
        Ok(Tensor { data, place, kind, size, shape, strides, is_read_only, stream, owner })
    }

    fn of_dlpack(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Tensor> {
        // torch does not export a tensor that requires a gradient, such as a parameter of a model.
        let requires_grad = object.getattr_opt("requires_grad")?.is_some_and(|flag| flag.is_truthy().unwrap_or(false));
        let object = if requires_grad { &object.call_method0("detach")? } else { object };
        let (device, id): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        let (arrays, options) = (object.py().import("flash_sampling._arrays")?, PyDict::new(object.py()));
        let mut stream = 0;
        if place_of(device, id, what)? != Place::Host {
            stream = arrays.call_method1("current_stream", (object,))?.extract()?;
            // DLPack calls the default stream 1.
            options.set_item("stream", stream.max(1))?;
        }
        options.set_item("max_version", (1, 0))?;
        let capsule = arrays.call_method("export", (object,), Some(&options)).or_else(|error| {
            // Producers of DLPack's first version do not have the argument `max_version`.
            if !error.is_instance_of::<PyTypeError>(object.py()) {
                return Err(error);
            }
            options.del_item("max_version")?;
            arrays.call_method("export", (object,), Some(&options))
        })?;
        let tensor = dlpack::take(&capsule)?;
        if (tensor.device.kind, tensor.device.id) != (device, id) {
            return Err(invalid(what, format!("{what} is on a device other than its __dlpack_device__")));
        }
        Tensor::of_exported(tensor, stream, what)
    }

    /// Reads a DLPack tensor. `stream` is the current stream of the tensor's library.
    fn of_exported(tensor: dlpack::Tensor, stream: u64, what: &str) -> PyResult<Tensor> {
        let place = place_of(tensor.device.kind, tensor.device.id, what)?;
        let (kind, size) = match (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) {
            (0, bits @ (8 | 16 | 32 | 64), 1) => (Kind::Int, bits / 8),
            (1, bits @ (8 | 16 | 32 | 64), 1) => (Kind::UInt, bits / 8),
            (2, bits @ (16 | 32 | 64), 1) => (Kind::Float, bits / 8),
            (4, 16, 1) => (Kind::BFloat, 2),
            (6, 8, 1) => (Kind::Bool, 1),
            (10, 8, 1) => (Kind::Float8, 1),
            (code, bits, _) => {
                let name = FLOAT8.iter().find(|(number, _)| *number == code).map(|(_, name)| (*name).into());
                let found = name.unwrap_or_else(|| format!("code {code} with {bits} bits of DLPack"));
                return Err(invalid_type(format!("{what} has an unsupported element type, {found}")));
            }
        };
        let dlpack::Tensor { data, shape, strides, is_read_only, owner, .. } = tensor;
        Ok(Tensor { data, place, kind, size: size.into(), shape, strides, is_read_only, stream, owner })
    }
}

/// Returns the memory for DLPack's device type and device number.
fn place_of(device: i32, id: i32, what: &str) -> PyResult<Place> {
    match device {
        dlpack::HOST | dlpack::CUDA_HOST => Ok(Place::Host),
        dlpack::CUDA | dlpack::CUDA_MANAGED => Ok(Place::Cuda(id)),
        _ => Err(invalid_type(format!("{what} is on DLPack's device type {device}, which is unsupported"))),
    }
}

/// Adds the argument's name to the error of a library that cannot export a tensor.
fn of_library(object: &Bound<'_, PyAny>, what: &str, error: PyErr) -> PyErr {
    let py = object.py();
    let has_name = error.is_instance_of::<FlashSamplingError>(py) || error.is_instance_of::<PyTypeError>(py);
    if has_name || error.is_instance_of::<PyMemoryError>(py) || !error.is_instance_of::<PyException>(py) {
        return error;
    }
    let library = object.get_type().module().map(|name| name.to_string()).unwrap_or_default();
    let hint = if library.starts_with("jax") { "; inside jax.jit, arrays have no values" } else { "" };
    let named = invalid(what, format!("{what} cannot be read: {}{hint}", error.value(py)));
    named.set_cause(py, Some(error));
    named
}

/// Copies a tensor on a GPU to host memory (torch's `cpu`, CuPy's `get`, JAX's `__array__`), and returns any other object
/// unchanged. `what` is the argument's name.
pub(crate) fn in_host_memory<'py>(object: &Bound<'py, PyAny>, what: &str) -> PyResult<Bound<'py, PyAny>> {
    on_host(object).map_err(|error| of_library(object, what, error))
}

fn on_host<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    if !object.hasattr("__dlpack_device__")? {
        return Ok(object.clone());
    }
    let device = object.call_method0("__dlpack_device__")?;
    let kind: i32 = device.cast::<PyTuple>()?.get_item(0)?.extract()?;
    match kind {
        dlpack::CUDA | dlpack::CUDA_MANAGED => {
            for copy in ["cpu", "get"] {
                if object.hasattr(copy)? {
                    return object.call_method0(copy);
                }
            }
            object.call_method0("__array__")
        }
        _ => Ok(object.clone()),
    }
}
