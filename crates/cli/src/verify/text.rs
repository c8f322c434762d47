//! The report as text.

use crate::output::line;
use crate::verify::check::{self, decisive};
use crate::verify::{Report, Verdict};
use flash_sampling_conformance::report::{Check, Criterion};
use std::io::{self, Write};

/// A check on one line.
fn described(check: &Check) -> String {
    let word = if check.passes() { "pass" } else { "FAIL" };
    if let Some(agreement) = check::agreement(check) {
        return format!("{word}  {}: {agreement}", check.what);
    }
    let (cases, statistic) = (line::count(check.cases, "case"), check::figure(check.statistic));
    let limit = match check.criterion {
        Criterion::PValue { p, alpha } => format!("p {}, alpha {alpha:e}", check::figure(p)),
        Criterion::AtMost(limit) => format!("at most {}", check::limit(limit)),
    };
    format!("{word}  {}: {cases}, statistic {statistic}, {limit}", check.what)
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

/// Writes the report: for each law its verdict and the check closest to failure, or all checks.
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
