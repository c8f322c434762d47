//! The report as one self-contained HTML page.

use crate::output::line;
use crate::output::plot::COLOURS;
use crate::verify::check::{agreement, decisive, figure, limit};
use crate::verify::{Report, Verdict, plots};
use flash_sampling_conformance::report::{Check, Criterion, Point, Series, SeriesKind};
use std::fmt::Write;

/// On a narrow screen a row of a table is a block, and each number has the name of its column.
const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222}\
h1,h3,code{overflow-wrap:anywhere}span{white-space:nowrap}table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}\
th,td{text-align:left;vertical-align:top;padding:.25rem .6rem;border-bottom:1px solid #ddd}\
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}\
.pass{color:#00704a}.fail{color:#b00020;font-weight:600}summary{cursor:pointer}code{font-size:.92em}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1rem;margin:1rem 0}\
figure{margin:0}svg{max-width:100%;height:auto}\
@media(max-width:40rem){thead{display:none}tr,td{display:block}tr{padding:.4rem 0;border-bottom:1px solid #ddd}\
td{border:0;padding:.1rem 0}td:empty{display:none}td.n{display:flex;justify-content:space-between}\
td.n::before{content:attr(data-of);color:#555}}";

/// The columns of a check.
const COLUMNS: [&str; 4] = ["cases", "statistic", "p", "limit"];

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn mark(passes: bool) -> &'static str {
    if passes { "<span class=pass>holds</span>" } else { "<span class=fail>FAILS</span>" }
}

/// The head of a table of checks.
fn head(first: &str) -> String {
    let columns: String = COLUMNS.iter().map(|column| format!("<th class=n>{column}")).collect();
    format!("<table><thead><tr>{first}{columns}<tbody>")
}

/// Cells of [`COLUMNS`]; one cell for an agreement.
fn cells(check: &Check) -> String {
    if let Some(agreement) = agreement(check) {
        return format!("<td class=n colspan={} data-of=result>{agreement}", COLUMNS.len());
    }
    let (p, limit) = match check.criterion {
        Criterion::PValue { p, alpha } => (figure(p), format!("p &ge; {alpha:e}")),
        Criterion::AtMost(most) => (String::new(), format!("&le; {}", limit(most))),
    };
    let cell = |(of, text): (&str, String)| match text.as_str() {
        "" => "<td>".into(),
        text => format!("<td class=n data-of={of}>{text}"),
    };
    let texts = [check.cases.to_string(), figure(check.statistic), p, limit];
    COLUMNS.into_iter().zip(texts).map(cell).collect()
}

fn law_row(verdict: &Verdict) -> String {
    let decisive = decisive(verdict).map_or_else(|| "<td><td><td><td>".into(), cells);
    let (name, promise) = (verdict.law.name, escape(verdict.law.promise));
    format!(
        "<tr><td>{}<td><a href=\"#{name}\"><code>{name}</code></a><br>{promise}<td class=n data-of=checks>{}{decisive}\n",
        mark(verdict.holds),
        verdict.report.checks.len()
    )
}

/// Explains the colours of a plot.
fn key(kind: SeriesKind) -> String {
    let of = |colour: usize, sign: &str| {
        let (red, green, blue) = (COLOURS[colour].0, COLOURS[colour].1, COLOURS[colour].2);
        format!("<span style=\"color:#{red:02x}{green:02x}{blue:02x}\">{sign}</span>")
    };
    let (dot, bar, line) =
        (of(plots::OBSERVED, "&#9679;"), of(plots::SPREAD, "&#9612;"), of(plots::EXPECTED, "&mdash;"));
    match kind {
        SeriesKind::ProbabilityDecades => format!(
            "{dot} draws over expected draws, for the tokens of one decade of probability; {line} their ratio under the \
             law; {bar} two standard deviations"
        ),
        SeriesKind::GumbelQuantiles => {
            format!("{dot} quantiles of the scores against quantiles of the standard Gumbel, {line} equal quantiles")
        }
    }
}

fn plots(page: &mut String, verdict: &Verdict) -> std::fmt::Result {
    for same in verdict.report.series.chunk_by(|a, b| a.kind == b.kind) {
        let title = |series: &Series| format!("{}: {}", plots::name(series.kind), escape(&series.name));
        let (points, curves): (Vec<_>, Vec<_>) = same.iter().partition(|series| series.points.len() == 1);
        for series in points {
            let Point { observed, expected, .. } = series.points[0];
            let (ratio, spread) = (observed / expected, 2.0 / expected.sqrt());
            writeln!(
                page,
                "<p>{}: {observed} draws, {} expected; ratio {ratio:.3}, two standard deviations {spread:.3}.</p>",
                title(series),
                figure(expected)
            )?;
        }
        if curves.is_empty() {
            continue;
        }
        writeln!(page, "<p>{}</p><div class=plots>", key(same[0].kind))?;
        for series in curves {
            writeln!(page, "<figure><figcaption>{}</figcaption>{}</figure>", title(series), plots::plot(series))?;
        }
        writeln!(page, "</div>")?;
    }
    Ok(())
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
    plots(page, verdict)?;
    if verdict.report.checks.is_empty() {
        return Ok(());
    }
    let open = if verdict.holds { "" } else { " open" };
    writeln!(page, "<details{open}><summary>{}</summary>", line::count(verdict.report.checks.len(), "check"))?;
    writeln!(page, "{}", head("<th><th>what"))?;
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
    let (laws, broken) = (report.verdicts.len(), report.verdicts.iter().filter(|verdict| !verdict.holds).count());
    writeln!(page, "<!doctype html><html lang=en><meta charset=utf-8><title>Exactness of {sampler}</title>")?;
    writeln!(page, "<meta name=viewport content=\"width=device-width\">")?;
    writeln!(page, "<style>{STYLE}</style><h1>Exactness of <code>{sampler}</code></h1>")?;
    writeln!(
        page,
        "<p>{}; {}; flash-sampling {}.</p>",
        escape(&report.machine.to_string()),
        report.when,
        env!("CARGO_PKG_VERSION")
    )?;
    match broken {
        0 if laws == 1 => writeln!(page, "<p class=pass>The law holds.</p>")?,
        0 => writeln!(page, "<p class=pass>All {laws} laws hold.</p>")?,
        _ if laws == 1 => writeln!(page, "<p class=fail>The law fails.</p>")?,
        n => writeln!(page, "<p class=fail>{n} of {laws} laws fail{}.</p>", if n == 1 { "s" } else { "" })?,
    }
    writeln!(
        page,
        "<p>Each row shows a law and its check that is closest to failure. A check counts cases that differ, or compares \
         a statistic or its p-value with a limit. Seeds are fixed, so the same build gives the same statistics.</p>"
    )?;
    writeln!(page, "{}", head("<th><th>law<th class=n>checks"))?;
    report.verdicts.iter().for_each(|verdict| page.push_str(&law_row(verdict)));
    writeln!(page, "</table><h2>Law by law</h2>")?;
    report.verdicts.iter().try_for_each(|verdict| law_section(page, verdict))?;
    writeln!(page, "</html>")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(statistic: f64, criterion: Criterion) -> String {
        cells(&Check { what: "x".into(), cases: 112, statistic, criterion })
    }

    #[test]
    fn agreements_are_counted_and_statistics_have_a_limit() {
        assert_eq!(check(0.0, Criterion::AtMost(0.0)), "<td class=n colspan=4 data-of=result>0 of 112 differ");
        assert_eq!(
            check(0.5, Criterion::AtMost(2e-8)),
            "<td class=n data-of=cases>112<td class=n data-of=statistic>0.5000<td><td class=n data-of=limit>&le; 2e-8"
        );
        assert!(
            check(0.5, Criterion::PValue { p: 0.25, alpha: 1e-6 })
                .ends_with(">0.2500<td class=n data-of=limit>p &ge; 1e-6")
        );
    }
}
