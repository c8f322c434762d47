//! The plots of the report: empirical against expected.

use crate::plot::{Area, COLOURS, Drawn, SIZE, span, svg};
use flash_sampling_conformance::report::{Series, SeriesKind};
use plotters::prelude::*;

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
        .caption(format!("Gumbel Q-Q: {}", series.name), ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(48)
        .build_cartesian_2d(low..high, low..high)?;
    chart.configure_mesh().x_desc("quantile of the standard Gumbel").y_desc("quantile of score - log-mass").draw()?;
    chart.draw_series(LineSeries::new([(low, low), (high, high)], COLOURS[6]))?;
    chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, COLOURS[0].filled())))?;
    Ok(())
}

/// Observed over expected counts by decade of probability, with two standard deviations of a count.
fn decades(area: &Area<'_>, series: &Series) -> Drawn {
    let points: Vec<_> = series.points.iter().filter(|p| p.expected > 0.0).collect();
    let (low, high) = span(points.iter().map(|p| p.x)).unwrap_or((-1.0, 0.0));
    let x = (low.round() - 0.5, high.round() + 0.5);
    let bars: Vec<_> = points.iter().map(|p| (p.x, p.observed / p.expected, 2.0 / p.expected.sqrt())).collect();
    let reach = bars.iter().map(|(_, ratio, two)| (ratio - 1.0).abs().max(*two)).fold(0.01, f64::max).min(2.0) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .caption(format!("Drawn over expected: {}", series.name), ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(x.0..x.1, 1.0 - reach..1.0 + reach)?;
    // A label where a decade ends, none between.
    let label = |x: &f64| if (x - x.round()).abs() < 0.01 { format!("{x:.0}") } else { String::new() };
    chart
        .configure_mesh()
        .x_desc("log10 of the token's probability (upper end of the decade)")
        .y_desc("draws / expected draws")
        .x_labels(2 * (x.1 - x.0) as usize + 1)
        .x_label_formatter(&label)
        .draw()?;
    chart.draw_series(LineSeries::new([(x.0, 1.0), (x.1, 1.0)], COLOURS[6]))?;
    chart.draw_series(
        bars.iter().map(|&(x, _, two)| PathElement::new([(x, 1.0 - two), (x, 1.0 + two)], COLOURS[4].stroke_width(4))),
    )?;
    chart.draw_series(bars.iter().map(|&(x, ratio, _)| Circle::new((x, ratio), 4, COLOURS[0].filled())))?;
    Ok(())
}
