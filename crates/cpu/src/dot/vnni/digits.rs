//! Hidden states as three digits of 8 bits and a scale for 16 elements.

use super::codes::Codes;
use core::arch::x86_64::*;

/// Elements of a group, which fill one vector of digits.
pub(crate) const GROUP: usize = 64;
/// Bytes of a packed group: three vectors of digits, 16 scales, two vectors of 16 sums.
pub(crate) const GROUP_BYTES: usize = 384;
/// Elements with a common scale.
const SCALED: usize = 16;
/// The largest absolute value of `2^16 high + 2^8 middle + low` with signed digits.
const MOST: f32 = 8_355_711.0;
/// Exponents of the largest elements of rows with digits.
const EXPONENTS: core::ops::RangeInclusive<i32> = -40..=40;
/// A scale is at most this power of two below the row's largest scale.
const DEPTH: i32 = 40;

/// A packed group of a hidden row. Lane `l` of the last three vectors belongs to the elements `4 l .. 4 l + 4`.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    digits: [__m512i; 3],
    /// The scale of the lane's elements.
    scales: __m512,
    /// Types without minima: minus the offset times the integer sums of the high digits, and of the others, as i32. With
    /// minima, the first vector is the sum of the elements as f32.
    sums: [__m512i; 2],
}

impl Row {
    /// # Safety
    /// AVX-512 F is available, and `at` points to a packed group.
    #[inline(always)]
    pub(crate) unsafe fn load(at: *const u8) -> Row {
        // SAFETY: by this function's contract.
        let vector = |i: usize| unsafe { _mm512_loadu_si512(at.add(64 * i).cast()) };
        // SAFETY: as above.
        let scales = unsafe { _mm512_castsi512_ps(vector(3)) };
        Row { digits: [vector(0), vector(1), vector(2)], scales, sums: [vector(4), vector(5)] }
    }

    /// Adds the products of a group to `sums`.
    ///
    /// # Safety
    /// AVX-512 F and VNNI are available.
    #[inline(always)]
    pub(crate) unsafe fn multiply<T: Codes>(
        &self,
        codes: __m512i,
        scale: __m512,
        minimum: __m512,
        sums: __m512,
    ) -> __m512 {
        // SAFETY: by this function's contract.
        unsafe {
            let zero = _mm512_setzero_si512();
            let begin = if T::HAS_MINIMA { [zero; 2] } else { self.sums };
            let high = _mm512_dpbusd_epi32(begin[0], codes, self.digits[0]);
            let middle = _mm512_dpbusd_epi32(zero, codes, self.digits[1]);
            let low = _mm512_dpbusd_epi32(begin[1], codes, self.digits[2]);
            let low = _mm512_add_epi32(low, _mm512_slli_epi32::<8>(middle));
            let products = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(65536.0), _mm512_cvtepi32_ps(low));
            let sums = _mm512_fmadd_ps(products, _mm512_mul_ps(scale, self.scales), sums);
            if T::HAS_MINIMA { _mm512_fnmadd_ps(_mm512_castsi512_ps(self.sums[0]), minimum, sums) } else { sums }
        }
    }
}

