//! `ln` and `-ln(1 - v)` in float32 fused multiply-adds: the same operations in the same order in scalar Rust, SIMD and
//! CUDA, so noise has the same bits everywhere.
//!
//! Both reduce to `ln(1 + f)` with `f` in `[sqrt(1/2) - 1, sqrt(2) - 1]`, and one minimax polynomial from
//! `docs/noise/minimax.py`: `ln(1 + f) = f - f^2 / 2 + f^3 q(f)`, relative error 2^-27.2 before rounding. Rare tokens
//! need the relative accuracy near `v -> 0`: the winner of a large vocabulary has an exponential of about 1e-5 or less.

const Q: [f32; 8] = [
    f32::from_bits(0x3eaa_aaaa),
    f32::from_bits(0xbe80_0113),
    f32::from_bits(0x3e4c_d004),
    f32::from_bits(0xbe2a_3923),
    f32::from_bits(0x3e11_6d0c),
    f32::from_bits(0xbe06_c29a),
    f32::from_bits(0x3e02_adc5),
    f32::from_bits(0xbd9c_5b0c),
];
/// High part of ln 2: its low bits are zero, so small multiples are exact.
pub(crate) const LN_2_HI: f32 = f32::from_bits(0x3f31_8000);
/// The rest of ln 2.
pub(crate) const LN_2_LO: f32 = f32::from_bits(0xb95e_8083);
/// The bits of the float32 nearest to sqrt(1/2), the smallest reduced argument.
const SQRT_HALF_BITS: i32 = 0x3f35_04f3;
/// 1 - sqrt(1/2): up to this `v`, `1 - v` needs no scaling.
const SPLIT: f32 = 0.292_893_23;

/// `ln(1 + f) + k ln 2` for `f` in `[sqrt(1/2) - 1, sqrt(2) - 1]`.
#[inline(always)]
fn ln_1p_reduced(f: f32, k: f32) -> f32 {
    let mut q = Q[7];
    q = q.mul_add(f, Q[6]);
    q = q.mul_add(f, Q[5]);
    q = q.mul_add(f, Q[4]);
    q = q.mul_add(f, Q[3]);
    q = q.mul_add(f, Q[2]);
    q = q.mul_add(f, Q[1]);
    q = q.mul_add(f, Q[0]);
    let r = (f * f).mul_add(f.mul_add(q, -0.5), f);
    k.mul_add(LN_2_HI, k.mul_add(LN_2_LO, r))
}

/// `ln x` for positive, normal, finite `x`; relative error below 2^-22.9.
///
/// Other arguments give an unspecified result.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    let bits = x.to_bits() as i32;
    let k = bits.wrapping_sub(SQRT_HALF_BITS) >> 23;
    let m = f32::from_bits(bits.wrapping_sub(k << 23) as u32);
    ln_1p_reduced(m - 1.0, k as f32)
}

/// `-ln(1 - v)` for `v` in `(0, 1/2]`; relative error below 2^-22.9, also as `v -> 0`.
///
/// Other arguments give an unspecified result.
#[inline(always)]
pub fn neg_ln_1m(v: f32) -> f32 {
    // 1 - v = 2^k (1 + f), and f is exact in both branches.
    let (f, k) = if v <= SPLIT { (-v, 0.0) } else { ((-2.0f32).mul_add(v, 1.0), -1.0) };
    -ln_1p_reduced(f, k)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Largest relative error of `f` against `exact` over every `stride`-th float in `[lo, hi]`.
    fn worst(lo: f32, hi: f32, stride: usize, f: fn(f32) -> f32, exact: fn(f64) -> f64) -> (f64, f32) {
        (lo.to_bits()..=hi.to_bits())
            .step_by(stride)
            .map(f32::from_bits)
            .map(|x| ((f64::from(f(x)) / exact(f64::from(x)) - 1.0).abs(), x))
            .filter(|(e, _)| e.is_finite())
            .fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
    }

    const BOUND: f64 = 1.28e-7; // 2^-22.9

    fn ln_is_accurate(stride: usize) {
        // Every exponent of the noise, and a margin.
        let (e, x) = worst(2f32.powi(-70), 2f32.powi(10), stride, ln, f64::ln);
        assert!(e < BOUND, "ln({x}) is off by {e:e}");
    }

    fn neg_ln_1m_is_accurate(stride: usize) {
        let (e, x) = worst(2f32.powi(-66), 0.5, stride, neg_ln_1m, |v| -(-v).ln_1p());
        assert!(e < BOUND, "neg_ln_1m({x}) is off by {e:e}");
    }

    #[test]
    fn ln_is_accurate_on_a_stride() {
        ln_is_accurate(1009);
    }

    #[test]
    fn neg_ln_1m_is_accurate_on_a_stride() {
        neg_ln_1m_is_accurate(1009);
    }

    #[test]
    #[ignore = "exhaustive: minutes; the stride above runs in CI"]
    fn logs_are_accurate_on_every_float() {
        ln_is_accurate(1);
        neg_ln_1m_is_accurate(1);
    }

    #[test]
    fn ln_of_one_is_zero() {
        assert_eq!(ln(1.0).to_bits(), 0);
    }
}
