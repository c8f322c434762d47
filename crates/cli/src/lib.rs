//! The `flash-sampling` command as a library, for its `main`, its tests and the fuzz targets. docs/cli.md describes the
//! command.
//!
//! | module | content |
//! | --- | --- |
//! | [`args`] | the flags of all subcommands |
//! | [`generate`] | `flash-sampling generate`: text, by the layers of [`flash_sampling_models`] |
//! | [`sample`] | `flash-sampling sample`: tokens for rows of hidden states, also as ranks |
//! | [`verify`] | `flash-sampling verify`: the laws of exact sampling |
//! | [`mod@bench`] | `flash-sampling bench` |
//! | [`shadow`] | `flash-sampling shadow` |
//! | `kernels` | `flash-sampling kernels` (feature `cuda`) |
//! | [`info`] | `flash-sampling info`, and the machine in reports and records |
//! | [`input`] | heads, hidden states, masks and parameters from files |
//! | [`output`] | messages, files, progress bars |
//! | [`sampler`] | the sampler that the flags choose |
//! | [`error`], [`interrupt`] | errors on one line with exit codes, Ctrl-C |

pub mod args;
pub mod bench;
pub mod error;
pub mod generate;
pub mod info;
pub mod input;
pub mod interrupt;
#[cfg(feature = "cuda")]
pub mod kernels;
pub mod output;
mod run;
pub mod sample;
pub mod sampler;
pub mod shadow;
pub mod verify;

pub use run::run;
