//! Decodes blocks of quantised weights: the definition of every block type.
//!
//! All types have the same form: 32 consecutive weights are `scale * code - minimum`, with 8-bit codes, and a scale and a
//! minimum for each half of 16 weights. Scales and minima are exact in float32. Weights of types without minima are
//! exact in float32 too, and all weights are exact in float64.

use super::dtype::DType;
use half::f16;

/// Number of weights of a [`Span`].
pub const SPAN: usize = 32;
/// Number of weights that share a scale and a minimum.
const HALF: usize = SPAN / 2;

/// The table of `IQ4_NL`.
pub const IQ4_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The values of e2m1 times two: the table of `MXFP4`.
pub const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// 32 consecutive weights: `scales[i / 16] * codes[i] - minima[i / 16]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The integer of each weight.
    pub codes: [i8; SPAN],
    /// The scale of each half.
    pub scales: [f32; 2],
    /// The minimum of each half; 0 for types without minima.
    pub minima: [f32; 2],
}

/// The little-endian f16 at `at`.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Unpacks 16 bytes to 32 codes: the low nibbles first, then the high nibbles.
#[inline(always)]
fn nibbles(bytes: &[u8], code: impl Fn(u8) -> i8) -> [i8; SPAN] {
    core::array::from_fn(|i| code(if i < HALF { bytes[i] & 15 } else { bytes[i - HALF] >> 4 }))
}

/// Unpacks the 6-bit scale and minimum of a span of `Q4_K` or `Q5_K` from the 12 bytes of its block.
#[inline(always)]
fn scale_and_minimum(bytes: &[u8], span: usize) -> (u8, u8) {
    if span < 4 {
        return (bytes[span] & 63, bytes[span + 4] & 63);
    }
    let low = bytes[span + 4];
    (low & 15 | bytes[span - 4] >> 6 << 4, low >> 4 | bytes[span] >> 6 << 4)
}

/// The power of two `2^(e - 128)` of an `MXFP4` block.
#[inline(always)]
pub fn mxfp4_scale(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}

impl Span {
    #[inline(always)]
    fn uniform(scale: f32, codes: [i8; SPAN]) -> Span {
        Span { codes, scales: [scale; 2], minima: [0.0; 2] }
    }

    /// Decodes the span number `span` of a block: the 32 weights from `32 * span` on.
    ///
    /// # Panics
    /// If the type has no blocks, `block` is shorter than a block, or `span` is out of range.
    #[inline(always)]
    pub fn decode(dtype: DType, block: &[u8], span: usize) -> Span {
        assert!(SPAN * span < dtype.block_elements(), "{dtype:?} has no span {span}");
        match dtype {
            DType::Q8_0 => Span::uniform(half_at(block, 0), core::array::from_fn(|i| block[2 + i] as i8)),
            DType::Q4_0 => Span::uniform(half_at(block, 0), nibbles(&block[2..18], |q| q as i8 - 8)),
            DType::IQ4_NL => Span::uniform(half_at(block, 0), nibbles(&block[2..18], |q| IQ4_NL[q as usize])),
            DType::MXFP4 => Span::uniform(mxfp4_scale(block[0]), nibbles(&block[1..17], |q| E2M1[q as usize])),
            DType::Q4_K | DType::Q5_K => {
                let (scale, minimum) = scale_and_minimum(&block[4..16], span);
                let is_five = dtype == DType::Q5_K;
                let (low, high) = if is_five { (&block[48..176], &block[16..48]) } else { (&block[16..144], block) };
                let low = &low[span / 2 * SPAN..][..SPAN];
                let codes = core::array::from_fn(|i| {
                    let bit = if is_five { high[i] >> span & 1 } else { 0 };
                    (low[i] >> (span % 2 * 4) & 15 | bit << 4) as i8
                });
                let scale = half_at(block, 0) * f32::from(scale);
                let minimum = half_at(block, 2) * f32::from(minimum);
                Span { codes, scales: [scale; 2], minima: [minimum; 2] }
            }
            DType::Q6_K => {
                // Each half of the block has four spans: the low nibbles of 64 bytes, then the high nibbles.
                let (half, part) = (span / 4, span % 4);
                let low = &block[half * 64 + part % 2 * 32..][..SPAN];
                let high = &block[128 + half * 32..][..SPAN];
                let codes = core::array::from_fn(|i| {
                    (low[i] >> (part / 2 * 4) & 15 | (high[i] >> (part * 2) & 3) << 4) as i8 - 32
                });
                let d = half_at(block, 208);
                let scale = |i: usize| d * f32::from(block[192 + span * 2 + i] as i8);
                Span { codes, scales: [scale(0), scale(1)], minima: [0.0; 2] }
            }
            _ => unreachable!("a type without blocks has no span"),
        }
    }

