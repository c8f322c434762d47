//! The report as one self-contained HTML page.

use super::{Report, Verdict, plots, text};
use crate::output::line;
use std::fmt::Write;

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem}\
h1,h3{overflow-wrap:anywhere}pre{white-space:pre-wrap}.fail{color:#b00020}figure{margin:0}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1rem}\
svg{max-width:100%;height:auto}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A law: its promise, its check that is closest to failure, its plots, and all checks.
fn section(page: &mut String, verdict: &Verdict) -> std::fmt::Result {
    let class = if verdict.holds { "pass" } else { "fail" };
    writeln!(page, "<h3 class={class}>{}</h3><p>{}</p>", verdict.law.name, escape(verdict.law.promise))?;
    writeln!(page, "<pre>{}</pre><div class=plots>", escape(&text::verdict(verdict, false)))?;
    for series in &verdict.report.series {
        let title = format!("{}: {}", plots::name(series.kind), series.name);
        writeln!(page, "<figure><figcaption>{}</figcaption>{}</figure>", escape(&title), plots::plot(series))?;
    }
    let checks = line::count(verdict.report.checks.len(), "check");
    let all = escape(&text::verdict(verdict, true));
    writeln!(page, "</div><details><summary>{checks}</summary><pre>{all}</pre></details>")
}

/// The page.
pub(super) fn page(report: &Report) -> String {
    let sampler = escape(&report.sampler);
    let mut page = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Exactness of {sampler}</title>\n\
         <meta name=viewport content=\"width=device-width\"><style>{STYLE}</style><h1>Exactness of {sampler}</h1>\n\
         <p>{}; {}; flash-sampling {}.</p><p>{}.</p>\n\
         <p>Under each law stands its check that is closest to failure. A check counts cases that differ, or compares a \
         statistic or its p-value with a limit. Seeds are fixed, so the same build gives the same statistics. In a plot, \
         dots are observed values, the line has the values under the law, and bars have two standard deviations.</p>\n",
        escape(&report.machine.to_string()),
        report.when,
        env!("CARGO_PKG_VERSION"),
        text::summary(report)
    );
    // Writing to a string cannot fail.
    let _ = report.verdicts.iter().try_for_each(|verdict| section(&mut page, verdict));
    page + "</html>\n"
}
