//! The transform from raw logits to transformed logits of one row.

use crate::error::RowError;
use crate::params::adjustments::Adjustment;

/// Mask, adjustments (bias, bans, penalties) and temperature of one row, in this order.
#[derive(Clone, Copy, Debug)]
pub struct RowTransform<'a> {
    /// See [`RowParams::mask`](crate::RowParams::mask).
    pub mask: Option<&'a [u32]>,
    /// Biases, bans and penalties, tokens strictly ascending ([`Adjustments`](crate::backend::Adjustments)).
    pub adjustments: &'a [Adjustment],
    /// 1 / temperature, rounded once. It is 1 for a greedy row, and for a row with filters before the temperature.
    pub inv_temperature: f32,
}

impl RowTransform<'_> {
    /// Transforms raw logits in place; `logits[i]` belongs to token `first + i`.
    #[inline(always)]
    pub fn apply(&self, first: u32, logits: &mut [f32]) {
        if let Some(mask) = self.mask {
            apply_mask(mask, first, logits);
        }
        if !self.adjustments.is_empty() {
            let from = self.adjustments.partition_point(|a| a.token < first);
            for adjustment in &self.adjustments[from..] {
                let Some(l) = logits.get_mut((adjustment.token - first) as usize) else { break };
                *l = adjustment.apply(*l);
            }
        }
        if self.inv_temperature != 1.0 {
            for l in logits {
                *l *= self.inv_temperature;
            }
        }
    }
}

/// Whether `token` is allowed: its bit is set and not beyond the end of the bitmap.
pub fn is_allowed(mask: &[u32], token: u32) -> bool {
    mask.get((token >> 5) as usize).is_some_and(|word| word >> (token & 31) & 1 == 1)
}

/// Sets the logits of forbidden tokens to -inf, one mask word at a time.
fn apply_mask(mask: &[u32], first: u32, logits: &mut [f32]) {
    let mut at = 0;
    while at < logits.len() {
        let token = first + at as u32;
        let bit = token & 31;
        let run = (32 - bit as usize).min(logits.len() - at);
        let word = mask.get((token >> 5) as usize).map_or(0, |w| w >> bit);
        if word == 0 {
            logits[at..at + run].fill(f32::NEG_INFINITY);
        } else if word.trailing_ones() < run as u32 {
            for (i, l) in logits[at..at + run].iter_mut().enumerate() {
                if word >> i & 1 == 0 {
                    *l = f32::NEG_INFINITY;
                }
            }
        }
        at += run;
    }
}

/// Whether any logit is NaN or +inf; `-inf` is a masked token.
#[inline(always)]
pub fn any_invalid(logits: &[f32]) -> bool {
    let mut invalid = false;
    for &l in logits {
        invalid |= l.is_nan() | (l == f32::INFINITY);
    }
    invalid
}

/// The error of the first NaN or +inf of `logits`.
#[cold]
pub fn first_invalid(first: u32, logits: &[f32]) -> Option<RowError> {
    let at = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY)?;
    let token = first + at as u32;
    Some(if logits[at].is_nan() { RowError::NaN { token } } else { RowError::PositiveInfinity { token } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_mask_is_applied_bit_by_bit(mask in prop::collection::vec(prop_oneof![Just(!0u32), any::<u32>()], 0..6),
                                          first in 0u32..70, n in 0usize..150) {
            let mut logits = vec![1.0f32; n];
            apply_mask(&mask, first, &mut logits);
            for (i, l) in logits.iter().enumerate() {
                prop_assert_eq!(*l == 1.0, is_allowed(&mask, first + i as u32));
            }
        }

        #[test]
        fn a_split_gives_the_same_logits(split in 0usize..40, penalties: bool, bias in prop::collection::btree_map(0u32..60, -2f32..2.0, 0..9)) {
            let (repetition, subtract) = if penalties { (1.3, 0.5) } else { (1.0, 0.0) };
            let item = |(token, bias)| Adjustment { token, bias, repetition, subtract };
            let adjustments: Vec<_> = bias.into_iter().map(item).collect();
            let mask = Some(&[0xffff_0fff, 0x1234_5678][..]);
            let t = RowTransform { mask, adjustments: &adjustments, inv_temperature: 0.7 };
            let mut whole: Vec<f32> = (0..40).map(|i| i as f32).collect();
            let mut parts = whole.clone();
            t.apply(7, &mut whole);
            let (a, b) = parts.split_at_mut(split);
            t.apply(7, a);
            t.apply(7 + split as u32, b);
            prop_assert_eq!(whole, parts);
        }
    }

    #[test]
    fn the_first_invalid_logit_is_named() {
        let l = [0.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN];
        assert!(any_invalid(&l) && !any_invalid(&l[..2]));
        assert_eq!(first_invalid(10, &l), Some(RowError::PositiveInfinity { token: 12 }));
        assert_eq!(first_invalid(10, &l[3..]), Some(RowError::NaN { token: 10 }));
        assert_eq!(first_invalid(10, &l[..2]), None);
    }
}
