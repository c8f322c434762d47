//! The scales of 16 tokens in the lanes of a vector, for each block type.

use super::codes::Codes;
use crate::dot::blocks::formats::Format;
use core::arch::x86_64::*;
use flash_sampling_core::DType;

/// A block type that AMX tiles multiply. A *span* is the weights that share a scale.
pub(super) trait SlabFormat: Codes + Format {
    /// Whether tiles are loaded directly from the weight. A block of such a type is a scale in f16, followed by codes
    /// of one byte.
    const IN_PLACE: bool = matches!(Self::DTYPE, DType::Q8_0);
    /// The number of weights in a span.
    const SPAN: usize = if matches!(Self::DTYPE, DType::Q6_K) { 16 } else { 32 };
    /// The number of spans in a unit.
    const SPANS: usize = Self::GROUPS * 64 / Self::SPAN;
    /// The number of vectors of a unit: the scale of each span, then the minimum of each span for types with minima.
    const VECTORS: usize = Self::SPANS * if Self::HAS_MINIMA { 2 } else { 1 };
}

impl<T: Codes + Format> SlabFormat for T {}

/// The units of 16 tokens at one position of their rows.
#[derive(Clone, Copy)]
pub(super) struct Units {
    /// The address of the first token's unit.
    pub(super) first: *const u8,
    /// The offset of each token's unit from the first, in bytes, with one token in each lane.
    pub(super) offsets: __m512i,
}

impl Units {
    /// Returns the four bytes at offset `at` of each unit.
    ///
    /// # Safety
    /// AVX-512 F is available, and the bytes are readable.
    #[inline(always)]
    unsafe fn words(self, at: usize) -> __m512i {
        // SAFETY: by this function's contract.
        unsafe { _mm512_i32gather_epi32::<1>(self.offsets, self.first.add(at).cast()) }
    }

    /// Writes the vectors of a unit to `out`, 16 floats each.
    ///
    /// # Safety
    /// AVX-512 F, BW, DQ and VL are available, the units are readable, and `out` has room for the vectors.
    #[inline(always)]
    pub(super) unsafe fn write_scales<T: SlabFormat>(self, out: *mut f32) {
        // SAFETY: by this function's contract; the words are inside a unit.
        unsafe {
            match T::DTYPE {
                // `packed_scales_and_minima` decodes the same bits of one token.
                DType::Q4_K | DType::Q5_K => {
                    let [factors, a, b, c] = [self.words(0), self.words(4), self.words(8), self.words(12)];
                    let masked = |words: __m512i, mask: i32| _mm512_and_si512(words, _mm512_set1_epi32(mask));
                    let two_high_bits = |words: __m512i| masked(_mm512_srli_epi32::<2>(words), 0x3030_3030);
                    let (scale, minimum) = (halves(factors), halves(_mm512_srli_epi32::<16>(factors)));
                    write_bytes(masked(a, 0x3f3f_3f3f), false, scale, out);
                    write_bytes(_mm512_or_si512(masked(c, 0x0f0f_0f0f), two_high_bits(a)), false, scale, out.add(64));
                    write_bytes(masked(b, 0x3f3f_3f3f), false, minimum, out.add(128));
                    let low = masked(_mm512_srli_epi32::<4>(c), 0x0f0f_0f0f);
                    write_bytes(_mm512_or_si512(low, two_high_bits(b)), false, minimum, out.add(192));
                }
                // The factor of all scales is in the last two bytes of the block.
                DType::Q6_K => {
                    let factor = halves(_mm512_srli_epi32::<16>(self.words(206)));
                    for four in 0..4 {
                        write_bytes(self.words(192 + 4 * four), true, factor, out.add(64 * four));
                    }
                }
                // A unit is two blocks, each with its scale at the start.
                _ => {
                    for block in 0..2 {
                        let words = self.words(block * T::UNIT_BYTES / 2);
                        let is_power = matches!(T::DTYPE, DType::MXFP4);
                        _mm512_storeu_ps(out.add(16 * block), if is_power { powers(words) } else { halves(words) });
                    }
                }
            }
        }
    }
}

/// Converts the low half of each word, an f16, to float32.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn halves(words: __m512i) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)) }
}

/// Converts the low byte of each word, an exponent, to a scale, as
/// [`mxfp4_scale`](flash_sampling_core::backend::mxfp4_scale) does.
///
/// # Safety
/// AVX-512 F is available.
#[inline(always)]
unsafe fn powers(words: __m512i) -> __m512 {
    // SAFETY: by this function's contract.
    unsafe {
        let e = _mm512_and_si512(words, _mm512_set1_epi32(255));
        let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(e, _mm512_set1_epi32(1)));
        let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), e);
        let is_subnormal = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
        _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_subnormal, normal, subnormal))
    }
}

/// Multiplies the four bytes of each word by the factor of its lane. Writes 16 floats for each of the four bytes.
///
/// # Safety
/// AVX-512 F is available, and 64 floats are writable.
#[inline(always)]
unsafe fn write_bytes(words: __m512i, is_signed: bool, factor: __m512, out: *mut f32) {
    for byte in 0..4u32 {
        // SAFETY: by this function's contract.
        unsafe {
            // The first shift moves the byte to the top of its word. The second shift moves the byte to the bottom, and
            // extends it by its sign or by zeros.
            let high = _mm512_sllv_epi32(words, _mm512_set1_epi32(24 - 8 * byte as i32));
            let byte_of_each = if is_signed { _mm512_srai_epi32::<24>(high) } else { _mm512_srli_epi32::<24>(high) };
            let product = _mm512_mul_ps(_mm512_cvtepi32_ps(byte_of_each), factor);
            _mm512_storeu_ps(out.add(16 * byte as usize), product);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use flash_sampling_core::backend::mxfp4_scale;

    /// # Safety
    /// AVX-512 F is available.
    #[target_feature(enable = "avx512f")]
    unsafe fn check() {
        for e in 0..=255u8 {
            let mut found = [0f32; 16];
            // SAFETY: by this function's contract; the array has 16 floats. The higher bytes of a word do not count.
            unsafe { _mm512_storeu_ps(found.as_mut_ptr(), powers(_mm512_set1_epi32(0x0731_0500 | i32::from(e)))) };
            assert_eq!(found.map(f32::to_bits), [mxfp4_scale(e).to_bits(); 16], "{e}");
        }
    }

    #[test]
    fn powers_are_the_scales_of_mxfp4() {
        if Isa::Avx512.is_available() {
            // SAFETY: just checked.
            unsafe { check() }
        }
    }
}
