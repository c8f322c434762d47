//! Plots as SVG text, without system fonts.

use plotters::coord::Shift;
use plotters::prelude::*;

/// Width and height in pixels.
pub const SIZE: (u32, u32) = (720, 440);

/// Colours that differ in print and for colour-blind readers (the first seven: Okabe & Ito 2008).
pub const COLOURS: [RGBColor; 10] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(60, 60, 60),
    RGBColor(148, 103, 63),
    RGBColor(128, 100, 200),
    RGBColor(170, 180, 0),
];

/// The area of a picture.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// The result of a drawing function.
pub type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// The text of an SVG picture on white. If drawing fails, a paragraph with the error.
pub fn svg(size: (u32, u32), draw: impl FnOnce(&Area<'_>) -> Drawn) -> String {
    let mut text = String::new();
    let outcome = {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE).and_then(|()| draw(&area)).and_then(|()| area.present())
    };
    match outcome {
        Ok(()) => text,
        Err(error) => format!("<p>this plot could not be drawn: {error}</p>"),
    }
}

/// The range of all finite values, with a margin of 5%; `None` without finite values.
pub fn span(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let finite = values.filter(|v| v.is_finite());
    let (low, high) = finite.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    let margin = ((high - low) * 0.05).max(1e-9);
    (low <= high).then_some((low - margin, high + margin))
}
