//! The plots of the report as SVG: observed against expected values.

use flash_sampling_conformance::report::{Series, SeriesKind};
use plotters::coord::Shift;
use plotters::prelude::*;

/// Width and height in pixels; text stays readable on a phone.
const SIZE: (u32, u32) = (480, 340);
/// Font and size of the labels.
const LABELS: (&str, u32) = ("sans-serif", 14);
/// Colours that differ for colour-blind readers (Okabe & Ito 2008): of observed values, of two standard deviations, and
/// of the values under the law.
const OBSERVED: RGBColor = RGBColor(0, 114, 178);
const SPREAD: RGBColor = RGBColor(230, 159, 0);
const EXPECTED: RGBColor = RGBColor(60, 60, 60);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// The range of all finite values, with a margin of 5%; `None` without finite values.
fn span(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|v| v.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    let margin = ((high - low) * 0.05).max(1e-9);
    (low <= high).then_some((low - margin, high + margin))
}

/// The title of the plot of a series.
pub(super) fn title(series: &Series) -> String {
    let kind = match series.kind {
        SeriesKind::ProbabilityDecades => "Drawn over expected",
        SeriesKind::GumbelQuantiles => "Gumbel Q-Q",
    };
    format!("{kind}: {}", series.name)
}

/// The picture of a series; for a single decade of probabilities, a sentence. If drawing fails, a paragraph with the error.
pub(super) fn plot(series: &Series) -> String {
    if let (SeriesKind::ProbabilityDecades, [only]) = (series.kind, &series.points[..]) {
        let (observed, expected, deviation) = (only.observed, only.expected, only.expected.sqrt());
        return format!(
            "<p>{observed} draws; the law expects {expected:.1}, with standard deviation {deviation:.1}</p>"
        );
    }
    let mut text = String::new();
    let outcome = {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        let drawn = area.fill(&WHITE).and_then(|()| match series.kind {
            SeriesKind::ProbabilityDecades => decades(&area, series),
            SeriesKind::GumbelQuantiles => quantiles(&area, series),
        });
        drawn.and_then(|()| area.present())
    };
    outcome.map_or_else(|error| format!("<p>this plot could not be drawn: {error}</p>"), |()| text)
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
    chart.draw_series(LineSeries::new([(low, low), (high, high)], EXPECTED))?;
    chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, OBSERVED.filled())))?;
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
    // Only the ends of decades have labels.
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
    chart.draw_series(LineSeries::new([(x.0, 1.0), (x.1, 1.0)], EXPECTED))?;
    chart.draw_series(
        bars.iter()
            .map(|&(x, _, two)| [(x, (1.0 - two).max(y.0)), (x, (1.0 + two).min(y.1))])
            .map(|ends| PathElement::new(ends, SPREAD.stroke_width(4))),
    )?;
    chart.draw_series(bars.iter().map(|&(x, ratio, _)| Circle::new((x, ratio), 4, OBSERVED.filled())))?;
    Ok(())
}
