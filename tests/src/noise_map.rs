//! The law of a map from random words to Gumbels, driven without a sampler, so that tokens of probability 1e-6 to 1e-12
//! can be judged in seconds.
//!
//! Three checks:
//! * **Shape.** A million Gumbels of real noise words pass Kolmogorov-Smirnov.
//! * **Hits.** Of a vocabulary of one heavy token and many rare ones, the rare ones win as often as they should; every
//!   word of every token is real noise, two billion words in all. A token whose word cannot win is passed over by a bound.
//! * **Measure.** The probability that a rare token beats the heavy one, as a sum over the map itself: for quantiles of
//!   the heavy token's word, bisection counts the (word, refinement) pairs of the rare token that win. It has no
//!   sampling error, and so reaches any probability.

use crate::report::{Broken, LawFailure, LawReport};
use crate::statistics::{binomial, gumbel_cdf, kolmogorov_smirnov};
use crate::trial::Effort;
use flash_sampling_core::noise::uniform::{self, TAIL_WORDS};
use flash_sampling_core::{Domain, Noise};

/// Quantiles of the heavy token's word.
const QUANTILES: u64 = 20_000;

/// A monotone map from a word, and its refinement where the map asks for one, to a standard Gumbel.
pub trait NoiseMap: Sync {
    /// Its name.
    fn name(&self) -> String;

    /// The Gumbel of a word.
    fn gumbel(&self, word: u32, refinement: u32) -> f32;

    /// Whether larger words give larger Gumbels.
    fn rises(&self) -> bool;
}

/// Version 1 of the project's noise.
#[derive(Clone, Copy, Debug)]
pub struct Version1;

impl NoiseMap for Version1 {
    fn name(&self) -> String {
        "noise version 1".into()
    }

    fn gumbel(&self, word: u32, refinement: u32) -> f32 {
        uniform::gumbel(word, || refinement)
    }

    fn rises(&self) -> bool {
        false
    }
}

/// The map as a function of 64 bits along which the Gumbel does not fall.
fn along(map: &dyn NoiseMap, bits: u64) -> f32 {
    let bits = if map.rises() { bits } else { !bits };
    map.gumbel((bits >> 32) as u32, bits as u32)
}

/// The part of all (word, refinement) pairs whose Gumbel is above `t`.
fn measure_above(map: &dyn NoiseMap, t: f64) -> f64 {
    let (mut low, mut high) = (0u64, u64::MAX);
    if f64::from(along(map, high)) <= t {
        return 0.0;
    }
    // The least bits with a Gumbel above t.
    while low < high {
        let middle = low + (high - low) / 2;
        if f64::from(along(map, middle)) > t { high = middle } else { low = middle + 1 }
    }
    (u64::MAX - low) as f64 / 2f64.powi(64) + 2f64.powi(-64)
}

/// P(a token that is `ratio` times less likely beats the heavy one), by `n` quantiles of the heavy token's word.
fn rare_win_probability(map: &dyn NoiseMap, ratio: f64, n: u64) -> f64 {
    let step = u64::MAX / n;
    let wins = (0..n).map(|i| measure_above(map, f64::from(along(map, i * step + step / 2)) + ratio.ln()));
    wins.sum::<f64>() / n as f64
}

/// The largest relative bias of a token's probability, at any probability, that the law lets pass.
pub const BIAS_LIMIT: f64 = 1e-3;

/// The relative bias of P(token) for a token of probability `p / (1 + p)` beside one heavy token, by measure.
pub fn bias(map: &dyn NoiseMap, p: f64) -> f64 {
    rare_win_probability(map, 1.0 / p, QUANTILES) / (p / (1.0 + p)) - 1.0
}

/// How often any of `rare` tokens wins over the heavy token 0 in `draws` draws of real noise.
fn hits(map: &dyn NoiseMap, ratio: f64, rare: u32, draws: u32, progress: &dyn Fn(f64)) -> Result<u64, Broken> {
    let noise = Noise::new(0x7a11_0ff5, 11).ok_or(Broken("the position is valid".into()))?;
    let gap = ratio.ln() as f32;
    let mut hits = 0;
    for draw in 0..draws {
        let gumbel = |index: u32, word: u32| {
            let refined = !(TAIL_WORDS..=!TAIL_WORDS).contains(&word);
            map.gumbel(word, if refined { noise.refinement(Domain::Token, draw, index) } else { 0 })
        };
        let heavy = gumbel(0, noise.word(Domain::Token, draw, 0)) + gap;
        // Monotone: words on the wrong side of the last word that could win need no logarithm.
        let able = (measure_above(map, f64::from(heavy)) * 2f64.powi(32)) as u64 + 2;
        let able = able.min(u64::from(u32::MAX)) as u32;
        let cannot = |word: u32| if map.rises() { word < u32::MAX - able } else { word > able };
        let won = (1..=rare / 4).any(|block| {
            let words = noise.words(Domain::Token, draw, block);
            (4 * block..).zip(words).any(|(index, word)| !cannot(word) && gumbel(index, word) > heavy)
        });
        hits += u64::from(won);
        if draw % 64 == 0 {
            progress(f64::from(draw) / f64::from(draws));
        }
    }
    Ok(hits)
}

/// The law: Gumbels of this map let every token win with its probability.
///
/// # Errors
/// The report of the broken law.
pub fn check(map: &dyn NoiseMap, effort: Effort, progress: &dyn Fn(f64)) -> Result<LawReport, LawFailure> {
    let mut report = LawReport { law: "noise_reaches_into_the_tail", sampler: map.name(), ..LawReport::default() };
    let outcome = run(map, effort, progress, &mut report);
    report.verdict(outcome)
}

fn run(map: &dyn NoiseMap, effort: Effort, progress: &dyn Fn(f64), report: &mut LawReport) -> Result<(), Broken> {
    let more = if effort == Effort::Full { 8 } else { 1 };
    let noise = Noise::new(0x005b_a9e5, 7).ok_or(Broken("the position is valid".into()))?;
    let mut uniform: Vec<f64> = (0..250_000 * more)
        .flat_map(|block| noise.words(Domain::Token, 3, block))
        .map(|word| gumbel_cdf(f64::from(map.gumbel(word, 0x8000_0000))))
        .collect();
    let outcome = kolmogorov_smirnov(&mut uniform);
    report.p_value("Gumbels of noise words, Kolmogorov-Smirnov", uniform.len(), outcome.statistic, outcome.p);

    for p in [1e-3, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12] {
        let what = format!("relative bias of P(token) at {p:e}, by measure");
        report.at_most(what, QUANTILES as usize, bias(map, p).abs(), BIAS_LIMIT);
    }

    for (i, (p, rare, draws)) in [(1e-6, 1u32 << 17, 4000), (1e-7, 1 << 19, 3000)].into_iter().enumerate() {
        let draws = draws * more;
        let hits = hits(map, 1.0 / p, rare, draws, &|part| progress((i as f64 + part) / 2.0))?;
        let mass = p * f64::from(rare);
        let outcome = binomial(hits, u64::from(draws), mass / (1.0 + mass));
        let what = format!("{rare} tokens of {p:e} pooled, binomial");
        report.p_value(what, draws as usize, outcome.statistic, outcome.p);
    }
    Ok(())
}
