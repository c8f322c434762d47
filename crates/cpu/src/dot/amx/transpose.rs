//! Sums of a tile, turned around: the tile unit leaves weight rows by hidden rows, and the logits lie the other way.

use core::arch::x86_64::*;

/// The columns of a 16 x 16 tile.
///
/// # Safety
/// AVX-512 F is available, and `tile` points to 256 floats.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn transpose(tile: *const f32) -> [[f32; 16]; 16] {
    // SAFETY: the rows are inside the tile.
    let mut r: [__m512; 16] = core::array::from_fn(|i| unsafe { _mm512_loadu_ps(tile.add(16 * i)) });
    // Pairs, then quadruples of rows, within 128-bit parts.
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
    // The 128-bit parts: column 4 p + j gathers part p of rows j, j + 4, j + 8, j + 12.
    let mut columns = [[0.0; 16]; 16];
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
            // SAFETY: a column holds sixteen floats.
            unsafe { _mm512_storeu_ps(columns[4 * p + j].as_mut_ptr(), part) };
        }
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_columns() {
        if crate::Isa::Avx512.is_available() {
            let tile: [f32; 256] = core::array::from_fn(|i| i as f32);
            // SAFETY: AVX-512 is available, and the tile has 256 floats.
            let columns = unsafe { transpose(tile.as_ptr()) };
            assert!((0..256).all(|i| columns[i % 16][i / 16] == i as f32));
        }
    }
}
