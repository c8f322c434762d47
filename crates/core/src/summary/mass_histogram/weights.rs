//! A table of `e^(-n/8)`.

use super::{BINS, FAST, PER_NAT};
use std::sync::LazyLock;

/// `e^(-1/8)`, the weight of one bin relative to the bin above it.
pub(crate) const STEP: f64 = 0.882_496_902_584_595_4;

/// `e^(-n/8)`. Without this table, the exponentials take half of the time of a walk over the bins.
static WEIGHTS: LazyLock<[f64; BINS]> =
    LazyLock::new(|| core::array::from_fn(|below| (-(below as f64) / f64::from(PER_NAT)).exp()));

/// `e^(edge - top)` of two edges.
pub(crate) fn weight_of(edge: f32, top: f32) -> f64 {
    let below = (top - edge) * PER_NAT;
    if top.abs() < FAST && (0.0..BINS as f32).contains(&below) {
        // Exact: the difference is a multiple of 1/8.
        WEIGHTS[below as usize]
    } else {
        (f64::from(edge) - f64::from(top)).exp()
    }
}

/// An upper bound of `e^-nats`, for `nats` of at least 0. Up to 64 nats it is at most 1/8 nat too large.
#[inline(always)]
pub(crate) fn weight_below(nats: f64) -> f64 {
    WEIGHTS[((nats * f64::from(PER_NAT)) as usize).min(BINS - 1)]
}

/// `e^(-n/8)`: the weights of the bins, from the highest down.
pub(crate) fn weights() -> &'static [f64; BINS] {
    &WEIGHTS
}
