//! Rotary positions (Su et al. 2021): the halves of a head are rotated against each other.

/// Scaling of the frequencies for sequences longer than those of the first training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// No scaling.
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided and high ones are unchanged, with a smooth transition between them.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` tokens are divided.
        low: f64,
        /// Wavelengths below `original / high` tokens are unchanged; above `low`.
        high: f64,
        /// Length of sequences in the first training, in tokens.
        original: f64,
    },
}

/// The frequencies of a head's pairs.
#[derive(Clone, Debug)]
pub struct Rotary(Vec<f64>);

impl Rotary {
    /// For heads of width `head_dim`: pair i rotates by `theta^(-2i / head_dim)` per token, changed by `scaling`.
    pub fn new(head_dim: usize, theta: f64, scaling: Scaling) -> Self {
        let frequency = |pair: usize| {
            let frequency = theta.powf(-2.0 * pair as f64 / head_dim as f64);
            match scaling {
                Scaling::None => frequency,
                Scaling::Linear { factor } => frequency / factor,
                Scaling::Llama3 { factor, low, high, original } => {
                    let turns = original * frequency / std::f64::consts::TAU;
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    frequency * (kept + (1.0 - kept) / factor)
                }
            }
        };
        Rotary((0..head_dim / 2).map(frequency).collect())
    }

    /// Cosine and sine of each pair at a position.
    pub fn at(&self, position: usize) -> Vec<(f32, f32)> {
        let turn = |frequency: &f64| {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            (cos as f32, sin as f32)
        };
        self.0.iter().map(turn).collect()
    }
}

/// Rotates a head in place: element i with element `i + head_dim / 2`.
pub fn rotate(head: &mut [f32], turns: &[(f32, f32)]) {
    let (first, second) = head.split_at_mut(turns.len());
    for ((a, b), &(cos, sin)) in first.iter_mut().zip(second).zip(turns) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_depend_on_the_distance_alone() {
        let rotary = Rotary::new(8, 10_000.0, Scaling::None);
        let score = |q: usize, k: usize| {
            let mut query = [0.3f32, -1.0, 0.5, 2.0, 1.5, 0.25, -0.75, 1.0];
            let mut key = [1.0f32, 0.5, -0.5, 0.125, 2.0, -1.0, 0.0, 0.75];
            rotate(&mut query, &rotary.at(q));
            rotate(&mut key, &rotary.at(k));
            query.iter().zip(key).map(|(a, b)| a * b).sum::<f32>()
        };
        assert!((score(7, 3) - score(104, 100)).abs() < 1e-4);
        assert!((score(7, 3) - score(7, 4)).abs() > 1e-2);
    }

    #[test]
    fn llama_3_keeps_high_frequencies_and_divides_low_ones() {
        let plain = Rotary::new(128, 500_000.0, Scaling::None).0;
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let scaled = Rotary::new(128, 500_000.0, scaling).0;
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        let between = plain.iter().zip(&scaled).filter(|(p, s)| *s < *p && **s > *p / 8.0).count();
        assert!((1..20).contains(&between), "{between}");
        assert!(scaled.is_sorted_by(|a, b| a > b));
    }
}
