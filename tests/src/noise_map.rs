//! The law of a map from random words to the exponentials of tokens, tested without a sampler.
//!
//! So tokens of probability 1e-6 to 1e-12 are tested in seconds. [`check`] makes three checks, and
//! [`granules`](crate::granules) tests the joint law of the tokens of one granule.
//! * **Shape.** The Gumbels of a million tokens pass Kolmogorov-Smirnov.
//! * **Measure.** The probability of a token against all others is `mean e^(-rE)` over all words. The mean is computed
//!   without sampling error, so it covers any probability.
//! * **Hits.** In a vocabulary of one heavy token and many rare tokens, the number of rare winners is binomial. The
//!   check uses real noise of ten billion tokens, and a bound skips tokens that cannot win.

use crate::report::{Broken, LawFailure, LawReport};
use crate::statistics::{Outcome, binomial, kolmogorov_smirnov};
use crate::trial::Effort;
use flash_sampling_core::noise::granule::{self, Granule, TOKENS, minimum_bits};
use flash_sampling_core::noise::uniform::{self, TAIL_WORDS, u01_open_coarse};
use flash_sampling_core::{Domain, Noise};

/// A map from random words to exponentials.
pub trait NoiseMap: Sync {
    /// Returns the name of the map.
    fn name(&self) -> String;

    /// Returns the exponential of a token.
    fn exponential(&self, noise: &Noise, draw: u32, token: u32) -> f32;

    /// Returns whether any token in `64 block .. 64 block + 64` has an exponential below `limit`.
    fn any_below(&self, noise: &Noise, draw: u32, block: u32, limit: f32) -> bool {
        (64 * block..64 * block + 64).any(|token| self.exponential(noise, draw, token) < limit)
    }

    /// Measures the parts of the probability `1 / (1 + r)` of a token.
    fn measure(&self, r: f64) -> Vec<Part>;
}

/// A part of a token's probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// The name of the part.
    pub what: &'static str,
    /// The value of the map.
    pub measured: f64,
    /// The value of the law.
    pub due: f64,
}

/// The noise of tokens, version 2.
#[derive(Clone, Copy, Debug)]
pub struct Version2;

impl NoiseMap for Version2 {
    fn name(&self) -> String {
        "noise version 2".into()
    }

    fn exponential(&self, noise: &Noise, draw: u32, token: u32) -> f32 {
        let word = noise.word(Domain::Granule, draw, granule::of(token));
        let granule = noise.granule(Domain::Token, draw, token, word);
        granule.exponential(token, || noise.word(Domain::Token, draw, token))
    }

    fn any_below(&self, noise: &Noise, draw: u32, block: u32, limit: f32) -> bool {
        // The bound includes the rounding error of the minimum.
        let able = limit * 4_294_967_296.0 * 1.000_001;
        (4 * block..).zip(noise.words(Domain::Granule, draw, block)).any(|(index, word)| {
            minimum_bits(word) as f32 <= able
                && noise.granule(Domain::Token, draw, index * TOKENS, word).minimum < limit
        })
    }

    fn measure(&self, r: f64) -> Vec<Part> {
        let excess = |word| u01_open_coarse::<32>(word).exponential();
        measure_granules(r, |word, refinement| Granule::of_word(word, || refinement), excess)
    }
}

/// The noise of groups and shards, with one word each.
#[derive(Clone, Copy, Debug)]
pub struct Groups;

impl NoiseMap for Groups {
    fn name(&self) -> String {
        "noise of groups".into()
    }

    fn exponential(&self, noise: &Noise, draw: u32, token: u32) -> f32 {
        let refinement = || noise.refinement(Domain::Group, draw, token);
        uniform::exponential(noise.word(Domain::Group, draw, token), refinement)
    }

    fn measure(&self, r: f64) -> Vec<Part> {
        measure_words(r, |word, refinement| uniform::exponential(word, || refinement))
    }
}

/// Divides all pairs of a word of `bits` bits and its refinement into strata. Returns the middle pair and the weight of
/// each stratum, whose pairs differ by at most 1/4096 of their value. Words from [`TAIL_WORDS`] on have no refinement.
fn strata(bits: u32) -> impl Iterator<Item = (u32, u32, f64)> {
    let step = |at: u64, end: u64| (at < end).then_some(at);
    let size = |at: u64, end: u64| ((at / 4096) | 1).min(end - at);
    // Pairs are 64 bits; a stratum of the tail has one word.
    let end = |at: u64| ((at >> 32) + 1) << 32;
    let tail = core::iter::successors(Some(0), move |&at| step(at + size(at, end(at)), u64::from(TAIL_WORDS) << 32));
    let tail = tail.map(move |at| (at + size(at, end(at)) / 2, size(at, end(at)), 32 + bits));
    let all = 1u64 << bits;
    let body = core::iter::successors(Some(u64::from(TAIL_WORDS)), move |&at| step(at + size(at, all), all));
    let body = body.map(move |at| ((at + size(at, all) / 2) << 32, size(at, all), bits));
    tail.chain(body).map(|(at, size, bits)| ((at >> 32) as u32, at as u32, size as f64 / 2f64.powi(bits as i32)))
}

