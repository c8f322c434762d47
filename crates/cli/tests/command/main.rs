//! The command as its users run it: arguments in, output and exit code out.

mod bad_input;
mod checkpoint;
mod common;
mod generate;
#[cfg(feature = "cuda")]
mod gpu;
mod ineffective_flags;
mod kernels;
mod params;
mod process;
mod sample;
mod verify;
