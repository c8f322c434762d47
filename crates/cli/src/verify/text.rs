//! The report for the terminal.

use crate::output::line;
use crate::verify::{Report, Verdict};
use flash_sampling_conformance::report::{Check, Criterion};
use std::io::{self, Write};

/// How close a check is to failing: below 1 it passes.
fn tension(check: &Check) -> f64 {
    match check.criterion {
        // On a log scale: p = 1 gives 0, p = alpha gives 1.
        Criterion::PValue { p, alpha } => p.max(f64::MIN_POSITIVE).ln() / alpha.ln(),
        Criterion::AtMost(limit) if check.statistic <= limit => {
            if limit > 0.0 {
                check.statistic / limit
            } else {
                0.0
            }
        }
        Criterion::AtMost(_) => f64::INFINITY,
    }
}

/// Whether a check counts things that differ, of which there are none.
pub(super) fn is_agreed(check: &Check) -> bool {
    check.criterion == Criterion::AtMost(0.0) && check.statistic == 0.0
}

/// A check on one line.
fn described(check: &Check) -> String {
    match is_agreed(check) {
        true => format!("pass  {}: 0 of {} differ", check.what, check.cases),
        false => check.to_string(),
    }
}

/// The check of a law that came closest to failing, or failed.
pub(super) fn decisive(verdict: &Verdict) -> Option<&Check> {
    verdict.report.checks.iter().max_by(|a, b| tension(a).total_cmp(&tension(b)))
}

fn write_verdict(out: &mut dyn Write, verdict: &Verdict, all: bool) -> io::Result<()> {
    let word = if verdict.holds { "holds" } else { "FAILS" };
    let checks = &verdict.report.checks;
    let seconds = verdict.took.as_secs_f64();
    writeln!(out, "{word}  {:<52} {:>10} {seconds:>7.2} s", verdict.law.name, line::count(checks.len(), "check"))?;
    if all {
        checks.iter().try_for_each(|check| writeln!(out, "       {}", described(check)))?;
    } else if let Some(check) = decisive(verdict) {
        writeln!(out, "       {}", described(check))?;
    }
    for note in &verdict.report.notes {
        writeln!(out, "       note  {note}")?;
    }
    match &verdict.reason {
        Some(reason) => writeln!(out, "       FAIL  {reason}"),
        None => Ok(()),
    }
}

/// Writes the report: for each law its verdict and the check that came closest to failing, or all checks.
pub(super) fn write(out: &mut dyn Write, report: &Report, all: bool) -> io::Result<()> {
    writeln!(out, "{} on {}, {}", report.sampler, report.machine, report.when)?;
    for verdict in &report.verdicts {
        write_verdict(out, verdict, all)?;
    }
    let broken = report.verdicts.iter().filter(|verdict| !verdict.holds).count();
    let checks = line::count(report.verdicts.iter().map(|verdict| verdict.report.checks.len()).sum::<usize>(), "check");
    let laws = report.verdicts.len();
    match broken {
        0 if laws == 1 => writeln!(out, "the law holds ({checks})"),
        0 => writeln!(out, "all {laws} laws hold ({checks})"),
        _ if laws == 1 => writeln!(out, "the law FAILS ({checks})"),
        n => writeln!(out, "{n} of {laws} laws FAIL{} ({checks})", if n == 1 { "S" } else { "" }),
    }
}
