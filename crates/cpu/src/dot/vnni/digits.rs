//! Hidden states as two digits of 8 bits and a scale for 16 elements.

use super::codes::Codes;
use core::arch::x86_64::*;

/// Elements of a group, which fill one vector of digits.
pub(crate) const GROUP: usize = 64;
/// Bytes of a packed group: high digits, low digits, 16 scales, 16 sums.
pub(crate) const GROUP_BYTES: usize = 256;
/// Elements with a common scale.
const SCALED: usize = 16;
/// The largest absolute value of `256 high + low` with signed digits.
const MOST: f32 = 32639.0;

/// A packed group of a hidden row. Lane `l` of the last two vectors belongs to the elements `4 l .. 4 l + 4`.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    high: __m512i,
    low: __m512i,
    /// The scale of the lane's elements.
    scales: __m512,
    /// Types without minima: minus the offset times the integer sum, as i32. With minima: the sum of the elements.
    sums: __m512i,
}

impl Row {
    /// # Safety
    /// AVX-512 F is available, and `at` points to a packed group.
    #[inline(always)]
    pub(crate) unsafe fn load(at: *const u8) -> Row {
        // SAFETY: by this function's contract.
        unsafe {
            Row {
                high: _mm512_loadu_si512(at.cast()),
                low: _mm512_loadu_si512(at.add(64).cast()),
                scales: _mm512_loadu_ps(at.add(128).cast()),
                sums: _mm512_loadu_si512(at.add(192).cast()),
            }
        }
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
            let begin = if T::HAS_MINIMA { _mm512_setzero_si512() } else { self.sums };
            let high = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, self.high);
            let low = _mm512_dpbusd_epi32(begin, codes, self.low);
            let products = _mm512_cvtepi32_ps(_mm512_add_epi32(low, _mm512_slli_epi32::<8>(high)));
            let sums = _mm512_fmadd_ps(products, _mm512_mul_ps(scale, self.scales), sums);
            if T::HAS_MINIMA { _mm512_fnmadd_ps(_mm512_castsi512_ps(self.sums), minimum, sums) } else { sums }
        }
    }
}

/// Packs a hidden row for codes with an offset, or for a type with minima. Returns whether the row has digits.
pub(crate) fn pack(row: &[f32], offset: Option<i32>, out: &mut [u8]) -> bool {
    let mut has_digits = true;
    for (row, out) in row.chunks(GROUP).zip(out.chunks_exact_mut(GROUP_BYTES)) {
        for (b, block) in row.chunks(SCALED).enumerate() {
            let largest = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            // A NaN is not `largest`, so it is tested by itself.
            let Some(scale) = scale_of(largest).filter(|_| block.iter().all(|x| x.is_finite())) else {
                has_digits = false;
                continue;
            };
            for (q, four) in block.chunks(4).enumerate() {
                let lane = b * 4 + q;
                let mut sum = 0;
                for (k, x) in four.iter().enumerate() {
                    let v = (x / scale).round_ties_even() as i32;
                    // The low digit is v modulo 256 in -128..128.
                    let low = v as i8;
                    out[lane * 4 + k] = ((v - i32::from(low)) >> 8) as u8;
                    out[64 + lane * 4 + k] = low as u8;
                    sum += v;
                }
                let sums = match offset {
                    Some(offset) => (-offset * sum).to_ne_bytes(),
                    None => (sum as f32 * scale).to_ne_bytes(),
                };
                out[128 + lane * 4..][..4].copy_from_slice(&scale.to_ne_bytes());
                out[192 + lane * 4..][..4].copy_from_slice(&sums);
            }
        }
    }
    has_digits
}

/// The least power of two with `|x| / scale <= MOST` for all elements; `None` beyond the exponents of exact products.
fn scale_of(largest: f32) -> Option<f32> {
    if largest == 0.0 {
        return Some(1.0);
    }
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    if !(-60..=60).contains(&exponent) {
        return None;
    }
    // The quotient is in 2^14 .. 2^15, and a division by a power of two is exact.
    let scale = f32::from_bits(((exponent - 14 + 127) as u32) << 23);
    Some(if (largest / scale).round_ties_even() > MOST { 2.0 * scale } else { scale })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_and_scales_give_the_hidden_states() {
        let row: Vec<f32> = (0..128).map(|i| (i as f32 * 1.3).sin() * 2f32.powi(i / 16 * 3 - 9)).collect();
        let mut out = [0u8; 2 * GROUP_BYTES];
        assert!(pack(&row, Some(7), &mut out));
        for (i, x) in row.iter().enumerate() {
            let group = &out[i / 64 * GROUP_BYTES..][..GROUP_BYTES];
            let (k, lane) = (i % 64, i % 64 / 4);
            let v = 256 * i32::from(group[k] as i8) + i32::from(group[64 + k] as i8);
            let scale = f32::from_ne_bytes(group[128 + lane * 4..][..4].try_into().unwrap());
            let largest = row[i / 16 * 16..][..16].iter().fold(0.0f32, |most, x| most.max(x.abs()));
            assert!((v as f32 * scale - x).abs() <= largest / MOST, "{i}");
        }
    }

    #[test]
    fn extremes_have_digits_or_say_that_they_have_none() {
        let mut out = [0u8; GROUP_BYTES];
        for largest in [1.0, 0.99999, 32639.0, 32639.5, 32767.9, 65535.0, 1e-9, 1e9] {
            let mut row = [0.0f32; 64];
            (row[5], row[6]) = (largest, -largest);
            assert!(pack(&row, None, &mut out));
            let v = |k: usize| 256 * i32::from(out[k] as i8) + i32::from(out[64 + k] as i8);
            assert!(v(5) == -v(6) && (16_000..=32_639).contains(&v(5)), "{largest}: {}", v(5));
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, 1e-30] {
            let mut row = [0.0f32; 64];
            row[63] = bad;
            assert!(!pack(&row, None, &mut out), "{bad}");
        }
    }
}
