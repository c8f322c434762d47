//! The command as a process: its arguments, output and exit code.

mod bad_input;
mod checkpoint;
mod common;
mod eight_bit;
mod eight_bit_files;
mod generate;
mod gguf;
mod gguf_files;
mod gguf_tokenizers;
#[cfg(feature = "cuda")]
mod gpu;
mod ineffective_flags;
mod kernels;
mod params;
mod process;
mod sample;
mod shadow;
mod verify;
