//! The record of a run of the benchmark.

use crate::bench::table::{BULK, READ};
use crate::bench::timing::Timing;
use crate::info::machine::{Machine, utc_now};
use flash_sampling::DType;
use serde::Serialize;

/// The whole run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Record {
    /// The command line.
    pub command: String,
    /// The start of the run, in UTC.
    pub when: String,
    /// Version of this command.
    pub version: &'static str,
    /// Whether heads are small and rounds few (`--quick`), so that the times mean nothing.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub quick: bool,
    /// The machine.
    pub machine: Machine,
    /// The sections, in order.
    pub sections: Vec<Section>,
}

/// Contenders that were timed in turn on the same input.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Section {
    /// The work.
    pub what: String,
    /// Rows of the batch.
    pub rows: usize,
    /// Tokens.
    pub vocab: usize,
    /// Columns of the hidden states; `None` for logits that exist already.
    pub hidden: Option<usize>,
    /// Element types, weight first.
    pub dtypes: String,
    /// Threads of the processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Bytes of the weight, or of the logits.
    pub bytes: usize,
    /// Rounds timed.
    pub rounds: usize,
    /// The contenders.
    pub entries: Vec<Entry>,
    /// Other programs, in separate processes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<Entry>,
    /// The rows that fall back from a shadow to the weight.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fallbacks: Vec<Fallback>,
}

/// The rows of a temperature that fall back from a shadow to the weight.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Fallback {
    /// The temperature.
    pub temperature: f32,
    /// All drawn rows.
    pub rows: usize,
    /// The rows that fell back.
    pub fallback_rows: usize,
}

/// One contender.
#[derive(Clone, Debug, Serialize)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// The shortest time, in seconds.
    pub best: f64,
    /// The median, in seconds.
    pub median: f64,
    /// Passes over rows with filters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passes: Option<Passes>,
}

/// Passes over rows.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Passes {
    /// Rows of all calls.
    pub rows: u64,
    /// Rows that one pass decided.
    pub one: u64,
    /// The largest number of passes of a row.
    pub most: u32,
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

    /// Whether one pass left half of the rows or more undecided.
    pub fn is_mostly_undecided(self) -> bool {
        self.most > 1 && 2 * self.one <= self.rows
    }

    /// The share of the rows that one pass decided.
    pub fn share_of_one_pass(&self) -> f64 {
        self.one as f64 / self.rows.max(1) as f64
    }
}

impl Section {
    /// A section of draws from hidden states by a weight `[vocab, hidden]`, without entries.
    pub fn of_head(
        what: impl Into<String>,
        rows: usize,
        [vocab, hidden]: [usize; 2],
        dtype: DType,
        rounds: usize,
    ) -> Self {
        let bytes = vocab * dtype.bytes(hidden).unwrap_or_default();
        let logits = Section::of_logits(what, vocab, rounds);
        Section { rows, hidden: Some(hidden), dtypes: dtype.name().into(), threads: None, bytes, ..logits }
    }

    /// A section of draws from a row of float32 logits on one thread, without entries.
    pub fn of_logits(what: impl Into<String>, vocab: usize, rounds: usize) -> Self {
        Section {
            what: what.into(),
            rows: 1,
            vocab,
            dtypes: DType::F32.name().into(),
            threads: Some(1),
            bytes: vocab * DType::F32.block_bytes(),
            rounds,
            ..Section::default()
        }
    }

    /// Sets names and times of the contenders.
    pub fn fill<'a>(&mut self, names: impl Iterator<Item = &'a str>, timings: &[Timing]) {
        self.entries = names.zip(timings).map(|(name, timing)| Entry::new(name, *timing)).collect();
    }

    /// The time of the faster read.
    pub fn read(&self) -> Option<f64> {
        [READ, BULK].iter().filter_map(|name| self.entry(name)).map(|entry| entry.best).reduce(f64::min)
    }

    /// The contender with a name.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

impl Record {
    /// The record of this process, which begins now.
    pub fn begin() -> Self {
        Record {
            command: command_line(),
            when: utc_now(),
            version: env!("CARGO_PKG_VERSION"),
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
