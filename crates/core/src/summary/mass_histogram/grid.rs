//! The absolute grid of bins: the bin of a logit, and the logit's mass in it.

/// Number of bins: the highest bin and the bins below it.
pub(super) const BINS: usize = 512;
/// Bins per nat.
pub(super) const PER_NAT: f32 = 8.0;
/// The range of the bins, in nats; `e^-64` of a mass is below the last bit of a float64.
pub(super) const WINDOW: f32 = 64.0;
/// One unit of mass is 2^-30 of the mass at a bin's lower edge: 2^32 tokens cannot overflow a bin.
pub(super) const UNIT: f32 = 1_073_741_824.0;
/// `e^r = 1 + r + r^2 p(r)` on `[0, 1/8]`, relative error 2^-29.7 (docs/noise/minimax.py).
pub(super) const P: [f32; 3] = [f32::from_bits(0x3f00_0057), f32::from_bits(0x3e2a_7721), f32::from_bits(0x3d34_1741)];

/// The lower edge of a logit's bin.
#[inline(always)]
pub(crate) fn edge_of(logit: f32) -> f32 {
    // Floats from 2^21 on are multiples of 1/8, and their products may overflow.
    // + 0 turns the edge -0 into +0.
    if logit.abs() < 2_097_152.0 { (logit * PER_NAT).floor() / PER_NAT + 0.0 } else { logit }
}

/// The mass of a logit in the bin with this edge.
#[inline(always)]
pub(super) fn mass_in(edge: f32, logit: f32) -> u32 {
    // Exact: both terms are multiples of the logit's last place.
    let r = logit - edge;
    let p = P[2].mul_add(r, P[1]).mul_add(r, P[0]);
    UNIT as u32 + truncated((r * r).mul_add(p, r) * UNIT)
}

/// The integer part of a float from 0 up to 2^35. The low bits of sums with 2^23 give its two halves.
///
/// Saturating conversions do not vectorize: they took 4.2 ns per logit, this takes 2.4 (on a busy Xeon with AVX-512).
#[inline(always)]
fn truncated(x: f32) -> u32 {
    const LOW: f32 = 4096.0;
    let bits = |x: f32| (x + 8_388_608.0).to_bits() & 0x7f_ffff;
    let whole = x.floor();
    let high = (whole / LOW).floor();
    (bits(high) << 12) + bits(whole - high * LOW)
}

#[inline(always)]
pub(super) fn slot_of(edge: f32) -> usize {
    if edge.abs() < 2_097_152.0 {
        ((edge * PER_NAT) as i32 & (BINS as i32 - 1)) as usize
    } else {
        (edge.rem_euclid(WINDOW) * PER_NAT) as usize
    }
}

/// The edge of the bin `below` bins below the bin with edge `top`. Both edges must be small.
#[inline(always)]
pub(crate) fn edge_below(top: f32, below: usize) -> f32 {
    top - below as f32 / PER_NAT
}

/// The edges of a window, from the top down. For huge logits several steps may round to one edge, which comes once.
pub(super) fn edges(top: f32) -> impl Iterator<Item = f32> {
    let mut last = f32::INFINITY;
    (0..BINS).filter_map(move |below| {
        let edge = edge_below(top, below);
        let fresh = edge < last && top - edge < WINDOW;
        last = edge;
        fresh.then_some(edge)
    })
}
