//! The statistical tests of the laws: chi-square, Kolmogorov-Smirnov, exact binomial, correlation. Tails are pooled,
//! not dropped.

use statrs::distribution::{Binomial, ChiSquared, ContinuousCDF, DiscreteCDF, Normal};

/// A statistic and its p-value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// The statistic.
    pub statistic: f64,
    /// The probability of a statistic at least as extreme.
    pub p: f64,
}

/// Expected and observed counts of bins.
#[derive(Clone, Debug, PartialEq)]
pub struct Bins {
    /// Expected counts.
    pub expected: Vec<f64>,
    /// Observed counts.
    pub observed: Vec<f64>,
}

impl Bins {
    /// Makes `bins` empty bins.
    pub fn new(bins: usize) -> Self {
        Bins { expected: vec![0.0; bins], observed: vec![0.0; bins] }
    }

    /// Counts draws (indices into `law`) in bins; `bin_of(index)` is below `bins`.
    pub fn of(law: &[f64], draws: &[usize], bins: usize, bin_of: impl Fn(usize) -> usize) -> Self {
        let mut out = Bins::new(bins);
        for (i, p) in law.iter().enumerate() {
            out.expected[bin_of(i)] += p * draws.len() as f64;
        }
        for &i in draws {
            out.observed[bin_of(i)] += 1.0;
        }
        out
    }

    /// Joins adjacent bins until every expected count is at least `least`. The remainder at the end joins the last bin.
    pub fn pooled(&self, least: f64) -> Bins {
        let mut out = Bins::new(0);
        let (mut expected, mut observed) = (0.0, 0.0);
        for (e, o) in self.expected.iter().zip(&self.observed) {
            expected += e;
            observed += o;
            if expected >= least {
                out.expected.push(expected);
                out.observed.push(observed);
                (expected, observed) = (0.0, 0.0);
            }
        }
        match (out.expected.last_mut(), out.observed.last_mut()) {
            (Some(e), Some(o)) => {
                *e += expected;
                *o += observed;
            }
            _ => {
                out.expected.push(expected);
                out.observed.push(observed);
            }
        }
        out
    }

    /// Pools bins to expected counts of at least 10, and returns Pearson's chi-square with bins - 1 degrees of freedom.
    /// Returns `None` if only one bin remains.
    pub fn chi_square(&self) -> Option<Outcome> {
        let bins = self.pooled(10.0);
        let freedom = bins.expected.len().checked_sub(1).filter(|&f| f > 0)?;
        let terms = bins.expected.iter().zip(&bins.observed).map(|(e, o)| (o - e) * (o - e) / e);
        let statistic: f64 = terms.sum();
        let law = ChiSquared::new(freedom as f64).expect("positive degrees of freedom");
        Some(Outcome { statistic, p: law.sf(statistic) })
    }
}

/// Computes the exact two-sided binomial test: twice the smaller tail. The statistic is the count.
pub fn binomial(hits: u64, n: u64, p: f64) -> Outcome {
    let law = Binomial::new(p.clamp(0.0, 1.0), n).expect("a probability");
    let below = law.cdf(hits);
    let above = if hits == 0 { 1.0 } else { law.sf(hits - 1) };
    Outcome { statistic: hits as f64, p: (2.0 * below.min(above)).min(1.0) }
}

/// Sorts `values`, and tests that they are uniform on (0, 1) by Kolmogorov-Smirnov.
///
/// The p-value is Kolmogorov's series with the correction of Stephens (1970).
pub fn kolmogorov_smirnov(values: &mut [f64]) -> Outcome {
    values.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let distance = |(i, &u): (usize, &f64)| (u - i as f64 / n).max((i as f64 + 1.0) / n - u);
    let d = values.iter().enumerate().map(distance).fold(0.0, f64::max);
    let x = (n.sqrt() + 0.12 + 0.11 / n.sqrt()) * d;
    let term = |k: i32| (-2.0 * f64::from(k * k) * x * x).exp() * if k % 2 == 1 { 2.0 } else { -2.0 };
    let p = if x < 0.3 { 1.0 } else { (1..=50).map(term).sum::<f64>().clamp(0.0, 1.0) };
    Outcome { statistic: d, p }
}

