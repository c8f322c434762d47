//! The report as one self-contained HTML page.

use super::text::{self, figure, limit};
use super::{Report, Verdict, plots};
use crate::output::line;
use flash_sampling_conformance::report::{Check, Criterion};

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A check as a row of a table.
fn row(check: &Check) -> String {
    let (cases, statistic) = (check.cases, figure(check.statistic));
    let cells = match check.criterion {
        Criterion::AtMost(0.0) if check.statistic == 0.0 => format!("<td colspan=4>0 of {cases} differ"),
        Criterion::AtMost(most) => format!("<td>{cases}<td>{statistic}<td><td>{}", limit(most)),
        Criterion::PValue { p, alpha } => format!("<td>{cases}<td>{statistic}<td>{}<td>{}", figure(p), limit(alpha)),
    };
    let class = if check.passes() { "pass" } else { "fail" };
    format!("<tr class={class}><td>{}{cells}\n", escape(&check.what))
}

fn table<'c>(checks: impl IntoIterator<Item = &'c Check>) -> String {
    let rows: String = checks.into_iter().map(row).collect();
    format!("<table><tr><th>check<th>cases<th>statistic<th>p<th>limit\n{rows}</table>\n")
}

/// A law: its promise, its check that is closest to failure, its plots, and all checks.
fn law(verdict: &Verdict) -> String {
    let (class, word) = if verdict.holds { ("pass", "holds") } else { ("fail", "FAILS") };
    let checks = &verdict.report.checks;
    let notes: String = verdict.report.notes.iter().map(|note| format!("<p>{}</p>\n", escape(note))).collect();
    let reason: String =
        verdict.reason.iter().map(|reason| format!("<p class=fail>{}</p>\n", escape(reason))).collect();
    let plot = |series| {
        format!("<figure><figcaption>{}</figcaption>{}</figure>\n", escape(&plots::title(series)), plots::plot(series))
    };
    let plots: String = verdict.report.series.iter().map(plot).collect();
    format!(
        "<h3 class={class}>{}: {word}</h3>\n<p>{}</p>\n{}{notes}{reason}<div class=plots>\n{plots}</div>\n\
         <details><summary>{}</summary>{}</details>\n",
        verdict.law.name,
        escape(verdict.law.promise),
        table(text::decisive(checks)),
        line::count(checks.len(), "check"),
        table(checks)
    )
}

pub(super) fn page(report: &Report) -> String {
    let laws: String = report.verdicts.iter().map(law).collect();
    let values = [
        ("{sampler}", escape(&report.sampler)),
        ("{machine}", escape(&report.machine.to_string())),
        ("{when}", report.when.clone()),
        ("{version}", env!("CARGO_PKG_VERSION").into()),
        ("{summary}", text::summary(report)),
        ("{laws}", laws),
    ];
    values.iter().fold(include_str!("report.html").into(), |page, (name, value)| page.replace(name, value))
}
