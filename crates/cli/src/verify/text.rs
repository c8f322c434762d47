//! The report as text.

use super::{Report, Verdict};
use crate::output::line;
use flash_sampling_conformance::report::{Check, Criterion};

/// Returns how close a check is to failure; it passes below 1.
fn tension(check: &Check) -> f64 {
    match check.criterion {
        // On a log scale: p = 1 gives 0, p = alpha gives 1.
        Criterion::PValue { p, alpha } => p.max(f64::MIN_POSITIVE).ln() / alpha.ln(),
        Criterion::AtMost(limit) if check.statistic > limit => f64::INFINITY,
        Criterion::AtMost(0.0) => 0.0,
        Criterion::AtMost(limit) => check.statistic / limit,
    }
}

/// A number with four digits.
pub(super) fn figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if (1e-3..1e6).contains(&size) => {
            format!("{value:.*}", (3 - size.log10().floor() as i32).clamp(0, 6) as usize)
        }
        _ => format!("{value:.3e}"),
    }
}

/// A limit with all its digits.
pub(super) fn limit(limit: f64) -> String {
    if limit != 0.0 && limit < 1e-3 { format!("{limit:e}") } else { limit.to_string() }
}

/// The check closest to failure.
pub(super) fn decisive(checks: &[Check]) -> Option<&Check> {
    checks.iter().max_by(|a, b| tension(a).total_cmp(&tension(b)))
}

fn described(check: &Check) -> String {
    let word = if check.passes() { "pass" } else { "FAIL" };
    let (cases, statistic) = (line::count(check.cases, "case"), figure(check.statistic));
    let result = match check.criterion {
        Criterion::AtMost(0.0) if check.statistic == 0.0 => format!("0 of {} differ", check.cases),
        Criterion::AtMost(most) => format!("{cases}, statistic {statistic}, at most {}", limit(most)),
        Criterion::PValue { p, alpha } => {
            format!("{cases}, statistic {statistic}, p {}, alpha {}", figure(p), limit(alpha))
        }
    };
    format!("{word}  {}: {result}", check.what)
}

/// The verdict with the check closest to failure, or with all checks.
fn verdict(verdict: &Verdict, all: bool) -> String {
    let word = if verdict.holds { "holds" } else { "FAILS" };
    let (checks, notes) = (&verdict.report.checks, &verdict.report.notes);
    let (count, seconds) = (line::count(checks.len(), "check"), verdict.took.as_secs_f64());
    let shown: Vec<_> = if all { checks.iter().collect() } else { decisive(checks).into_iter().collect() };
    let mut lines = vec![format!("{word}  {:<52} {count:>10} {seconds:>7.2} s", verdict.law.name)];
    lines.extend(shown.into_iter().map(|check| format!("       {}", described(check))));
    lines.extend(notes.iter().map(|note| format!("       note  {note}")));
    lines.extend(verdict.reason.iter().map(|reason| format!("       FAIL  {reason}")));
    lines.join("\n")
}

/// The number of laws that hold or fail.
pub(super) fn summary(report: &Report) -> String {
    let broken = report.verdicts.iter().filter(|verdict| !verdict.holds).count();
    let checks = report.verdicts.iter().map(|verdict| verdict.report.checks.len()).sum::<usize>();
    let (laws, checks) = (line::count(report.verdicts.len(), "law"), line::count(checks, "check"));
    if broken == 0 { format!("{laws}: all hold ({checks})") } else { format!("{laws}: {broken} FAIL ({checks})") }
}

/// The whole report, with all checks or with one for each law.
pub(super) fn report(report: &Report, all: bool) -> String {
    let verdicts: Vec<_> = report.verdicts.iter().map(|of_law| verdict(of_law, all)).collect();
    format!("{} on {}, {}\n{}\n{}\n", report.sampler, report.machine, report.when, verdicts.join("\n"), summary(report))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agreements_are_counted_and_statistics_have_four_digits_and_a_limit() {
        let check = |statistic, criterion| described(&Check { what: "x".into(), cases: 112, statistic, criterion });
        assert_eq!(check(0.0, Criterion::AtMost(0.0)), "pass  x: 0 of 112 differ");
        assert_eq!(check(0.5, Criterion::AtMost(2e-8)), "FAIL  x: 112 cases, statistic 0.5000, at most 2e-8");
        let of_p = check(1039.2, Criterion::PValue { p: 0.25, alpha: 1e-6 });
        assert_eq!(of_p, "pass  x: 112 cases, statistic 1039, p 0.2500, alpha 1e-6");
        let shown = [0.0, 0.001_56, 1.905_473, 123_456.7, 1.2e-9, 4e7].map(figure);
        assert_eq!(shown, ["0", "0.001560", "1.905", "123457", "1.200e-9", "4.000e7"]);
    }
}
