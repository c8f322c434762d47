//! Count, mean and standard deviation of a set of logits, whatever the order.

/// 2^32: logits are rounded to multiples of 2^-32 nat before the temperature, or of less than twice that.
const SCALE: f32 = 4_294_967_296.0;
/// 2^60: where a rounded logit ends.
const LIMIT: f32 = 1_152_921_504_606_846_976.0;
/// The exponent of a float32.
const EXPONENT: u32 = 0x7f80_0000;

/// Sums of logits and of their squares as integers, so that the result does not depend on the order, the tiles or the
/// shards: [`merge`](Moments::merge) is associative and commutative with the empty set as identity.
///
/// Before its temperature a logit counts as a multiple of 2^-32 nat that is at most 2^-32 away, and as 2^28 at least where
/// it is larger in size; so what the moments say in deviations does not depend on the temperature. From the integers on
/// nothing is lost: mean and deviation are off by at most 2^-32 nat of the logits before the temperature, and by a few
/// roundings of float64. A set of at most 2^32 - 1 logits has room.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    count: u64,
    sum: i128,
    /// The sum of squares modulo 2^128, and how often it came around.
    squares: u128,
    carries: u64,
    /// What turns a logit into steps of the grid.
    scale: f32,
}

impl Default for Moments {
    fn default() -> Self {
        Moments::of_temperature(1.0)
    }
}

impl Moments {
    /// Words that a rank sends.
    pub const WORDS: usize = 6;

    /// No logits yet; they will have been divided by a temperature. Sets are merged with those of the same one.
    pub fn of_temperature(temperature: f32) -> Self {
        // Of the temperature its power of two alone: the product with a logit is exact.
        let power = f32::from_bits(temperature.to_bits() & EXPONENT).max(f32::MIN_POSITIVE);
        let scale = (SCALE * power).min(f32::from_bits(f32::MAX.to_bits() & EXPONENT));
        Moments { count: 0, sum: 0, squares: 0, carries: 0, scale }
    }

    /// Adds a logit; `-inf` adds nothing. `logit` must not be NaN.
    #[inline]
    pub fn push(&mut self, logit: f32) {
        if logit > f32::NEG_INFINITY {
            let rounded = (logit * self.scale).round_ties_even().clamp(-LIMIT, LIMIT) as i64;
            self.count += 1;
            self.sum += i128::from(rounded);
            self.add_squares(u128::from(rounded.unsigned_abs()).pow(2));
        }
    }

    #[inline]
    fn add_squares(&mut self, squares: u128) {
        let (sum, came_around) = self.squares.overflowing_add(squares);
        self.squares = sum;
        self.carries += u64::from(came_around);
    }

    /// Adds the logits of another set.
    pub fn merge(&mut self, other: &Moments) {
        self.count += other.count;
        self.sum += other.sum;
        self.add_squares(other.squares);
        self.carries += other.carries;
    }

    /// The words that a rank sends: count, sum (two words) and sum of squares (three), low ones first.
    pub fn to_words(&self) -> [u64; Moments::WORDS] {
        let (sum, squares) = (self.sum as u128, self.squares);
        [self.count, sum as u64, (sum >> 64) as u64, squares as u64, (squares >> 64) as u64, self.carries]
    }

    /// The inverse of [`Moments::to_words`], for logits that were divided by a temperature; `None` for words that it
    /// cannot have written of at most `most` logits.
    pub fn from_words(words: [u64; Moments::WORDS], temperature: f32, most: u64) -> Option<Self> {
        let wide = |low: u64, high: u64| u128::from(high) << 64 | u128::from(low);
        let [count, a, b, c, d, carries] = words;
        let (sum, squares) = (wide(a, b) as i128, wide(c, d));
        let possible = count <= most.min(u64::from(u32::MAX))
            && sum.unsigned_abs() <= u128::from(count) << 60
            // As many squares of 2^60.
            && (carries, squares) <= (count >> 8, u128::from(count) << 120);
        possible.then_some(Moments { count, sum, squares, carries, ..Moments::of_temperature(temperature) })
    }

