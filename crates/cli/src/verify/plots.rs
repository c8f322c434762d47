//! The plots of the report: observed against expected values.

use crate::output::plot::{Area, COLOURS, Drawn, span, svg};
use flash_sampling_conformance::report::{Series, SeriesKind};
use plotters::prelude::*;

/// Width and height in pixels; text stays readable on a phone.
const SIZE: (u32, u32) = (480, 340);
/// Font and size of the labels.
const LABELS: (&str, u32) = ("sans-serif", 14);
/// Index in [`COLOURS`] of observed values.
pub(super) const OBSERVED: usize = 0;
/// Index of two standard deviations.
pub(super) const SPREAD: usize = 4;
/// Index of the values under the law.
pub(super) const EXPECTED: usize = 6;

/// The title of plots of a kind.
pub(super) fn name(kind: SeriesKind) -> &'static str {
    match kind {
        SeriesKind::ProbabilityDecades => "Drawn over expected",
        SeriesKind::GumbelQuantiles => "Gumbel Q-Q",
    }
}

/// The picture of a series.
pub(super) fn plot(series: &Series) -> String {
    svg(SIZE, |area| match series.kind {
        SeriesKind::ProbabilityDecades => decades(area, series),
        SeriesKind::GumbelQuantiles => quantiles(area, series),
    })
}

/// The Gumbel Q-Q plot: observed quantiles over expected ones, and the diagonal.
fn quantiles(area: &Area<'_>, series: &Series) -> Drawn {
    let points: Vec<_> = series.points.iter().map(|p| (p.expected, p.observed)).collect();
    let (low, high) = span(points.iter().flat_map(|(x, y)| [*x, *y])).unwrap_or((0.0, 1.0));
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(48)
        .build_cartesian_2d(low..high, low..high)?;
    chart
        .configure_mesh()
        .label_style(LABELS)
        .light_line_style(TRANSPARENT)
        .x_desc("quantile of the standard Gumbel")
        .y_desc("quantile of score - log-mass")
        .draw()?;
    chart.draw_series(LineSeries::new([(low, low), (high, high)], COLOURS[EXPECTED]))?;
    chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, COLOURS[OBSERVED].filled())))?;
    Ok(())
}

/// Observed over expected counts by decade of probability, with two standard deviations of a count.
fn decades(area: &Area<'_>, series: &Series) -> Drawn {
    let points: Vec<_> = series.points.iter().filter(|p| p.expected > 0.0).collect();
    let (low, high) = span(points.iter().map(|p| p.x)).unwrap_or((-1.0, 0.0));
    let x = (low.round() - 0.5, high.round() + 0.5);
    let bars: Vec<_> = points.iter().map(|p| (p.x, p.observed / p.expected, 2.0 / p.expected.sqrt())).collect();
    let reach = 1.1 * bars.iter().map(|(_, ratio, two)| (ratio - 1.0).abs().max(two.min(2.0))).fold(0.01, f64::max);
    let y = ((1.0 - reach).max(0.0), 1.0 + reach);
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(x.0..x.1, y.0..y.1)?;
    // Labels only at ends of decades.
    let label = |x: &f64| if (x - x.round()).abs() < 0.01 { format!("{x:.0}") } else { String::new() };
    chart
        .configure_mesh()
        .label_style(LABELS)
        .light_line_style(TRANSPARENT)
        .x_desc("log10 of the token's probability (upper end of the decade)")
        .y_desc("draws / expected draws")
        .x_labels(2 * (x.1 - x.0) as usize + 1)
        .x_label_formatter(&label)
        .draw()?;
    chart.draw_series(LineSeries::new([(x.0, 1.0), (x.1, 1.0)], COLOURS[EXPECTED]))?;
    chart.draw_series(
        bars.iter()
            .map(|&(x, _, two)| [(x, (1.0 - two).max(y.0)), (x, (1.0 + two).min(y.1))])
            .map(|ends| PathElement::new(ends, COLOURS[SPREAD].stroke_width(4))),
    )?;
    chart.draw_series(bars.iter().map(|&(x, ratio, _)| Circle::new((x, ratio), 4, COLOURS[OBSERVED].filled())))?;
    Ok(())
}
