//! Pseudo-random numbers for test inputs: stateless hashes of (seed, index), equal on every machine.

/// Hashes (seed, index) to 64 well-mixed bits by the finaliser of splitmix64 (Steele et al. 2014).
pub fn hash(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns a uniform in the open interval (0, 1).
pub fn u01_open(seed: u64, index: u64) -> f64 {
    ((hash(seed, index) >> 12) as f64 + 0.5) / (1u64 << 52) as f64
}

/// Returns a standard normal (Box & Muller 1958).
pub fn normal(seed: u64, index: u64) -> f64 {
    let radius = (-2.0 * u01_open(seed, 2 * index).ln()).sqrt();
    radius * (core::f64::consts::TAU * u01_open(seed, 2 * index + 1)).cos()
}

/// Returns a uniform integer in `-limit ..= limit`.
pub fn small_integer(seed: u64, index: u64, limit: i32) -> i32 {
    (hash(seed, index) % (2 * limit as u64 + 1)) as i32 - limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_the_right_moments() {
        let n = 100_000;
        let moment = |k: i32| (0..n).map(|i| normal(3, i).powi(k)).sum::<f64>() / n as f64;
        assert!(moment(1).abs() < 0.02 && (moment(2) - 1.0).abs() < 0.02 && (moment(4) - 3.0).abs() < 0.2);
    }

    #[test]
    fn small_integers_reach_both_ends() {
        let all: Vec<i32> = (0..1000).map(|i| small_integer(5, i, 2)).collect();
        assert_eq!((all.iter().min(), all.iter().max()), (Some(&-2), Some(&2)));
    }
}