    /// What turns a logit into steps of the grid, a power of two: the product, rounded to even and cut off at 2^60, is what
    /// the sums are of. For who sums elsewhere.
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
        // sum (x - m)^2 = sum x^2 - n m^2 - 2 m r, for the integer m next to the mean and r = sum x - n m, by integers: what
        // cancels here would be all that a set of nearly equal logits has.
        let n = i128::from(self.count.max(1));
        let m = (2 * self.sum + n).div_euclid(2 * n);
        let r = self.sum - n * m;
        let (square, mask) = ((m * m).cast_unsigned(), u128::from(u64::MAX));
        let (low, high) = ((square & mask) as i128, (square >> 64) as i128);
        let low = (self.squares & mask) as i128 - n * low - 2 * m * r;
        let high = (i128::from(self.carries) << 64 | (self.squares >> 64) as i128) - n * high + (low >> 64);
        let about_m = high as f64 * 2f64.powi(64) + (low.cast_unsigned() & mask) as f64;
        // r^2 / n is at most half of it, as |r| <= n / 2 and |r| <= sum |x - m|.
        let spread = about_m - (r as f64).powi(2) / n as f64;
        (spread.max(0.0) / n as f64).sqrt() / f64::from(self.scale)
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
            prop_assert!((merged.mean() - mean).abs() < 2.4e-10);
            prop_assert!((merged.deviation() - variance.sqrt()).abs() < 2.4e-10);
        }
    }

    #[test]
    fn words_carry_the_moments() {
        let mut m = Moments::of_temperature(0.5);
        [-3.25f32, 700.0, 1e9, -1e9, 0.0].into_iter().for_each(|l| m.push(l));
        assert_eq!(Moments::from_words(m.to_words(), 0.5, 5), Some(m));
        assert_eq!(Moments::from_words(m.to_words(), 0.5, 4), None);
        for word in [2, 5] {
            let mut words = m.to_words();
            words[word] ^= 1 << 62;
            assert_eq!(Moments::from_words(words, 0.5, 5), None, "word {word}");
        }
    }

    #[test]
    fn nearly_equal_logits_have_their_deviation() {
        // Grids of 2^-12 nat, as they were once: what is summed here is of logits that large.
        let coarse = |logits: &[f32], temperature: f32| {
            let mut m = Moments::default();
            logits.iter().for_each(|l| m.push((l * temperature * 4096.0).round_ties_even()));
            m.deviation() / 4096.0
        };
        let mut missed = 0;
        for (shift, size) in [(0.0, 1e-8), (0.0, 1e-6), (1.0, 3e-6), (-64.0, 1e-4), (3e5, 0.1), (0.0, 100.0)] {
            for temperature in [1.0, 0.7, 1e4] {
                let logits: Vec<f32> =
                    (0..1000).map(|i| (shift + size * (i * 37 % 101) as f32) * (1.0 / temperature)).collect();
                let mut m = Moments::of_temperature(temperature);
                logits.iter().for_each(|&l| m.push(l));
                let all = || logits.iter().map(|&l| f64::from(l) * f64::from(temperature));
                let mean = all().sum::<f64>() / 1000.0;
                let want = (all().map(|l| (l - mean).powi(2)).sum::<f64>() / 1000.0).sqrt();
                let off = |found: f64| (found - want).abs() - 1e-12 * want;
                let found = m.deviation() * f64::from(temperature);
                assert!(off(found) < 2.4e-10, "{shift} and {size}, {temperature}: {found}, not {want}");
                missed += u32::from(off(coarse(&logits, temperature)) > 2.4e-10);
            }
        }
        assert!(missed >= 9, "the coarse grid misses {missed}");
    }

    #[test]
    fn sums_of_many_of_the_largest_do_not_overflow() {
        let mut half = Moments::default();
        half.push(f32::MAX);
        let (mut all, mut other) = (half, Moments::default());
        other.push(f32::MIN);
        for _ in 0..31 {
            let (a, b) = (half, other);
            half.merge(&a);
            other.merge(&b);
            all = half;
        }
        // 2^31 of each sign less one.
        all.merge(&other);
        let words = all.to_words();
        assert_eq!((all.count(), all.mean(), words[3..].to_vec()), (1 << 32, 0.0, vec![0, 0, 1 << 24]));
        assert_eq!(all.deviation(), 2f64.powi(28));
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
