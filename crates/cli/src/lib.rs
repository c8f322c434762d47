//! The `flash-sampling` command, as a library that its `main`, its tests and the fuzz targets share. docs/cli.md says how
//! to use the command.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`args`] | the command line |
//! | [`load`] | heads, hidden states and masks from files |
//! | [`synthetic`] | deterministic heads of any size |
//! | `idle` | knobs that change nothing beside the others |
//! | [`source`] | the head and the hidden states that the flags choose |
//! | [`sampler`] | the sampler that the flags choose |
//! | [`generate`] | `flash-sampling generate`: text, by the layers of [`flash_sampling_models`] |
//! | [`loaded_head`] | a head from files, with its transforms |
//! | [`sample`], `ranks`, `copies` | `flash-sampling sample`, also as one rank of several, or where none was meant |
//! | `gpus` | its ranks on GPUs, with the feature `cuda` |
//! | [`verify`] | `flash-sampling verify` |
//! | [`mod@bench`] | `flash-sampling bench` |
//! | `kernels` | `flash-sampling kernels`, with the feature `cuda` |
//! | [`info`], [`machine`] | `flash-sampling info`, and the machine in records |
//! | [`plot`] | what all plots share |
//! | [`output`] | rows as text and as JSON |
//! | [`error`], [`interrupt`], [`progress`] | one-line errors, Ctrl-C, progress bars |

pub mod args;
pub mod bench;
mod copies;
pub mod error;
pub mod generate;
#[cfg(feature = "cuda")]
mod gpus;
mod idle;
pub mod info;
pub mod interrupt;
#[cfg(feature = "cuda")]
pub mod kernels;
pub mod load;
pub mod loaded_head;
pub mod machine;
pub mod output;
pub mod plot;
pub mod progress;
#[cfg(feature = "mpi")]
mod ranks;
mod run;
pub mod sample;
pub mod sampler;
pub mod source;
pub mod synthetic;
pub mod verify;

pub use run::run;
