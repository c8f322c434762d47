//! Compiles a translation unit to machine code with NVRTC.
#![allow(unsafe_code)]

use crate::compile::{CompilerVersion, resources};
use crate::error::CudaError;
use core::ffi::{CStr, c_int};
use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;
use std::ffi::CString;
#[cfg(not(feature = "linked"))]
use std::sync::OnceLock;

/// Whether the compiler's library can be loaded. cudarc panics if it cannot, so callers check this first.
///
/// One thread checks once. The check loads and unloads the library with its initialisers, which is not safe while other
/// threads load the library. The following query of the version keeps the library loaded.
#[cfg(not(feature = "linked"))]
pub(crate) fn is_present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loads a library by its well-known names; its initialisers are NVIDIA's.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() } && version_of_library().is_some())
}

/// True: a program that is linked with the library starts only if the library is present.
#[cfg(feature = "linked")]
pub(crate) fn is_present() -> bool {
    true
}

/// The names of the compiler's library.
#[cfg(feature = "linked")]
pub(crate) fn names() -> Vec<String> {
    vec!["the one that was linked".into()]
}

/// The names of the compiler's library; names of Windows libraries only on Windows.
#[cfg(not(feature = "linked"))]
pub(crate) fn names() -> Vec<String> {
    let mut names = cudarc::get_lib_name_candidates("nvrtc");
    names.retain(|name| cfg!(windows) || !name.contains("nvrtc64"));
    names
}

/// Returns the version of NVIDIA's run-time compiler; `None` if its library cannot be loaded.
pub fn version() -> Option<CompilerVersion> {
    if is_present() { version_of_library() } else { None }
}

/// Returns the version of the library, which must be present.
fn version_of_library() -> Option<CompilerVersion> {
    let (mut major, mut minor) = (0 as c_int, 0 as c_int);
    // SAFETY: two integers to write to.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }.result().ok()?;
    Some(CompilerVersion { major: major.try_into().ok()?, minor: minor.try_into().ok()? })
}

/// The output of the compiler.
#[derive(Debug)]
pub(crate) struct Compiled {
    pub(crate) code: Vec<u8>,
    /// The compiler's log, with registers and spills of every kernel.
    pub(crate) log: String,
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: `create_program` made the program, and this drop destroys it once.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiles `unit` to machine code for one architecture, which the options name.
///
/// # Errors
/// [`CudaError::Compile`], with the compiler's log.
pub(crate) fn machine_code(kernel: &'static str, unit: &str, options: &[String]) -> Result<Compiled, CudaError> {
    let failed = |NvrtcError(code), log| CudaError::Compile { kernel, code: code as u32, log };
    let source = CString::new(unit).expect("the embedded sources hold no zero byte");
    let name = CString::new(kernel).expect("the kernels' names hold no zero byte");
    let create = result::create_program(&source, Some(&name));
    let program = Program(create.map_err(|e| failed(e, "the program could not be created".into()))?);
    let options: Vec<&str> = options.iter().map(String::as_str).chain(["--ptxas-options=-v"]).collect();
    // SAFETY: the program is alive; the options are strings.
    let outcome = unsafe { result::compile_program(program.0, &options) };
    // SAFETY: the program is alive.
    let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
    let bytes: Vec<u8> = log.iter().map(|c| c.to_ne_bytes()[0]).collect();
    let log = CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    if let Err(error) = outcome {
        return Err(failed(error, log));
    }
    let mut size = 0usize;
    // SAFETY: the program is alive and compiled; an integer to write to.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut size) }.result().map_err(|e| failed(e, "no code".into()))?;
    let mut code = vec![0u8; size];
    // SAFETY: the buffer has the size that the compiler requires.
    unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }
        .result()
        .map_err(|e| failed(e, "no code".into()))?;
    Ok(Compiled { code, log })
}

/// Compiles as [`machine_code`] does, with the assembler's report in the log.
///
/// On a host with a driver, NVRTC caches its output and then omits the report, so this function disables the cache.
///
/// # Errors
/// As [`machine_code`].
pub(crate) fn reported(kernel: &'static str, unit: &str, options: &[String]) -> Result<Compiled, CudaError> {
    let compiled = machine_code(kernel, unit, options)?;
    if !resources::of_log(&compiled.log).is_empty() {
        return Ok(compiled);
    }
    // Older compilers have no cache, and do not know the option.
    Ok(machine_code(kernel, unit, &[options, &[NO_CACHE.to_owned()]].concat()).unwrap_or(compiled))
}

/// The option that disables NVRTC's cache.
const NO_CACHE: &str = "--no-cache";

#[cfg(test)]
pub(crate) mod tests {
    use super::{NO_CACHE, machine_code};
    use crate::compile::resources;

    use std::io::Write;

    /// Whether the compiler tests can run here. Reports the number of skipped tests, unless the tests are required.
    pub(crate) fn runs(count: usize) -> bool {
        if super::is_present() {
            return true;
        }
        let required = std::env::var("FLASH_SAMPLING_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|r| r == "nvrtc"), "no libnvrtc, but FLASH_SAMPLING_REQUIRE names nvrtc");
        // The test harness captures what the print macros write, not this.
        let _ = writeln!(std::io::stderr(), "skipped: {count} test of cuda/nvrtc: libnvrtc cannot be loaded");
        false
    }

    #[test]
    fn the_compiler_can_bypass_its_cache() {
        if !runs(1) {
            return;
        }
        let options = ["--gpu-architecture=sm_80".to_owned(), NO_CACHE.to_owned()];
        let unit = "extern \"C\" __global__ void kernel(float* x) { x[threadIdx.x] += 1.0f; }";
        for _ in 0..2 {
            assert_eq!(resources::of_log(&machine_code("kernel", unit, &options).unwrap().log).len(), 1);
        }
    }
}
