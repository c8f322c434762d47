//! Count, mean and standard deviation of a set of logits, whatever the order.

/// 2^12: logits are rounded to multiples of 2^-12 nat before the temperature.
const SCALE: f32 = 4096.0;
/// 2^40: where a rounded logit ends.
const LIMIT: f32 = 1_099_511_627_776.0;

/// Sums of logits and of their squares as integers, so that the result does not depend on the order, the tiles or the
/// shards: [`merge`](Moments::merge) is associative and commutative with the empty set as identity.
///
/// Before its temperature a logit counts as the nearest multiple of 2^-12, and as 2^28 at most in size; so what the moments
/// say in deviations does not depend on the temperature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    count: u64,
    sum: i128,
    squares: u128,
    /// What turns a logit into steps of the grid.
    scale: f32,
}

impl Default for Moments {
    fn default() -> Self {
        Moments::of_temperature(1.0)
    }
}

impl Moments {
    /// No logits yet; they will have been divided by a temperature. Sets are merged with those of the same one.
    pub fn of_temperature(temperature: f32) -> Self {
        Moments { count: 0, sum: 0, squares: 0, scale: (SCALE * temperature).min(f32::MAX) }
    }

    /// Adds a logit; `-inf` adds nothing. `logit` must not be NaN.
    #[inline]
    pub fn push(&mut self, logit: f32) {
        if logit > f32::NEG_INFINITY {
            let rounded = (logit * self.scale).round_ties_even().clamp(-LIMIT, LIMIT) as i64;
            self.count += 1;
            self.sum += i128::from(rounded);
            self.squares += u128::from(rounded.unsigned_abs()).pow(2);
        }
    }

    /// Adds the logits of another set.
    pub fn merge(&mut self, other: &Moments) {
        self.count += other.count;
        self.sum += other.sum;
        self.squares += other.squares;
    }

    /// The words that a rank sends: count, sum and sum of squares, low halves first.
    pub fn to_words(&self) -> [u64; 5] {
        let (sum, squares) = (self.sum as u128, self.squares);
        [self.count, sum as u64, (sum >> 64) as u64, squares as u64, (squares >> 64) as u64]
    }

    /// The inverse of [`Moments::to_words`], for logits that were divided by a temperature; `None` for words that it
    /// cannot have written of at most `most` logits.
    pub fn from_words(words: [u64; 5], temperature: f32, most: u64) -> Option<Self> {
        let wide = |low: u64, high: u64| u128::from(high) << 64 | u128::from(low);
        let [count, a, b, c, d] = words;
        let (sum, squares) = (wide(a, b) as i128, wide(c, d));
        let limit = LIMIT as u128;
        let possible = count <= most
            && sum.unsigned_abs() <= u128::from(count) * limit
            && squares <= u128::from(count).checked_mul(limit * limit)?;
        possible.then_some(Moments { count, sum, squares, ..Moments::of_temperature(temperature) })
    }

    /// What turns a logit into steps of the grid: the product, rounded to even and cut off at 2^40, is what the sums are of. For
    /// who sums elsewhere.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Number of logits.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean, in nats; 0 of no logits.
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.count.max(1) as f64 / f64::from(self.scale)
    }

    /// The standard deviation of the whole set (not of a sample), in nats.
    pub fn deviation(&self) -> f64 {
        // n sum x^2 - (sum x)^2 as an exact integer, where it fits: no cancellation.
        let n = u128::from(self.count.max(1));
        let square = self.sum.unsigned_abs().checked_mul(self.sum.unsigned_abs());
        let spread = match (n.checked_mul(self.squares), square) {
            (Some(a), Some(b)) => a.saturating_sub(b) as f64,
            _ => (n as f64 * self.squares as f64 - (self.sum as f64).powi(2)).max(0.0),
        };
        spread.sqrt() / n as f64 / f64::from(self.scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn moments_are_accurate_in_any_order(l in prop::collection::vec(-50f32..50.0, 1..60), split in 0usize..60) {
            let (a, b) = l.split_at(split.min(l.len()));
            let of = |l: &[f32]| { let mut m = Moments::default(); l.iter().for_each(|&l| m.push(l)); m };
            let mut merged = of(b);
            merged.merge(&of(a));
            prop_assert_eq!(merged, of(&l));
            let n = l.len() as f64;
            let mean = l.iter().map(|&l| f64::from(l)).sum::<f64>() / n;
            let variance = l.iter().map(|&l| (f64::from(l) - mean).powi(2)).sum::<f64>() / n;
            prop_assert!((merged.mean() - mean).abs() < 2e-4);
            prop_assert!((merged.deviation() - variance.sqrt()).abs() < 3e-4);
        }
    }

    #[test]
    fn words_carry_the_moments() {
        let mut m = Moments::of_temperature(0.5);
        [-3.25f32, 700.0, 1e9, -1e9, 0.0].into_iter().for_each(|l| m.push(l));
        assert_eq!(Moments::from_words(m.to_words(), 0.5, 5), Some(m));
        assert_eq!(Moments::from_words(m.to_words(), 0.5, 4), None);
        for word in [2, 4] {
            let mut words = m.to_words();
            words[word] ^= 1 << 62;
            assert_eq!(Moments::from_words(words, 0.5, 5), None, "word {word}");
        }
    }

    #[test]
    fn a_temperature_takes_nothing_from_the_deviation() {
        let logits: Vec<f32> = (0..1000).map(|i| (i * 7 % 101) as f32 * 0.1).collect();
        let of = |temperature: f32| {
            let mut m = Moments::of_temperature(temperature);
            logits.iter().for_each(|&l| m.push(l * (1.0 / temperature)));
            (m.mean() * f64::from(temperature), m.deviation() * f64::from(temperature))
        };
        let want = of(1.0);
        for temperature in [1e-30f32, 0.01, 1e4, 1e8, 1e30] {
            let found = of(temperature);
            assert!((found.0 - want.0).abs() < 1e-4 && (found.1 - want.1).abs() < 1e-4, "{temperature}: {found:?}");
        }
        let hottest = Moments::of_temperature(f32::MAX);
        assert!(hottest.mean() == 0.0 && hottest.deviation() == 0.0);
    }

    #[test]
    fn huge_logits_do_not_overflow() {
        let mut m = Moments::default();
        for l in [f32::MAX, f32::MIN, f32::NEG_INFINITY, 1e30] {
            m.push(l);
        }
        assert_eq!(m.count(), 3);
        assert!(m.deviation() > 1e8 && m.deviation().is_finite());
    }
}
