//! The report as one page without references to anything outside of it.

use crate::verify::text::decisive;
use crate::verify::{Report, Verdict, plots};
use flash_sampling_conformance::report::{Check, Criterion};
use std::fmt::Write;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222}\
table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}th,td{text-align:left;vertical-align:top;\
padding:.25rem .6rem;border-bottom:1px solid #ddd}td.n{text-align:right;font-variant-numeric:tabular-nums}\
.pass{color:#00704a}.fail{color:#b00020;font-weight:600}summary{cursor:pointer}figure{display:inline-block;margin:.5rem}\
svg{max-width:100%;height:auto}code{font-size:.92em}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn mark(passes: bool) -> &'static str {
    if passes { "<span class=pass>holds</span>" } else { "<span class=fail>FAILS</span>" }
}

/// Cells for cases, statistic, the value judged and its limit.
fn cells(check: &Check) -> String {
    let judged = match check.criterion {
        Criterion::PValue { p, alpha } => format!("<td class=n>p = {p:.3e}<td class=n>&ge; &alpha; = {alpha:.0e}"),
        Criterion::AtMost(limit) => format!("<td class=n>{:.6}<td class=n>&le; {limit:.6}", check.statistic),
    };
    format!("<td class=n>{}<td class=n>{:.6}{judged}", check.cases, check.statistic)
}

const HEAD: &str = "<th>cases<th>statistic<th>judged<th>limit";

fn law_row(verdict: &Verdict) -> String {
    let decisive = decisive(verdict).map_or_else(|| "<td><td><td><td>".into(), cells);
    let (name, promise) = (verdict.law.name, escape(verdict.law.promise));
    format!(
        "<tr><td>{}<td><a href=\"#{name}\"><code>{name}</code></a><br>{promise}<td class=n>{}{decisive}\n",
        mark(verdict.holds),
        verdict.report.checks.len()
    )
}

fn law_section(page: &mut String, verdict: &Verdict) -> std::fmt::Result {
    let name = verdict.law.name;
    writeln!(page, "<h3 id=\"{name}\">{} <code>{name}</code></h3>", mark(verdict.holds))?;
    writeln!(page, "<p>{} It took {:.2} s.</p>", escape(verdict.law.promise), verdict.took.as_secs_f64())?;
    if let Some(reason) = &verdict.reason {
        writeln!(page, "<p class=fail>{}</p>", escape(reason))?;
    }
    for note in &verdict.report.notes {
        writeln!(page, "<p>Note: {}</p>", escape(note))?;
    }
    for series in &verdict.report.series {
        writeln!(page, "<figure>{}</figure>", plots::plot(series))?;
    }
    if verdict.report.checks.is_empty() {
        return Ok(());
    }
    let open = if verdict.holds { "" } else { " open" };
    writeln!(page, "<details{open}><summary>{} checks</summary>", verdict.report.checks.len())?;
    writeln!(page, "<table><tr><th><th>what{HEAD}")?;
    for check in &verdict.report.checks {
        writeln!(page, "<tr><td>{}<td>{}{}", mark(check.passes()), escape(&check.what), cells(check))?;
    }
    writeln!(page, "</table></details>")
}

/// The page.
pub(super) fn page(report: &Report) -> String {
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = write_page(&mut page, report);
    page
}

fn write_page(page: &mut String, report: &Report) -> std::fmt::Result {
    let sampler = escape(&report.sampler);
    let broken = report.verdicts.iter().filter(|verdict| !verdict.holds).count();
    writeln!(page, "<!doctype html><html lang=en><meta charset=utf-8><title>Exactness of {sampler}</title>")?;
    writeln!(page, "<style>{STYLE}</style><h1>Exactness of <code>{sampler}</code></h1>")?;
    writeln!(
        page,
        "<p>{}; {}; flash-sampling {}.</p>",
        escape(&report.machine.to_string()),
        report.when,
        env!("CARGO_PKG_VERSION")
    )?;
    match broken {
        0 if report.verdicts.len() == 1 => writeln!(page, "<p class=pass>The law holds.</p>")?,
        0 => writeln!(page, "<p class=pass>All {} laws hold.</p>", report.verdicts.len())?,
        n => writeln!(page, "<p class=fail>{n} of {} laws fail.</p>", report.verdicts.len())?,
    }
    writeln!(
        page,
        "<p>Each law stands with the check that came closest to failing. Seeds are fixed: the same build gives the same statistics.</p>"
    )?;
    writeln!(page, "<table><tr><th><th>law<th>checks{HEAD}")?;
    report.verdicts.iter().for_each(|verdict| page.push_str(&law_row(verdict)));
    writeln!(page, "</table><h2>Law by law</h2>")?;
    report.verdicts.iter().try_for_each(|verdict| law_section(page, verdict))?;
    writeln!(page, "</html>")
}
