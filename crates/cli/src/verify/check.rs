//! Checks as text: figures, limits, and the check closest to failure.

use super::Verdict;
use flash_sampling_conformance::report::{Check, Criterion};

/// How close a check is to failure: below 1 it passes.
fn tension(check: &Check) -> f64 {
    match check.criterion {
        // On a log scale: p = 1 gives 0, p = alpha gives 1.
        Criterion::PValue { p, alpha } => p.max(f64::MIN_POSITIVE).ln() / alpha.ln(),
        Criterion::AtMost(limit) if check.statistic > limit => f64::INFINITY,
        Criterion::AtMost(0.0) => 0.0,
        Criterion::AtMost(limit) => check.statistic / limit,
    }
}

/// The check of a law that is closest to failure.
pub(super) fn decisive(verdict: &Verdict) -> Option<&Check> {
    verdict.report.checks.iter().max_by(|a, b| tension(a).total_cmp(&tension(b)))
}

/// "0 of 112 differ" for a check that compares things for equality and finds no difference.
pub(super) fn agreement(check: &Check) -> Option<String> {
    let agrees = check.criterion == Criterion::AtMost(0.0) && check.statistic == 0.0;
    agrees.then(|| format!("0 of {} differ", check.cases))
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

/// A limit without superfluous digits.
pub(super) fn limit(value: f64) -> String {
    if value != 0.0 && value < 1e-3 { format!("{value:e}") } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_four_digits() {
        let shown = [0.0, 0.001_56, 1.905_473, 1039.2, 123_456.7, 1.2e-9, 4e7].map(figure);
        assert_eq!(shown, ["0", "0.001560", "1.905", "1039", "123457", "1.200e-9", "4.000e7"]);
        assert_eq!([0.0, 2e-8, 0.5, 1.0].map(limit), ["0", "2e-8", "0.5", "1"]);
    }
}
