//! The benchmark as a picture, a strip for each head: share of the read bandwidth by rows, and beside it the time over
//! the time without noise, or over cuBLAS's matmul alone where a GPU was timed.

use crate::bench::record::{Record, Section};
use crate::bench::table::{BULK, CUBLAS, GREEDY, PRODUCTS, READ};
use crate::plot::{Area, COLOURS, Drawn, SIZE, svg};
use plotters::prelude::*;
use std::ops::Range;

/// A line: a contender's points by rows.
struct Line<'a> {
    name: &'a str,
    colour: RGBColor,
    points: Vec<(f64, f64)>,
}

/// The lines of a figure, where a section has it; contenders in the order of their first section.
fn lines<'a>(sections: &[&'a Section], figure: impl Fn(&Section, f64) -> Option<f64>) -> Vec<Line<'a>> {
    let mut lines: Vec<Line<'a>> = Vec::new();
    for section in sections {
        for entry in section.entries.iter().chain(&section.peers) {
            let Some(y) = figure(section, entry.best) else { continue };
            let point = ((section.rows as f64).log2(), y);
            match lines.iter_mut().find(|line| line.name == entry.name) {
                Some(line) => line.points.push(point),
                None => {
                    let colour = COLOURS[lines.len() % COLOURS.len()];
                    lines.push(Line { name: &entry.name, colour, points: vec![point] });
                }
            }
        }
    }
    lines
}

fn panel(area: &Area<'_>, title: &str, lines: &[Line<'_>], y: Range<f64>, legend: SeriesLabelPosition) -> Drawn {
    let rows = lines.iter().flat_map(|line| line.points.iter().map(|p| p.0));
    let last = rows.fold(0.0, f64::max).max(1.0);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(44)
        .build_cartesian_2d(0.0..last, y)?;
    chart
        .configure_mesh()
        .x_desc("rows")
        .x_labels(last as usize + 1)
        .x_label_formatter(&|x| format!("{:.0}", x.exp2()))
        .draw()?;
    for &Line { name, colour, ref points } in lines {
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    chart.configure_series_labels().position(legend).background_style(WHITE.mix(0.8)).border_style(COLOURS[6]).draw()
}

/// The picture of all sections with a matmul.
pub fn picture(record: &Record) -> String {
    let sections: Vec<_> = record.sections.iter().filter(|section| section.hidden.is_some()).collect();
    let heads: Vec<_> = sections.chunk_by(|a, b| (a.vocab, a.hidden) == (b.vocab, b.hidden)).collect();
    let (rival, over) = match &record.gpu {
        Some(_) => (CUBLAS, "time over cuBLAS's matmul alone"),
        None => (GREEDY, "time over the same kernel without noise"),
    };
    let strips = heads.len().max(1);
    svg((SIZE.0 * 2, SIZE.1 * strips as u32), |area| {
        let areas = area.split_evenly((strips, 1));
        areas.iter().zip(&heads).try_for_each(|(area, head)| {
            let size = match (strips, head.first()) {
                (2.., Some(section)) => format!("{} x {}: ", section.vocab, section.hidden.unwrap_or_default()),
                _ => String::new(),
            };
            strip(area, &size, head, rival, over)
        })
    })
}

/// Both panels of a head.
fn strip(area: &Area<'_>, size: &str, sections: &[&Section], rival: &str, over: &str) -> Drawn {
    let mut of_read = lines(sections, |section, best| section.read().map(|read| read / best));
    of_read.retain(|line| line.name != BULK);
    let shares = of_read.iter().filter(|line| line.name != PRODUCTS).flat_map(|line| &line.points);
    let largest = 1.05 * shares.map(|p| p.1).fold(1.05, f64::max);
    // The arithmetic limit, where it is anywhere near.
    of_read.iter_mut().for_each(|line| line.points.retain(|p| p.1 <= largest));
    let over_rival: Vec<_> = lines(sections, |section, best| section.entry(rival).map(|rival| best / rival.best))
        .into_iter()
        .filter(|line| ![READ, BULK, PRODUCTS, rival].contains(&line.name))
        .collect();
    let points = || over_rival.iter().flat_map(|line| &line.points).map(|p| p.1);
    let highest = points().fold(1.2, f64::max).min(6.0);
    let lowest = points().fold(0.8, f64::min);
    let (left, right) = area.split_horizontally(SIZE.0);
    let title = format!("{size}share of the read bandwidth");
    panel(&left, &title, &of_read, 0.0..largest, SeriesLabelPosition::MiddleRight)?;
    let title = format!("{size}{over}");
    panel(&right, &title, &over_rival, lowest..highest * 1.05, SeriesLabelPosition::UpperLeft)
}
