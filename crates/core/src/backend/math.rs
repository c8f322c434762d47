//! `exp` and `tanh` in float32 fused multiply-adds, with the same bits in scalar Rust, SIMD and CUDA.
//! `docs/noise/minimax.py` made the polynomials.

use crate::noise::log::{LN_2_HI, LN_2_LO};

const EXP: [f32; 5] = [
    f32::from_bits(0x3eff_fffe),
    f32::from_bits(0x3e2a_aa49),
    f32::from_bits(0x3d2a_ac79),
    f32::from_bits(0x3c09_1cea),
    f32::from_bits(0x3ab5_122f),
];
const TANH: [f32; 5] = [
    f32::from_bits(0xbeaa_aa99),
    f32::from_bits(0x3e08_8393),
    f32::from_bits(0xbd5c_1e2d),
    f32::from_bits(0x3ca9_134d),
    f32::from_bits(0xbbba_f0e5),
];
/// 1.5 * 2^23: adding and subtracting it rounds to the nearest integer.
const ROUND: f32 = 12_582_912.0;

/// `e^x`, relative error below 1.5e-7; arguments are clamped to `[-87, 88]`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if x < -87.0 { -87.0 } else { x };
    let k = x.mul_add(core::f32::consts::LOG2_E, ROUND) - ROUND;
    let r = k.mul_add(-LN_2_LO, k.mul_add(-LN_2_HI, x));
    let mut p = EXP[4];
    p = p.mul_add(r, EXP[3]);
    p = p.mul_add(r, EXP[2]);
    p = p.mul_add(r, EXP[1]);
    p = p.mul_add(r, EXP[0]);
    let y = (r * r).mul_add(p, r) + 1.0;
    f32::from_bits((y.to_bits() as i32).wrapping_add((k as i32) << 23) as u32)
}

/// `tanh x`, relative error below 4e-7, for any finite `x`.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    if a < 0.625 {
        let z = x * x;
        let mut t = TANH[4];
        t = t.mul_add(z, TANH[3]);
        t = t.mul_add(z, TANH[2]);
        t = t.mul_add(z, TANH[1]);
        t = t.mul_add(z, TANH[0]);
        (x * z).mul_add(t, x)
    } else {
        (1.0 - 2.0 / (exp(a + a) + 1.0)).copysign(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate() {
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 1.5e-7, "exp({x})");
        }
    }

    #[test]
    fn tanh_is_accurate() {
        for i in -200_000..=200_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).tanh();
            let error = (f64::from(tanh(x)) - exact).abs();
            assert!(error <= 4e-7 * exact.abs(), "tanh({x}) is off by {error:e}");
        }
        assert_eq!(tanh(1e9), 1.0);
        assert_eq!(tanh(f32::MAX), 1.0);
    }
}
