//! The joint law of the sixteen tokens of a granule: independent exponentials, tested without a sampler.
//!
//! The checks read only exponentials, so they apply to any [`NoiseMap`]. The hardest maps to reject are wrong maps
//! whose single tokens have the right law.
//! * **Minimum.** Sixteen times the smallest exponential is Exp(1). The index of the minimum (its place) is uniform,
//!   and independent of the minimum.
//! * **Excesses.** The excesses of the other tokens over the minimum are Exp(1), and independent of minimum and place.
//! * **Pairs and triples.** Each granule adds one pair and one triple to contingency tables. A sum of squares tests the
//!   correlations of all 120 pairs and all 560 triples.
//! * **Counts.** The number of tokens below a level is binomial, near the median and in the tail.
//! * **Neighbours.** Minima and places of the granules of one Philox block are independent.

use crate::noise_map::NoiseMap;
use crate::report::{Broken, LawFailure, LawReport};
use crate::statistics::{Bins, contingency, kolmogorov_smirnov, sum_of_squares};
use crate::trial::Effort;
use flash_sampling_core::Noise;
use statrs::distribution::{Binomial, Discrete};

/// Tokens per granule. The law does not depend on the constant of the core.
const N: usize = 16;

/// Shifts and scales uniforms to mean 0 and variance 1.
fn centred(uniforms: &[f64; N]) -> [f64; N] {
    uniforms.map(|u| (u - 0.5) * 12f64.sqrt())
}

/// Returns the correlations of all pairs, then of all triples, scaled to standard normals.
fn correlations(granules: &[[f64; N]]) -> [Vec<f64>; 2] {
    let mut sums = [vec![0.0; N * (N - 1) / 2], vec![0.0; N * (N - 1) * (N - 2) / 6]];
    for x in granules.iter().map(centred) {
        let (mut pair, mut triple) = (0, 0);
        for i in 0..N {
            for j in 0..i {
                let product = x[i] * x[j];
                sums[0][pair] += product;
                pair += 1;
                for third in &x[..j] {
                    sums[1][triple] += product * third;
                    triple += 1;
                }
            }
        }
    }
    sums.map(|sums| sums.into_iter().map(|sum| sum / (granules.len() as f64).sqrt()).collect())
}

/// Returns the bin of a uniform.
fn bin(u: f64, bins: usize) -> usize {
    ((u * bins as f64) as usize).min(bins - 1)
}

/// Checks the law: tokens of a granule have independent standard exponentials.
///
/// # Errors
/// Returns the report of the broken law.
pub fn check(map: &dyn NoiseMap, effort: Effort) -> Result<LawReport, LawFailure> {
    let mut report =
        LawReport { law: "tokens_of_a_granule_are_independent", sampler: map.name(), ..LawReport::default() };
    let outcome = run(map, effort, &mut report);
    report.verdict(outcome)
}

fn run(map: &dyn NoiseMap, effort: Effort, report: &mut LawReport) -> Result<(), Broken> {
    let count = if effort == Effort::Full { 1 << 21 } else { 1 << 18 };
    let noise = Noise::new(0x6a17_0e55, 13).ok_or(Broken("the position is valid".into()))?;
    let token = |n: usize, i: usize| f64::from(map.exponential(&noise, n as u32 >> 12, (n % 4096 * N + i) as u32));
    let granules: Vec<[f64; N]> = (0..count).map(|n| core::array::from_fn(|i| token(n, i))).collect();
    let uniforms: Vec<[f64; N]> = granules.iter().map(|e| e.map(|e| -(-e).exp_m1())).collect();
    // The minimum, the place of the minimum, and the excess of one other token.
    let place = |e: &[f64; N]| (0..N).fold(0, |least, i| if e[i] < e[least] { i } else { least });
    let places: Vec<usize> = granules.iter().map(place).collect();
    let minima: Vec<f64> = granules.iter().zip(&places).map(|(e, &at)| -(-16.0 * e[at]).exp_m1()).collect();
    let excess = |(n, (e, &at)): (usize, (&[f64; N], &usize))| -(e[at] - e[(at + 1 + n % 15) % N]).exp_m1();
    let excesses: Vec<f64> = granules.iter().zip(&places).enumerate().map(excess).collect();
    let bins = |uniforms: &[f64]| uniforms.iter().map(|&u| bin(u, N)).collect::<Vec<_>>();
    let flat = [1.0 / N as f64; N];
    let pairs = |a: &[usize], b: &[usize]| {
        let pairs: Vec<(usize, usize)> = a.iter().copied().zip(b.iter().copied()).collect();
        contingency(&pairs, &flat, &flat)
    };
    report.p_value("minimum, Kolmogorov-Smirnov", count, kolmogorov_smirnov(&mut minima.clone()));
    report.p_value("excess, Kolmogorov-Smirnov", count, kolmogorov_smirnov(&mut excesses.clone()));
    report.p_value("place of the minimum, chi-square", count, Bins::of(&flat, &places, N, |i| i).chi_square());
    report.p_value("minimum and its place, contingency table", count, pairs(&bins(&minima), &places));
    report.p_value("minimum and excess, contingency table", count, pairs(&bins(&minima), &bins(&excesses)));
    report.p_value("place and excess, contingency table", count, pairs(&places, &bins(&excesses)));

    // Correlations of all pairs and triples; contingency tables of one pair and one triple per granule.
    for (what, z) in ["all pairs, correlations", "all triples, correlations"].into_iter().zip(correlations(&uniforms)) {
        report.p_value(what, count, sum_of_squares(&z));
    }
    let (first, second) = (|n: usize| n % N, |n: usize| (n + 1 + n / N % 15) % N);
    let of = |places: &dyn Fn(usize) -> usize| -> Vec<f64> { (0..count).map(|n| uniforms[n][places(n)]).collect() };
    report.p_value("a pair, contingency table", count, pairs(&bins(&of(&first)), &bins(&of(&second))));
    let third = |n: usize| (0..N).filter(|&i| i != first(n) && i != second(n)).nth(n / 240 % 14).unwrap_or(0);
    let cell = |n: usize| [first(n), second(n), third(n)].iter().fold(0, |cell, &i| cell * 6 + bin(uniforms[n][i], 6));
    let cells: Vec<usize> = (0..count).map(cell).collect();
    report.p_value(
        "a triple, contingency table",
        count,
        Bins::of(&[1.0 / 216.0; 216], &cells, 216, |i| i).chi_square(),
    );

    for (what, level) in [("median", 0.5), ("tail of 1/16", 1.0 / 16.0), ("tail of 1/256", 1.0 / 256.0)] {
        let law = Binomial::new(level, N as u64).map_err(|e| Broken(e.to_string()))?;
        let law: Vec<f64> = (0..=N as u64).map(|k| law.pmf(k)).collect();
        let below: Vec<usize> = uniforms.iter().map(|u| u.iter().filter(|&&u| u < level).count()).collect();
        report.p_value(
            format!("tokens in the {what}, chi-square"),
            count,
            Bins::of(&law, &below, N + 1, |i| i).chi_square(),
        );
    }

    for apart in [1, 2] {
        let what = format!("granules {apart} apart");
        report.p_value(format!("{what}: places, contingency table"), count, pairs(&places[apart..], &places));
        report.p_value(
            format!("{what}: minima, contingency table"),
            count,
            pairs(&bins(&minima)[apart..], &bins(&minima)),
        );
    }
    Ok(())
}