    /// The exact weights.
    pub fn to_f64(self) -> [f64; SPAN] {
        let Span { codes, scales, minima } = self;
        core::array::from_fn(|i| f64::from(scales[i / HALF]) * f64::from(codes[i]) - f64::from(minima[i / HALF]))
    }

    /// The absolute value of each scaled code plus that of its minimum.
    pub fn magnitudes(self) -> [f32; SPAN] {
        let Span { codes, scales, minima } = self;
        core::array::from_fn(|i| scales[i / HALF].abs() * f32::from(codes[i]).abs() + minima[i / HALF].abs())
    }

    /// The weights, rounded to float32.
    #[inline(always)]
    pub fn to_f32(self) -> [f32; SPAN] {
        if self.minima == [0.0; 2] {
            // Subtracting 0 is exact, and a zero gets the same sign as from a multiply-add.
            return core::array::from_fn(|i| self.scales[i / HALF] * f32::from(self.codes[i]) - self.minima[i / HALF]);
        }
        self.to_f64().map(|weight| weight as f32)
    }
}

/// Decodes consecutive blocks, and calls `write` with each span and the index of its first weight.
pub(crate) fn spans(dtype: DType, bytes: &[u8], mut write: impl FnMut(usize, Span)) {
    let elements = dtype.block_elements();
    for (at, block) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
        (0..elements / SPAN).for_each(|span| write(at * elements + span * SPAN, Span::decode(dtype, block, span)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_without_minima_are_exact_in_float32() {
        // Every pair of an f16 scale and an 8-bit code.
        for bits in 0..=u16::MAX {
            let d = f16::from_bits(bits).to_f32();
            for code in i8::MIN..=i8::MAX {
                let (wide, exact) = (d * f32::from(code), f64::from(d) * f64::from(code));
                assert!(f64::from(wide) == exact || exact.is_nan() && wide.is_nan(), "{d} * {code}");
            }
        }
    }

    #[test]
    fn weights_of_mxfp4_are_exact_unless_they_overflow() {
        for e in 0..=u8::MAX {
            // All 16 codes, as the low halves of the bytes.
            let block: [u8; 17] = core::array::from_fn(|i| if i == 0 { e } else { i as u8 - 1 });
            let span = Span::decode(DType::MXFP4, &block, 0);
            assert_eq!(f64::from(span.scales[0]), 2f64.powi(i32::from(e) - 128));
            for ((times_two, wide), weight) in E2M1.into_iter().zip(span.to_f64()).zip(span.to_f32()) {
                let exact = 2f64.powi(i32::from(e) - 128) * f64::from(times_two);
                let overflows = exact.abs() > f64::from(f32::MAX);
                assert_eq!(wide, exact, "e = {e}");
                assert_eq!(f64::from(weight), if overflows { f64::INFINITY.copysign(exact) } else { exact }, "e = {e}");
            }
            assert_eq!(span.to_f32().iter().any(|weight| weight.is_infinite()), e >= 253, "e = {e}");
        }
    }

    #[test]
    fn products_of_three_factors_are_exact_in_float32() {
        for bits in (0..0x7c00).step_by(31) {
            let d = f16::from_bits(bits);
            for scale in i8::MIN..=i8::MAX {
                for code in -32..32i8 {
                    let exact = d.to_f64() * f64::from(scale) * f64::from(code);
                    assert_eq!(f64::from(d.to_f32() * f32::from(scale) * f32::from(code)), exact);
                }
            }
        }
    }

    #[test]
    fn weights_with_minima_are_rounded_once() {
        let span = Span { codes: [7; SPAN], scales: [1.0 + f32::EPSILON; 2], minima: [0.1; 2] };
        let exact = 7.0 * (1.0 + f64::from(f32::EPSILON)) - f64::from(0.1f32);
        assert_eq!(span.to_f64()[3], exact);
        assert_eq!(span.to_f32()[3], exact as f32);
        assert_ne!(f64::from(span.to_f32()[3]), exact);
    }
}
