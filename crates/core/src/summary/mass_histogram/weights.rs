//! Powers of `e` in steps of an eighth.

use super::{BINS, FAST, PER_NAT};
use std::sync::LazyLock;

/// `e^(-1/8)`, from one edge to the next.
pub(crate) const STEP: f64 = 0.882_496_902_584_595_4;

/// `e^(-n/8)`: walks that took an exponential for each bin of a row spent half of their time on those.
static WEIGHTS: LazyLock<[f64; BINS]> =
    LazyLock::new(|| core::array::from_fn(|below| (-(below as f64) / f64::from(PER_NAT)).exp()));

/// `e^(edge - top)` of two edges.
pub(crate) fn weight_of(edge: f32, top: f32) -> f64 {
    let below = (top - edge) * PER_NAT;
    if top.abs() < FAST && (0.0..BINS as f32).contains(&below) {
        // Exact: the difference is a multiple of 1/8, and the table has the exponential of just that.
        WEIGHTS[below as usize]
    } else {
        (f64::from(edge) - f64::from(top)).exp()
    }
}

/// A number that `e^-nats` is not above, and up to 64 nats at most an eighth of a nat below; `nats` is not negative.
#[inline(always)]
pub(crate) fn weight_below(nats: f64) -> f64 {
    WEIGHTS[((nats * f64::from(PER_NAT)) as usize).min(BINS - 1)]
}

/// `e^(-n/8)`: what the bins below the highest weigh.
pub(crate) fn weights() -> &'static [f64; BINS] {
    &WEIGHTS
}
