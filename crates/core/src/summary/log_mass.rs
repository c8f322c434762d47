//! Streaming log-sum-exp.

/// The log-mass of a set of logits, `ln sum e^l`, as a running maximum and a sum relative to it
/// (Milakov & Gimelshein 2018).
///
/// [`merge`](LogMass::merge) is commutative, and associative up to rounding; the identity is [`LogMass::EMPTY`].
/// [`MassHistogram`](crate::backend::MassHistogram) gives a result that does not depend on the order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogMass {
    /// The reference logit, in nats; -inf when the set is empty. It is the largest logit, or for a mass from a
    /// histogram the edge of its bin, at most 1/8 nat lower.
    pub max: f32,
    /// `sum e^(l - max)`; 0 when the set is empty.
    pub sum: f64,
}

impl LogMass {
    /// The mass of the empty set: log-mass -inf.
    pub const EMPTY: LogMass = LogMass { max: f32::NEG_INFINITY, sum: 0.0 };

    /// The mass of one logit; `-inf` is the empty set.
    pub fn of(logit: f32) -> LogMass {
        if logit == f32::NEG_INFINITY { LogMass::EMPTY } else { LogMass { max: logit, sum: 1.0 } }
    }

    /// The mass of a slice of logits, in its order.
    pub fn of_slice(logits: &[f32]) -> LogMass {
        logits.iter().fold(LogMass::EMPTY, |mass, &l| mass.merge(LogMass::of(l)))
    }

    /// The mass of the union of two disjoint sets.
    #[must_use]
    pub fn merge(self, other: LogMass) -> LogMass {
        let (high, low) = if self.max >= other.max { (self, other) } else { (other, self) };
        if low.sum == 0.0 {
            return high;
        }
        let scale = (f64::from(low.max) - f64::from(high.max)).exp();
        LogMass { max: high.max, sum: high.sum + low.sum * scale }
    }

    /// Whether the set has no mass.
    pub fn is_empty(&self) -> bool {
        self.sum == 0.0
    }

    /// The log-mass in nats; -inf for the empty set.
    pub fn value(&self) -> f64 {
        f64::from(self.max) + self.sum.ln()
    }

    /// `e^L_B / (e^L_A + e^L_B)` with `self` = A: the probability that the binary merge takes B.
    pub fn replace_probability(&self, b: &LogMass) -> f64 {
        if b.is_empty() {
            return 0.0;
        }
        if self.is_empty() {
            return 1.0;
        }
        let ratio = self.sum / b.sum * (f64::from(self.max) - f64::from(b.max)).exp();
        1.0 / (1.0 + ratio)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn logits() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(prop_oneof![4 => -80f32..80.0, 1 => Just(f32::NEG_INFINITY)], 0..20)
    }

    fn close(a: LogMass, b: LogMass) -> bool {
        a.value() == b.value() || (a.value() - b.value()).abs() < 1e-12 * (1.0 + a.value().abs())
    }

    proptest! {
        #[test]
        fn merge_is_a_commutative_monoid_up_to_rounding(a in logits(), b in logits(), c in logits()) {
            let [a, b, c] = [a, b, c].map(|l| LogMass::of_slice(&l));
            prop_assert_eq!(a.merge(LogMass::EMPTY), a);
            prop_assert_eq!(LogMass::EMPTY.merge(a), a);
            prop_assert!(close(a.merge(b), b.merge(a)));
            prop_assert!(close(a.merge(b).merge(c), a.merge(b.merge(c))));
        }

        #[test]
        fn the_value_is_the_log_sum_exp(l in logits()) {
            let sum: f64 = l.iter().map(|&l| f64::from(l).exp()).sum();
            let value = LogMass::of_slice(&l).value();
            prop_assert!(value == sum.ln() || (value - sum.ln()).abs() < 1e-12 * (1.0 + value.abs()));
        }
    }

    #[test]
    fn the_empty_set_never_replaces() {
        let some = LogMass::of(-1e30);
        assert_eq!(some.replace_probability(&LogMass::EMPTY), 0.0);
        assert_eq!(LogMass::EMPTY.replace_probability(&some), 1.0);
        assert_eq!(LogMass::EMPTY.replace_probability(&LogMass::EMPTY), 0.0);
        assert_eq!(LogMass::EMPTY.value(), f64::NEG_INFINITY);
    }
}
