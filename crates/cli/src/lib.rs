//! The `flash-sampling` command, as a library that its `main`, its tests and the fuzz targets share.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`args`] | the command line |
//! | [`load`] | heads, hidden states and masks from files |
//! | [`synthetic`] | deterministic heads of any size |
//! | [`source`] | the head and the hidden states that the flags choose |
//! | [`sampler`] | the sampler that the flags choose |
//! | [`sample`] | `flash-sampling sample` |
//! | [`output`] | rows as text and as JSON |
//! | [`error`], [`interrupt`], [`progress`] | one-line errors, Ctrl-C, progress bars |

pub mod args;
pub mod error;
pub mod interrupt;
pub mod load;
pub mod output;
pub mod progress;
mod run;
pub mod sample;
pub mod sampler;
pub mod source;
pub mod synthetic;

pub use run::run;