/// Measures a map with one word per token. Words near 0 have small exponentials.
pub fn measure_words(r: f64, exponential: impl Fn(u32, u32) -> f32) -> Vec<Part> {
    let wins = |(word, refinement, weight)| weight * (-r * f64::from(exponential(word, refinement))).exp();
    vec![Part { what: "token", measured: strata(32).map(wins).sum(), due: 1.0 / (1.0 + r) }]
}

/// Measures a map by granules, at the index in a granule with the largest error.
///
/// `granule` maps the word and refinement of a granule, and `excess` the word of a token other than the leader. Leader
/// and minimum are independent of the excess, so the mean of `e^(-r (m + E'))` is a product.
pub fn measure_granules(r: f64, granule: impl Fn(u32, u32) -> Granule, excess: impl Fn(u32) -> f32) -> Vec<Part> {
    let mut leader = [0.0; TOKENS as usize];
    for (minimum, refinement, weight) in strata(28) {
        for place in 0..TOKENS {
            let granule = granule(minimum * TOKENS + place, refinement);
            let wins = (-r * f64::from(granule.minimum)).exp();
            leader[granule.leader as usize] += weight / f64::from(TOKENS) * wins;
        }
    }
    let all: f64 = leader.iter().sum();
    let loses = measure_words(r, |word, _| excess(word))[0].measured;
    let worst = |what, due: f64, of: &dyn Fn(f64) -> f64| {
        let off = |a: &f64, b: &f64| (a - due).abs().total_cmp(&(b - due).abs());
        Part { what, measured: leader.iter().map(|&part| of(part)).max_by(off).unwrap_or(0.0), due }
    };
    vec![
        worst("leader", 1.0 / (16.0 + r), &|part| part),
        worst("other token", 15.0 / ((16.0 + r) * (1.0 + r)), &|part| (all - part) * loses),
    ]
}

/// The largest allowed relative bias of a token's probability, at any probability.
pub const BIAS_LIMIT: f64 = 1e-6;

/// Returns the relative bias of each part of P(token) for a token of probability `p`.
pub fn biases(map: &dyn NoiseMap, p: f64) -> Vec<(&'static str, f64)> {
    map.measure((1.0 - p) / p).iter().map(|part| (part.what, (part.measured - part.due) / p)).collect()
}

/// Tests the number of rare winners in `draws` draws of real noise by the exact binomial test.
///
/// There are `64 blocks` rare tokens. Each is `1 / p` times less likely than the heavy token 0.
///
/// # Panics
/// Never: the position is valid.
pub fn hits(map: &dyn NoiseMap, p: f64, blocks: u32, draws: u32, progress: &dyn Fn(f64)) -> Outcome {
    let noise = Noise::new(0x7a11_0ff5, 11).expect("a valid position");
    let won = |draw: &u32| {
        if draw.is_multiple_of(64) {
            progress(f64::from(*draw) / f64::from(draws));
        }
        let limit = map.exponential(&noise, *draw, 0) * p as f32;
        (1..=blocks).any(|block| map.any_below(&noise, *draw, block, limit))
    };
    let mass = p * f64::from(64 * blocks);
    binomial((0..draws).filter(won).count() as u64, u64::from(draws), mass / (1.0 + mass))
}

/// Checks the law: with the exponentials of the map, every token wins with its probability.
///
/// # Errors
/// Returns the report of the broken law.
pub fn check(map: &dyn NoiseMap, effort: Effort, progress: &dyn Fn(f64)) -> Result<LawReport, LawFailure> {
    let mut report = LawReport { law: "noise_reaches_into_the_tail", sampler: map.name(), ..LawReport::default() };
    let outcome = run(map, effort, progress, &mut report);
    report.verdict(outcome)
}

fn run(map: &dyn NoiseMap, effort: Effort, progress: &dyn Fn(f64), report: &mut LawReport) -> Result<(), Broken> {
    let more = if effort == Effort::Full { 8 } else { 1 };
    let noise = Noise::new(0x005b_a9e5, 7).ok_or(Broken("the position is valid".into()))?;
    let tokens = 0..1_000_000 * more;
    let mut uniform: Vec<f64> = tokens.map(|token| (-f64::from(map.exponential(&noise, 3, token))).exp()).collect();
    let outcome = kolmogorov_smirnov(&mut uniform);
    report.p_value("Gumbels of tokens, Kolmogorov-Smirnov", uniform.len(), outcome);

    for p in [0.1, 1e-3, 1e-6, 1e-7, 3e-8, 1e-8, 2e-9, 1e-9, 1e-12] {
        for (what, bias) in biases(map, p) {
            let what = format!("relative bias of P({what}) at {p:e} in units of the limit, by measure");
            report.at_most(what, 1, bias.abs() / BIAS_LIMIT, 1.0);
        }
    }

    for (i, (p, blocks, draws)) in [(1e-7, 1u32 << 13, 3000), (1e-8, 1 << 16, 2000)].into_iter().enumerate() {
        let outcome = hits(map, p, blocks, draws * more, &|part| progress((i as f64 + part) / 2.0));
        let what = format!("{} tokens of {p:e} pooled, binomial", 64 * blocks);
        report.p_value(what, (draws * more) as usize, outcome);
    }
    Ok(())
}
