//! Locally typical sampling (Meister et al. 2023).

use crate::summary::winner::Candidate;
use core::ops::Range;

/// The tokens with surprisals nearest to the entropy, until their probability reaches `p`.
///
/// The run grows from the entropy outwards, the nearer side first. Of equal logits with a surprisal of at least the
/// entropy, it keeps the lower tokens; of others, the higher tokens.
pub(super) fn typical(listed: &[Candidate], p: f64) -> Range<usize> {
    // Surprisal and entropy, both minus the first token's surprisal. So equal logits are exactly at the entropy.
    let fall = |i: usize| f64::from(listed[0].logit) - f64::from(listed[i].logit);
    let weight = |i: usize| (-fall(i)).exp();
    let sum: f64 = (0..listed.len()).map(weight).sum();
    let entropy: f64 = (0..listed.len()).map(|i| weight(i) / sum * fall(i)).sum();
    let split = listed.partition_point(|c| f64::from(listed[0].logit) - f64::from(c.logit) < entropy);
    // Weights instead of probabilities: the weights of equal logits have exact sums.
    let (mut kept, mut mass) = (split..split, 0.0);
    while mass < p * sum && kept.len() < listed.len() {
        let up = (kept.start > 0).then(|| entropy - fall(kept.start - 1));
        let down = (kept.end < listed.len()).then(|| fall(kept.end) - entropy);
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
        mass += weight(i);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::winner::Winner;

    #[test]
    fn equal_logits_are_kept_from_the_lowest_token_whatever_their_number_and_size() {
        for n in [2, 3, 300, 3001] {
            for logit in [0.0, -7.3, 1e15, 3e38] {
                let listed = vec![Candidate { winner: Winner::NONE, logit }; n];
                assert_eq!(typical(&listed, 0.5), 0..n.div_ceil(2), "{n} logits of {logit}");
            }
        }
    }
}
