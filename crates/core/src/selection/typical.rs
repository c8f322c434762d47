//! Locally typical sampling (Meister et al. 2023).

use crate::winner::Candidate;
use core::ops::Range;

/// The tokens whose surprisal is nearest to the entropy, until their probability reaches `p`: from the token at the
/// entropy outwards, the nearer side first.
pub(super) fn typical(listed: &[Candidate], p: f64) -> Range<usize> {
    let max = f64::from(listed[0].logit);
    let sum: f64 = listed.iter().map(|c| (f64::from(c.logit) - max).exp()).sum();
    let log_z = max + sum.ln();
    let surprisal = |i: usize| log_z - f64::from(listed[i].logit);
    let entropy: f64 = (0..listed.len()).map(|i| surprisal(i) * (-surprisal(i)).exp()).sum();
    let split = listed.partition_point(|c| log_z - f64::from(c.logit) < entropy);
    let (mut kept, mut mass) = (split..split, 0.0);
    while mass < p && kept.len() < listed.len() {
        let up = (kept.start > 0).then(|| entropy - surprisal(kept.start - 1));
        let down = (kept.end < listed.len()).then(|| surprisal(kept.end) - entropy);
        let i = match (up, down) {
            (Some(up), down) if down.is_none_or(|down| up <= down) => {
                kept.start -= 1;
                kept.start
            }
            _ => {
                kept.end += 1;
                kept.end - 1
            }
        };
        mass += (-surprisal(i)).exp();
    }
    kept
}
