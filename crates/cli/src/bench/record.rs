//! What a run of the benchmark leaves behind.

use crate::bench::table::{BULK, READ};
use crate::bench::timing::Timing;
use crate::info::machine::{Machine, utc_now};
use flash_sampling::DType;
use serde::Serialize;
use std::process::Command;

/// The whole run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record {
    /// The command line.
    pub command: String,
    /// When it began, in UTC.
    pub when: String,
    /// Version of this command.
    pub version: &'static str,
    /// The commit that this was built from, when the build was told (`FLASH_SAMPLING_COMMIT`); else that of the working
    /// tree, when this ran in one.
    pub commit: Option<String>,
    /// Whether the heads are small and the rounds few, so that the times mean nothing (`--quick`).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub quick: bool,
    /// The machine.
    pub machine: Machine,
    /// The GPU, where one was timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// How a GPU's times were taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// The sections, in order.
    pub sections: Vec<Section>,
    /// How many rows of each kind one pass decides, by what they ask for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub certified: Vec<Certified>,
    /// What a call costs the processor, where a GPU does the work.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub calls: Vec<Call>,
    /// The file that the peers' times come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<String>,
}

/// What a reader wants to know about the GPU.
#[derive(Clone, Debug, Serialize)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The driver, as it names itself.
    pub driver: Option<String>,
    /// cuBLAS's version; `None` where it was not found.
    pub cublas: Option<i32>,
    /// NCCL's version, where it was timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nccl: Option<i32>,
    /// Operations a second of cuBLAS on a square product of 8192: the matrix ceiling.
    pub matrix_flops: Option<f64>,
}

/// Host time of enqueuing one call.
#[derive(Clone, Debug, Serialize)]
pub struct Call {
    /// What was called.
    pub what: String,
    /// Tokens.
    pub vocab: usize,
    /// Columns of the hidden states.
    pub hidden: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Calls timed, each on an idle GPU.
    pub calls: usize,
    /// The time in the middle, in seconds.
    pub median: f64,
}

/// Contenders that were timed in turn on the same input.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Section {
    /// What was done.
    pub what: String,
    /// Rows of the batch.
    pub rows: usize,
    /// Tokens.
    pub vocab: usize,
    /// Columns of the hidden states; `None` for logits that exist already.
    pub hidden: Option<usize>,
    /// Element types, weight first.
    pub dtypes: String,
    /// Threads, where the processor works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Bytes that must be read at least: the weight, or the logits.
    pub bytes: usize,
    /// Rounds timed.
    pub rounds: usize,
    /// The contenders.
    pub entries: Vec<Entry>,
    /// Other programs, in processes of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<Entry>,
}

/// One contender.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// The shortest time, in seconds.
    pub best: f64,
    /// The time in the middle, in seconds.
    pub median: f64,
    /// How many passes the rows took, where filters may take more than one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passes: Option<Passes>,
}

/// How many passes rows took.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Passes {
    /// Rows of all calls.
    pub rows: u64,
    /// Those that one pass decided.
    pub one: u64,
    /// The most passes of a row.
    pub most: u32,
}

/// The passes of rows of one kind that ask for the same.
#[derive(Clone, Debug, Serialize)]
pub struct Certified {
    /// The kind of the rows' logits.
    pub rows: String,
    /// What they ask for.
    pub case: String,
    /// Their passes.
    pub passes: Passes,
}

impl Entry {
    /// A contender without passes.
    pub fn new(name: impl Into<String>, Timing { best, median }: Timing) -> Self {
        Entry { name: name.into(), best, median, passes: None }
    }
}

impl Passes {
    /// Counts a row.
    pub fn add(&mut self, passes: u32) {
        self.rows += 1;
        self.one += u64::from(passes == 1);
        self.most = self.most.max(passes);
    }

    /// Whether one pass left half of the rows, or more.
    pub fn is_mostly_undecided(self) -> bool {
        self.most > 1 && 2 * self.one <= self.rows
    }

    /// The share of the rows that one pass decided.
    pub fn certified(&self) -> f64 {
        self.one as f64 / self.rows.max(1) as f64
    }
}

impl Section {
    /// Of draws from hidden states by a weight of `[vocab, hidden]`, without entries yet.
    pub fn of_head(
        what: impl Into<String>,
        rows: usize,
        [vocab, hidden]: [usize; 2],
        dtype: DType,
        rounds: usize,
    ) -> Self {
        let bytes = vocab * hidden * dtype.size();
        let logits = Section::of_logits(what, vocab, rounds);
        Section { rows, hidden: Some(hidden), dtypes: dtype.name().into(), threads: None, bytes, ..logits }
    }

    /// Of draws from a row of float32 logits on one thread, without entries yet.
    pub fn of_logits(what: impl Into<String>, vocab: usize, rounds: usize) -> Self {
        Section {
            what: what.into(),
            rows: 1,
            vocab,
            dtypes: DType::F32.name().into(),
            threads: Some(1),
            bytes: vocab * DType::F32.size(),
            rounds,
            ..Section::default()
        }
    }

    /// Puts names and times together.
    pub fn fill<'a>(&mut self, names: impl Iterator<Item = &'a str>, timings: &[Timing]) {
        self.entries = names.zip(timings).map(|(name, timing)| Entry::new(name, *timing)).collect();
    }

    /// The time of the read, of the faster one where there are two.
    pub fn read(&self) -> Option<f64> {
        [READ, BULK].iter().filter_map(|name| self.entry(name)).map(|entry| entry.best).reduce(f64::min)
    }

    /// The contender of a name.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

impl Record {
    /// A record of this process, which begins now.
    pub fn begin() -> Self {
        Record {
            command: command_line(),
            when: utc_now(),
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("FLASH_SAMPLING_COMMIT").map(str::to_owned).or_else(commit),
            machine: Machine::this(),
            ..Record::default()
        }
    }
}

/// The command line, the program without its folder.
fn command_line() -> String {
    let mut args = std::env::args();
    let program = args.next().unwrap_or_default();
    let program = program.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
    std::iter::once(program).chain(args).collect::<Vec<_>>().join(" ")
}

/// The commit of the working tree that this runs in, if it is this project's.
fn commit() -> Option<String> {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
    };
    git(&["ls-files", "--error-unmatch", ":/crates/cli/src/bench/record.rs"])?;
    git(&["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
}
