//! The record of a run: the sections of `flash-sampling bench`, the commit, and the GPU.

use flash_sampling_cli::bench::record::Record as Run;
use serde::Serialize;
use std::ops::{Deref, DerefMut};
use std::process::Command;

/// The whole run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record {
    /// Command line, machine and sections.
    #[serde(flatten)]
    pub run: Run,
    /// The commit of the build (`FLASH_SAMPLING_COMMIT`), or of the working tree.
    pub commit: Option<String>,
    /// The GPU, if one was timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// The timing protocol on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// Host times of calls on a GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<Call>,
    /// The file with the times of other programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<String>,
}

impl Deref for Record {
    type Target = Run;

    fn deref(&self) -> &Run {
        &self.run
    }
}

impl DerefMut for Record {
    fn deref_mut(&mut self) -> &mut Run {
        &mut self.run
    }
}

impl Record {
    /// The record of this process, which begins now.
    pub fn begin(quick: bool) -> Self {
        let commit = option_env!("FLASH_SAMPLING_COMMIT").map(str::to_owned).or_else(commit);
        Record { run: Run { quick, ..Run::begin() }, commit, ..Record::default() }
    }
}

/// The GPU.
#[derive(Clone, Debug, Serialize)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Version of the driver.
    pub driver: Option<String>,
    /// Version of cuBLAS; `None` if it was not found.
    pub cublas: Option<i32>,
    /// Version of NCCL, if it was timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nccl: Option<i32>,
    /// Operations per second of cuBLAS on a square product of side 8192: the matrix ceiling.
    pub matrix_flops: Option<f64>,
}

/// The host time to enqueue one call.
#[derive(Clone, Debug, Serialize)]
pub struct Call {
    /// The call.
    pub what: String,
    /// Tokens.
    pub vocab: usize,
    /// Columns of the hidden states.
    pub hidden: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Calls timed, each on an idle GPU.
    pub calls: usize,
    /// The median, in seconds.
    pub median: f64,
}

/// The commit of the current working tree, if it belongs to this project.
fn commit() -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
    };
    git(&["ls-files", "--error-unmatch", ":/benches/src/record.rs"])?;
    git(&["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
}
