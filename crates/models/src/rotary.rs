//! Rotary positions (Su et al. 2021): pairs of a head's elements are rotated.

/// Scaling of the frequencies for sequences longer than those of the first training.
#[derive(Clone, Debug, PartialEq)]
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
    /// A divisor for each frequency. GGUF files have Llama 3.1's scaling in this form.
    Factors(Vec<f32>),
}

/// The elements of a head that form pair i.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Elements i and `i + head_dim / 2`, as in Hugging Face's checkpoints.
    Halves,
    /// Elements 2i and 2i + 1, as in GGUF files of the llama architecture: the rows of their query and key weights have
    /// another order, so scores are the same up to the order of their sums.
    Neighbours,
}

/// The frequencies of a head's pairs.
#[derive(Clone, Debug)]
pub struct Rotary {
    frequencies: Vec<f64>,
    pairing: Pairing,
}

impl Rotary {
    /// For heads of width `head_dim`: pair i rotates by `theta^(-2i / head_dim)` per token, changed by `scaling`.
    ///
    /// # Panics
    /// If [`Scaling::Factors`] has fewer than `head_dim / 2` factors.
    pub fn new(head_dim: usize, theta: f64, scaling: &Scaling, pairing: Pairing) -> Self {
        let frequency = |pair: usize| {
            let frequency = theta.powf(-2.0 * pair as f64 / head_dim as f64);
            match *scaling {
                Scaling::None => frequency,
                Scaling::Linear { factor } => frequency / factor,
                Scaling::Factors(ref factors) => frequency / f64::from(factors[pair]),
                Scaling::Llama3 { factor, low, high, original } => {
                    let turns = original * frequency / std::f64::consts::TAU;
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    frequency * (kept + (1.0 - kept) / factor)
                }
            }
        };
        Rotary { frequencies: (0..head_dim / 2).map(frequency).collect(), pairing }
    }

    /// Cosine and sine of each pair at a position.
    pub fn at(&self, position: usize) -> Vec<(f32, f32)> {
        let turn = |frequency: &f64| {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            (cos as f32, sin as f32)
        };
        self.frequencies.iter().map(turn).collect()
    }

    /// Rotates a head in place by the turns of [`Rotary::at`].
    pub fn rotate(&self, head: &mut [f32], turns: &[(f32, f32)]) {
        let turn = |a: &mut f32, b: &mut f32, (cos, sin): (f32, f32)| {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        };
        match self.pairing {
            Pairing::Halves => {
                let (first, second) = head.split_at_mut(turns.len());
                first.iter_mut().zip(second).zip(turns).for_each(|((a, b), turns)| turn(a, b, *turns));
            }
            Pairing::Neighbours => {
                let (pairs, _) = head.as_chunks_mut::<2>();
                pairs.iter_mut().zip(turns).for_each(|([a, b], turns)| turn(a, b, *turns));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_depend_on_the_distance_alone() {
        let rotary = Rotary::new(8, 10_000.0, &Scaling::None, Pairing::Halves);
        let score = |q: usize, k: usize| {
            let mut query = [0.3f32, -1.0, 0.5, 2.0, 1.5, 0.25, -0.75, 1.0];
            let mut key = [1.0f32, 0.5, -0.5, 0.125, 2.0, -1.0, 0.0, 0.75];
            rotary.rotate(&mut query, &rotary.at(q));
            rotary.rotate(&mut key, &rotary.at(k));
            query.iter().zip(key).map(|(a, b)| a * b).sum::<f32>()
        };
        assert!((score(7, 3) - score(104, 100)).abs() < 1e-4);
        assert!((score(7, 3) - score(7, 4)).abs() > 1e-2);
    }

    #[test]
    fn llama_3_keeps_high_frequencies_and_divides_low_ones() {
        let of = |scaling| Rotary::new(128, 500_000.0, &scaling, Pairing::Halves).frequencies;
        let plain = of(Scaling::None);
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let scaled = of(scaling);
        assert_eq!(scaled[0], plain[0]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        let between = plain.iter().zip(&scaled).filter(|(p, s)| *s < *p && **s > *p / 8.0).count();
        assert!((1..20).contains(&between), "{between}");
        assert!(scaled.is_sorted_by(|a, b| a > b));
        // The same scaling as factors.
        let factors = plain.iter().zip(&scaled).map(|(plain, scaled)| (plain / scaled) as f32).collect();
        for (scaled, divided) in scaled.iter().zip(of(Scaling::Factors(factors))) {
            assert!((divided / scaled - 1.0).abs() < 1e-7);
        }
    }

    #[test]
    fn neighbours_are_halves_in_another_order() {
        let head: Vec<f32> = (0..10).map(|i| ((i * 7 + 3) % 11) as f32 - 5.0).collect();
        let interleave = |head: &[f32]| -> Vec<f32> { (0..10).map(|i| head[i / 2 + (i % 2) * 5]).collect() };
        let rotated = |mut head: Vec<f32>, pairing| {
            let rotary = Rotary::new(10, 100.0, &Scaling::None, pairing);
            rotary.rotate(&mut head, &rotary.at(3));
            head
        };
        let halves = rotated(head.clone(), Pairing::Halves);
        assert_eq!(rotated(interleave(&head), Pairing::Neighbours), interleave(&halves));
        assert_ne!(rotated(interleave(&head), Pairing::Halves), interleave(&halves));
    }
}
