//! Kernels on the processor: the system's C++ compiler builds `kernels/tests/NAME.cpp`, which takes its cases on standard
//! input and says on standard output what it found.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program, or nothing on a machine without a C++ compiler, which is said on standard error.
///
/// # Panics
/// Where it cannot be built, or `FLASH_SAMPLING_REQUIRE` names c++ and there is no compiler.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let program = folder().join(name);
    // The emulator's jumps between stacks look like smashed ones to a hardened library.
    let flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"];
    std::fs::create_dir_all(folder()).unwrap();
    let build = Command::new(&compiler)
        .args(flags)
        .args(["-ffp-contract=off", "-I"])
        .arg(kernels.join("include"))
        .arg(kernels.join("tests").join(name).with_extension("cpp"))
        .arg("-o")
        .arg(&program)
        .status();
    match build {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let required = std::env::var("FLASH_SAMPLING_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|r| r == "c++"), "no C++ compiler, but FLASH_SAMPLING_REQUIRE names c++");
            // The test harness captures what the print macros write, not this.
            let _ = writeln!(std::io::stderr(), "skipped: 1 test of cuda/{name}: no C++ compiler (set CXX)");
            None
        }
        status => {
            assert!(status.unwrap().success(), "{compiler} could not build {name}.cpp");
            Some(program)
        }
    }
}

/// Where programs are built: Cargo names a folder to the tests beside the crate, and those within it have their own.
fn folder() -> PathBuf {
    match option_env!("CARGO_TARGET_TMPDIR") {
        Some(folder) => folder.into(),
        None => std::env::current_exe().unwrap().with_extension("programs"),
    }
}

/// What the program says of `input`.
pub(crate) fn answer(program: &Path, input: Vec<u8>) -> Vec<u8> {
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&input).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    output.stdout
}