/// The exponent of a positive number; subnormal numbers have that of zero.
fn exponent(x: f32) -> i32 {
    (x.to_bits() >> 23) as i32 - 127
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Packs a hidden row for codes with an offset, or for a type with minima. Returns whether the row has digits: no NaN,
/// no infinity, and a largest element with one of [`EXPONENTS`] (or only zeros).
pub(crate) fn pack(row: &[f32], offset: Option<i32>, out: &mut [u8]) -> bool {
    let largest = largest(row);
    let is_finite = row.iter().all(|x| x.is_finite());
    if !is_finite || largest > 0.0 && !EXPONENTS.contains(&exponent(largest)) {
        return false;
    }
    let least = if largest > 0.0 { power_of_two(exponent(largest) - DEPTH) } else { 1.0 };
    for (row, out) in row.chunks(GROUP).zip(out.chunks_exact_mut(GROUP_BYTES)) {
        for (b, block) in row.chunks(SCALED).enumerate() {
            let scale = scale_of(self::largest(block).max(least));
            for (q, four) in block.chunks(4).enumerate() {
                let lane = b * 4 + q;
                let mut sums = [0i32; 2];
                for (k, x) in four.iter().enumerate() {
                    let v = (x / scale).round_ties_even() as i32;
                    // The lower digits are v modulo a power of two, in -128..128 and -2^15..2^15.
                    let low = v as i8;
                    let lower = v as i16;
                    let middle = (i32::from(lower) - i32::from(low)) >> 8;
                    // The middle digit 128 is -128 and a carry.
                    let middle = middle as i8;
                    let lower = 256 * i32::from(middle) + i32::from(low);
                    let high = (v - lower) >> 16;
                    for (digit, value) in [high as u8, middle as u8, low as u8].into_iter().enumerate() {
                        out[64 * digit + lane * 4 + k] = value;
                    }
                    sums[0] += high;
                    sums[1] += lower;
                }
                let [first, second] = match offset {
                    Some(offset) => sums.map(|sum| (-offset * sum).to_ne_bytes()),
                    None => [((65536 * sums[0] + sums[1]) as f32 * scale).to_ne_bytes(), [0; 4]],
                };
                for (i, value) in [(3, scale.to_ne_bytes()), (4, first), (5, second)] {
                    out[64 * i + lane * 4..][..4].copy_from_slice(&value);
                }
            }
        }
    }
    true
}

/// The largest absolute value, without NaN.
fn largest(row: &[f32]) -> f32 {
    row.iter().fold(0.0f32, |most, x| most.max(x.abs()))
}

/// The least power of two with `x / scale <= MOST`, for a positive normal number.
fn scale_of(x: f32) -> f32 {
    // The quotient is in 2^22 .. 2^23, and a division by a power of two is exact.
    let scale = power_of_two(exponent(x) - 22);
    if x / scale > MOST { 2.0 * scale } else { scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The integer and the scale of an element.
    fn element(group: &[u8], k: usize) -> (i32, f32) {
        let digit = |i: usize| i32::from(group[64 * i + k] as i8);
        let scale = f32::from_ne_bytes(group[192 + k / 4 * 4..][..4].try_into().unwrap());
        (65536 * digit(0) + 256 * digit(1) + digit(2), scale)
    }

    #[test]
    fn digits_and_scales_give_the_hidden_states() {
        let row: Vec<f32> = (0..128).map(|i| (i as f32 * 1.3).sin() * 2f32.powi(i / 16 * 3 - 9)).collect();
        let mut out = [0u8; 2 * GROUP_BYTES];
        assert!(pack(&row, Some(7), &mut out));
        for (i, x) in row.iter().enumerate() {
            let (v, scale) = element(&out[i / 64 * GROUP_BYTES..][..GROUP_BYTES], i % 64);
            let error = (f64::from(v) * f64::from(scale) - f64::from(*x)).abs();
            assert!(error <= f64::from(largest(&row[i / 16 * 16..][..16])) / f64::from(MOST), "{i}");
        }
    }

    #[test]
    fn integers_of_24_bits_are_exact() {
        let mut out = [0u8; GROUP_BYTES];
        let values = [8_355_711, -8_355_711, 8_355_584, 32_768, -32_769, 32_639, 127, 128, -128, -129, 65_535, 1, 0];
        let row: Vec<f32> = (0..64).map(|i| values[i % values.len()] as f32).collect();
        assert!(pack(&row, None, &mut out));
        for (k, x) in row.iter().enumerate() {
            let (v, scale) = element(&out, k);
            assert_eq!(v as f32 * scale, *x);
        }
        let sum = |lane: usize| f32::from_ne_bytes(out[256 + 4 * lane..][..4].try_into().unwrap());
        assert_eq!(sum(1), row[4..8].iter().sum::<f32>());
    }

    #[test]
    fn extreme_rows_have_digits_or_none() {
        let mut out = [0u8; GROUP_BYTES];
        for largest in [1.0, 0.99999994, 8_355_711.0, 8_388_607.0, 16_777_215.0, 1e-9, 1e9] {
            let mut row = [0.0f32; 64];
            (row[5], row[6], row[40]) = (largest, -largest, 1e-30);
            assert!(pack(&row, None, &mut out));
            let (v, scale) = element(&out, 5);
            let error = (f64::from(v) * f64::from(scale) - f64::from(largest)).abs();
            assert!(error <= f64::from(largest / MOST) && element(&out, 6).0 == -v, "{largest}");
            assert_eq!(element(&out, 40).0, 0);
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, 1e-30] {
            let mut row = [0.0f32; 64];
            row[63] = bad;
            assert!(!pack(&row, None, &mut out), "{bad}");
        }
        assert!(pack(&[0.0; 64], Some(128), &mut out));
    }
}
