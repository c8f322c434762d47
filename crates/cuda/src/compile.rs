//! From a translation unit to machine code, by NVRTC.
#![allow(unsafe_code)]

use crate::error::CudaError;
use crate::{cache, sources};
use core::ffi::{CStr, c_int};
use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;
use std::ffi::CString;

/// Whether the compiler's library can be loaded. cudarc panics when it cannot, so this is asked first.
pub(crate) fn is_present() -> bool {
    // SAFETY: loads a library by its well-known names; its initialisers are NVIDIA's.
    unsafe { sys::is_culib_present() }
}

/// The compiler's version.
pub(crate) fn version() -> String {
    let (mut major, mut minor) = (0 as c_int, 0 as c_int);
    // SAFETY: two integers to write to.
    let code = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    format!("{major}.{minor} ({code:?})")
}

/// Machine code of a kernel, from the cache or the compiler.
///
/// # Errors
/// [`CudaError::Compile`].
pub(crate) fn kept_machine_code(kernel: &'static str, options: &[String]) -> Result<Vec<u8>, CudaError> {
    let unit = sources::translation_unit(kernel);
    let key = cache::key(&[kernel, &version(), &options.join(" "), &unit]);
    cache::get_or_make(&key, || machine_code(kernel, &unit, options))
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `create_program` and destroyed once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiles `unit` to machine code for one architecture, which the options name.
///
/// # Errors
/// [`CudaError::Compile`], with the compiler's log.
pub(crate) fn machine_code(kernel: &'static str, unit: &str, options: &[String]) -> Result<Vec<u8>, CudaError> {
    let failed = |NvrtcError(code), log| CudaError::Compile { kernel, code: code as u32, log };
    let source = CString::new(unit).expect("the embedded sources hold no zero byte");
    let name = CString::new(kernel).expect("the kernels' names hold no zero byte");
    let create = result::create_program(&source, Some(&name));
    let program = Program(create.map_err(|e| failed(e, "the program could not be created".into()))?);
    // SAFETY: the program is alive; the options are strings.
    unsafe { result::compile_program(program.0, options) }.map_err(|e| {
        // SAFETY: the program is alive.
        let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.iter().map(|&c| c as u8).collect();
        let text = CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned());
        failed(e, text.unwrap_or_default())
    })?;
    let mut size = 0usize;
    // SAFETY: the program is alive and compiled; an integer to write to.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut size) }.result().map_err(|e| failed(e, "no code".into()))?;
    let mut code = vec![0u8; size];
    // SAFETY: the buffer has the size that the compiler asked for.
    unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }
        .result()
        .map_err(|e| failed(e, "no code".into()))?;
    Ok(code)
}