/// Tests Pearson's correlation of pairs of uniforms with known mean and variance. The statistic is close to normal for
/// a thousand pairs or more.
pub fn correlation(pairs: &[(f64, f64)]) -> Outcome {
    let sum: f64 = pairs.iter().map(|(a, b)| (a - 0.5) * (b - 0.5) * 12.0).sum();
    let z = sum / (pairs.len() as f64).sqrt();
    Outcome { statistic: z, p: 2.0 * Normal::standard().sf(z.abs()) }
}

/// Tests the sum of squares of uncorrelated standard normals by chi-square.
pub fn sum_of_squares(normals: &[f64]) -> Outcome {
    let statistic = normals.iter().map(|z| z * z).sum();
    let law = ChiSquared::new(normals.len() as f64).expect("at least one normal");
    Outcome { statistic, p: law.sf(statistic) }
}

/// Tests a contingency table of pairs of classes against the product of known class laws, by chi-square.
pub fn contingency(pairs: &[(usize, usize)], law_a: &[f64], law_b: &[f64]) -> Option<Outcome> {
    let width = law_b.len();
    let joint: Vec<f64> = law_a.iter().flat_map(|a| law_b.iter().map(move |b| a * b)).collect();
    let cells: Vec<usize> = pairs.iter().map(|&(a, b)| a * width + b).collect();
    Bins::of(&joint, &cells, joint.len(), |i| i).chi_square()
}

/// Returns the distribution function of the standard Gumbel.
pub fn gumbel_cdf(x: f64) -> f64 {
    (-(-x).exp()).exp()
}

/// Returns the quantile of the standard Gumbel at a level in (0, 1).
pub fn gumbel_quantile(level: f64) -> f64 {
    -(-level.ln()).ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::u01_open;

    #[test]
    fn pooling_loses_nothing() {
        let bins = Bins { expected: vec![3.0, 20.0, 1.0, 9.5, 0.25], observed: vec![1.0, 2.0, 3.0, 4.0, 5.0] };
        let pooled = bins.pooled(10.0);
        assert_eq!(pooled, Bins { expected: vec![23.0, 10.75], observed: vec![3.0, 12.0] });
        assert_eq!(bins.pooled(1000.0).observed, [15.0]);
    }

    #[test]
    fn uniforms_pass_and_a_bent_law_does_not() {
        let mut values: Vec<f64> = (0..20_000).map(|i| u01_open(1, i)).collect();
        let draws: Vec<usize> = values.iter().map(|u| (u * 8.0) as usize).collect();
        assert!(Bins::of(&[0.125; 8], &draws, 8, |i| i).chi_square().unwrap().p > 1e-3);
        assert!(kolmogorov_smirnov(&mut values).p > 1e-3);
        let mut bent: Vec<f64> = values.iter().map(|u| u.powf(1.06)).collect();
        assert!(kolmogorov_smirnov(&mut bent).p < 1e-6);
        let pairs: Vec<(f64, f64)> = (0..20_000).map(|i| (u01_open(1, i), u01_open(2, i))).collect();
        assert!(correlation(&pairs).p > 1e-3);
        let pairs: Vec<(f64, f64)> = pairs.iter().map(|&(a, b)| (a, if b < 0.1 { a } else { b })).collect();
        assert!(correlation(&pairs).p < 1e-6);
    }

    #[test]
    fn the_binomial_test_counts_both_tails() {
        // P(X <= 2) = 0.0546875 = P(X >= 8) for n = 10, p = 1/2.
        assert!((binomial(2, 10, 0.5).p - 0.109_375).abs() < 1e-9);
        assert!((binomial(8, 10, 0.5).p - 0.109_375).abs() < 1e-9);
        assert_eq!(binomial(5, 10, 0.5).p, 1.0);
        assert_eq!(binomial(0, 10, 0.0).p, 1.0);
    }

    #[test]
    fn the_gumbel_quantile_inverts_its_distribution() {
        for level in [1e-6, 0.3, 0.999_999] {
            assert!((gumbel_cdf(gumbel_quantile(level)) - level).abs() < 1e-12);
        }
    }
}
