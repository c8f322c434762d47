//! The law of the draw: tokens follow the softmax.

use crate::logits::{LogitShape, softmax};
use crate::problem::Problem;
use crate::report::{Broken, LawReport, Point, Series, SeriesKind};
use crate::statistics::{Bins, binomial};
use crate::trial::Trial;

/// The number of probability decades; the last has all probabilities below 1e-11.
const DECADES: usize = 12;

fn decade(p: f64) -> usize {
    ((-p.log10()).max(0.0) as usize).min(DECADES - 1)
}

/// Compares draws with their law, in bins that expose the typical errors of a kernel.
fn compare(name: &str, law: &[f64], draws: &[usize], report: &mut LawReport) {
    let (vocab, n) = (law.len(), draws.len());
    let mut chi_square = |what: &str, bins: Bins| {
        report.p_value(format!("{name}: {what}, chi-square"), n, bins.chi_square());
    };
    let coarse = vocab.min(64);
    chi_square("index bins", Bins::of(law, draws, coarse, |i| i * coarse / vocab));
    if vocab > 128 {
        chi_square("lanes of 128", Bins::of(law, draws, 128, |i| i % 128));
        chi_square("tiles of 128", Bins::of(law, draws, vocab.div_ceil(128), |i| i / 128));
    }
    let decades = Bins::of(law, draws, DECADES, |i| decade(law[i]));
    chi_square("probability decades", decades.clone());
    // The pooled tail has a binomial test, because it may be too rare for a bin of the chi-square.
    for limit in [1e-3, 1e-4, 1e-5] {
        let p: f64 = law.iter().filter(|&&p| p < limit).sum();
        let hits = draws.iter().filter(|&&i| law[i] < limit).count();
        if p == 0.0 && hits == 0 {
            continue;
        }
        let outcome = binomial(hits as u64, n as u64, p);
        report.p_value(format!("{name}: tokens below {limit:e} pooled, binomial"), n, outcome);
    }
    let points = (0..DECADES).rev().filter(|&d| decades.expected[d] > 0.0).map(|d| Point {
        x: -(d as f64),
        expected: decades.expected[d],
        observed: decades.observed[d],
    });
    report.series.push(Series {
        name: name.to_owned(),
        kind: SeriesKind::ProbabilityDecades,
        points: points.collect(),
    });
}

fn run(
    trial: &Trial<'_>,
    report: &mut LawReport,
    cases: &[(LogitShape, usize, usize)],
    rows: usize,
) -> Result<(), Broken> {
    for (i, &(shape, vocab, draws)) in cases.iter().enumerate() {
        let problem = Problem::of_logits(&shape.logits(vocab, 100 + i as u64), rows);
        let law = softmax(&problem.raw_logits(0));
        let part = Trial { progress: &|p| (trial.progress)((i as f64 + p) / cases.len() as f64), ..*trial };
        let draws = part.collect(&problem, trial.draws(draws), 0x50f7 << 8 | i as u64)?;
        let tokens: Vec<usize> = draws.iter().map(|d| d.token as usize).collect();
        compare(&format!("{shape:?}, {vocab} tokens"), &law, &tokens, report);
    }
    Ok(())
}

pub(super) fn tokens_follow_the_softmax(trial: &Trial<'_>, report: &mut LawReport) -> Result<(), Broken> {
    let mut cases = vec![(LogitShape::Gaussian, 2, 20_000), (LogitShape::TailHeavy, 7, 20_000)];
    cases.extend(LogitShape::ALL.map(|shape| (shape, 1003, 12_000)));
    run(trial, report, &cases, 48)
}

pub(super) fn tokens_follow_the_softmax_over_large_vocabularies(
    trial: &Trial<'_>,
    report: &mut LawReport,
) -> Result<(), Broken> {
    let pace = trial.factory.pace();
    let cases = [
        (LogitShape::LlmLike, 151_936, 64 * pace),
        (LogitShape::TailHeavy, 128_256, 64 * pace),
        (LogitShape::Flat, 262_143, 32 * pace),
        (LogitShape::LlmLike, 32_003, 256 * pace),
    ];
    run(trial, report, &cases, 16)
}
