//! `flash-sampling verify`: an exactness report of one sampler on this machine, by the laws of the conformance suite.

mod factory;
mod html;
mod plots;
mod text;

pub use factory::FlagsFactory;

use crate::args::VerifyArgs;
use crate::error::CommandError;
use crate::info::machine::{Machine, utc_now};
use crate::interrupt::Interrupt;
use crate::output::{self, bar};
use flash_sampling_conformance::{Effort, Law, LawFailure, LawReport, SamplerFactory, Trial, laws};
use std::cell::Cell;
use std::io::Write;
use std::time::{Duration, Instant};

/// The outcome of one law.
#[derive(Debug)]
pub struct Verdict {
    /// The law.
    pub law: &'static Law,
    /// Its report, complete or up to the failure.
    pub report: LawReport,
    /// Why the law failed without a failed check.
    pub reason: Option<String>,
    /// Whether the law holds.
    pub holds: bool,
    /// How long it took.
    pub took: Duration,
}

/// The outcomes of all selected laws.
#[derive(Debug)]
pub struct Report {
    /// The sampler with its instruction set, such as `cpu/grouped:512/avx2`.
    pub sampler: String,
    /// The machine.
    pub machine: Machine,
    /// The time of the report.
    pub when: String,
    /// The verdicts, in the order of the laws.
    pub verdicts: Vec<Verdict>,
}

impl Report {
    /// Whether every law holds.
    pub fn holds(&self) -> bool {
        self.verdicts.iter().all(|verdict| verdict.holds)
    }

    /// Runs laws on a sampler.
    pub fn make(
        factory: &dyn SamplerFactory,
        laws: &[&'static Law],
        effort: Effort,
        interrupt: &Interrupt,
    ) -> Result<Self, CommandError> {
        const STEPS: f64 = 1000.0;
        let bar = bar("laws", laws.len() as u64 * STEPS as u64);
        let mut verdicts = Vec::new();
        let depends = Cell::new(false);
        for (done, law) in (0u64..).zip(laws) {
            interrupt.check()?;
            bar.set_message(law.name);
            let show = |part: f64| bar.set_position(done * STEPS as u64 + (part * STEPS) as u64);
            let start = Instant::now();
            let outcome =
                law.check(&Trial { effort, progress: &show, depends_on_effort: Some(&depends), ..Trial::new(factory) });
            let (report, reason, holds) = match outcome {
                Ok(report) => (report, None, true),
                Err(LawFailure { reason, report }) => (*report, reason, false),
            };
            verdicts.push(Verdict { law, report, reason, holds, took: start.elapsed() });
        }
        bar.finish_and_clear();
        if effort == Effort::Full && !depends.get() {
            tracing::warn!("--effort full has no effect on these laws");
        }
        Ok(Report { sampler: factory.name(), machine: Machine::this(), when: utc_now(), verdicts })
    }
}

/// Runs the laws, prints the report, and writes the page of `--report`. The exit code is 1 if a law fails.
///
/// # Errors
/// Bad flags, a sampler that this machine lacks, a page that cannot be written, Ctrl-C.
pub fn run(args: &VerifyArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let factory = FlagsFactory::new(args.sampler.clone())?;
    args.report.iter().try_for_each(|path| output::try_path(path))?;
    let laws = if args.laws.is_empty() { laws::ALL.iter().collect() } else { args.laws.clone() };
    let report = Report::make(&factory, &laws, args.effort, interrupt)?;
    write!(out, "{}", text::report(&report, args.checks)).map_err(CommandError::write("to standard output"))?;
    if let Some(path) = &args.report {
        std::fs::write(path, html::page(&report)).map_err(CommandError::write(path.display().to_string()))?;
        tracing::info!("the report is in {}", path.display());
    }
    Ok(u8::from(!report.holds()))
}
