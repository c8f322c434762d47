//! Transposes the sums of a tile, from weight rows by hidden rows to hidden rows by weight rows.

use crate::dot::TILE;
use core::arch::x86_64::*;

/// Writes `rows` columns of a 16 x 16 tile, `count` floats each, to rows of `out`, [`TILE`] floats apart.
///
/// # Safety
/// AVX-512 F is available; `tile` points to 256 floats, `out` to that many rows and floats; neither exceeds 16.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn turn(tile: *const f32, out: *mut f32, rows: usize, count: usize) {
    // SAFETY: the rows are inside the tile.
    let mut r: [__m512; 16] = core::array::from_fn(|i| unsafe { _mm512_loadu_ps(tile.add(16 * i)) });
    // Interleaves pairs, then quadruples of rows, within 128-bit parts.
    for i in (0..16).step_by(2) {
        (r[i], r[i + 1]) = (_mm512_unpacklo_ps(r[i], r[i + 1]), _mm512_unpackhi_ps(r[i], r[i + 1]));
    }
    for i in (0..16).step_by(4) {
        let part = |x: __m512| _mm512_castps_pd(x);
        let whole = |x: __m512d| _mm512_castpd_ps(x);
        let (a, b, c, d) = (part(r[i]), part(r[i + 1]), part(r[i + 2]), part(r[i + 3]));
        r[i] = whole(_mm512_unpacklo_pd(a, c));
        r[i + 1] = whole(_mm512_unpackhi_pd(a, c));
        r[i + 2] = whole(_mm512_unpacklo_pd(b, d));
        r[i + 3] = whole(_mm512_unpackhi_pd(b, d));
    }
    // Gathers the 128-bit parts: column 4 p + j has part p of rows j, j + 4, j + 8, j + 12.
    let mask = ((1u32 << count) - 1) as __mmask16;
    for j in 0..4 {
        let low = [_mm512_shuffle_f32x4::<0x88>(r[j], r[j + 4]), _mm512_shuffle_f32x4::<0xdd>(r[j], r[j + 4])];
        let high =
            [_mm512_shuffle_f32x4::<0x88>(r[j + 8], r[j + 12]), _mm512_shuffle_f32x4::<0xdd>(r[j + 8], r[j + 12])];
        let parts = [
            _mm512_shuffle_f32x4::<0x88>(low[0], high[0]),
            _mm512_shuffle_f32x4::<0x88>(low[1], high[1]),
            _mm512_shuffle_f32x4::<0xdd>(low[0], high[0]),
            _mm512_shuffle_f32x4::<0xdd>(low[1], high[1]),
        ];
        for (p, part) in parts.into_iter().enumerate() {
            if 4 * p + j < rows {
                // SAFETY: the row is one of `rows`, and the mask selects `count` floats of it.
                unsafe { _mm512_mask_storeu_ps(out.add((4 * p + j) * TILE), mask, part) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_columns_and_nothing_else_is_written() {
        if crate::Isa::Avx512.is_available() {
            let tile: [f32; 256] = core::array::from_fn(|i| i as f32);
            for (rows, count) in [(16, 16), (1, 16), (16, 1), (7, 13), (15, 15)] {
                let mut out = vec![-1.0; 16 * TILE];
                // SAFETY: AVX-512 is available, the tile has 256 floats, and `out` sixteen rows of more than sixteen.
                unsafe { turn(tile.as_ptr(), out.as_mut_ptr(), rows, count) };
                for (at, &value) in out.iter().enumerate() {
                    let (row, i) = (at / TILE, at % TILE);
                    let want = if row < rows && i < count { tile[i * 16 + row] } else { -1.0 };
                    assert_eq!(value, want, "{rows} x {count}: [{row}, {i}]");
                }
            }
        }
    }
}
