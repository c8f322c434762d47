//! Runs kernels on the processor. The system's C++ compiler builds `kernels/tests/NAME.cpp`, which reads cases from
//! standard input and writes results to standard output, both as little-endian numbers.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Builds the program; `None` without a C++ compiler, with a message on standard error.
///
/// # Panics
/// If the program cannot be built, or if there is no compiler and `FLASH_SAMPLING_REQUIRE` names c++.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let program = folder().join(name);
    // A fortified C library reports the emulator's jumps between stacks as stack corruption.
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
            // The test harness captures the print macros' output, but not this.
            let _ = writeln!(std::io::stderr(), "skipped: 1 test of cuda/{name}: no C++ compiler (set CXX)");
            None
        }
        status => {
            assert!(status.unwrap().success(), "{compiler} could not build {name}.cpp");
            Some(program)
        }
    }
}

/// Returns the folder for built programs. Cargo names one for integration tests; unit tests use their own.
fn folder() -> PathBuf {
    match option_env!("CARGO_TARGET_TMPDIR") {
        Some(folder) => folder.into(),
        None => std::env::current_exe().unwrap().with_extension("programs"),
    }
}

/// Returns the program's output for `input`.
pub(crate) fn answer(program: &Path, Input(input): Input) -> Output {
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&input).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    Output { bytes: output.stdout, at: 0 }
}

/// A number, or an array of numbers, in the input or the output of a program.
pub(crate) trait Number: Copy {
    fn write(self, bytes: &mut Vec<u8>);
    fn read(bytes: &mut &[u8]) -> Self;
}

macro_rules! numbers {
    ($($number:ty),+) => {$(
        impl Number for $number {
            fn write(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }

            fn read(bytes: &mut &[u8]) -> Self {
                let (number, rest) = bytes.split_first_chunk().expect("the program wrote fewer numbers");
                *bytes = rest;
                <$number>::from_le_bytes(*number)
            }
        }
    )+};
}
numbers!(u8, u16, u32, u64, i32, i64, f32, f64);

impl<N: Number, const COUNT: usize> Number for [N; COUNT] {
    fn write(self, bytes: &mut Vec<u8>) {
        self.into_iter().for_each(|number| number.write(bytes));
    }

    fn read(bytes: &mut &[u8]) -> Self {
        core::array::from_fn(|_| N::read(bytes))
    }
}

/// The input of a program.
#[derive(Default)]
pub(crate) struct Input(Vec<u8>);

impl Input {
    pub(crate) fn put(&mut self, number: impl Number) {
        number.write(&mut self.0);
    }

    pub(crate) fn put_all<N: Number>(&mut self, numbers: impl IntoIterator<Item = N>) {
        numbers.into_iter().for_each(|number| self.put(number));
    }
}

/// The output of a program.
pub(crate) struct Output {
    bytes: Vec<u8>,
    at: usize,
}

impl Output {
    /// Takes the next number.
    pub(crate) fn take<N: Number>(&mut self) -> N {
        let mut rest = &self.bytes[self.at..];
        let number = N::read(&mut rest);
        self.at = self.bytes.len() - rest.len();
        number
    }

    /// Takes the next `count` numbers.
    pub(crate) fn list<N: Number>(&mut self, count: usize) -> Vec<N> {
        (0..count).map(|_| self.take()).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }
}
