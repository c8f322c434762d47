//! Products of codes and digits by AVX-512 VNNI.

use super::codes::Codes;
use super::digits::{DigitLayout, Digits};
use super::register_blocks::register_blocks;
use crate::dot::TILE;
use core::arch::x86_64::*;

/// The number of weight rows from a row to the row that it prefetches.
const AHEAD: usize = 8;

/// The layout of the digits for codes of `T`.
pub(super) const fn layout<T: Codes>() -> DigitLayout {
    if T::HAS_ROW_SCALE {
        DigitLayout::Groups
    } else if T::HAS_MINIMA {
        DigitLayout::GroupsAndSums
    } else {
        DigitLayout::GroupsAndOffsets(T::OFFSET)
    }
}

/// The operands of a tile.
pub(super) struct Operands<'a> {
    /// The codes of `rows` rows, which begin `stride` bytes apart.
    pub(super) codes: *const u8,
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) hidden: &'a Digits,
    /// The number of groups of a row.
    pub(super) groups: usize,
    pub(super) out: *mut f32,
}

/// The sums of an output. With one scale for a row, the two vectors hold integer sums of products with the high digits,
/// and with the low digits. Otherwise, the first vector holds float32 sums of products with both digits.
#[derive(Clone, Copy)]
struct Accumulator([__m512i; 2]);

impl Accumulator {
    /// Adds the products of a group of codes and a group of hidden states.
    ///
    /// # Safety
    /// AVX-512 F and VNNI are available.
    #[inline(always)]
    unsafe fn add<T: Codes>(
        self,
        codes: __m512i,
        [high, low, sums]: [__m512i; 3],
        (scale, minimum): (__m512, __m512),
    ) -> Self {
        // SAFETY: by this function's contract.
        unsafe {
            let Accumulator([first, second]) = self;
            if T::HAS_ROW_SCALE {
                let high = _mm512_dpbusd_epi32(first, codes, high);
                return Accumulator([high, _mm512_dpbusd_epi32(second, codes, low)]);
            }
            let zero = _mm512_setzero_si512();
            let high = _mm512_dpbusd_epi32(zero, codes, high);
            let low = _mm512_dpbusd_epi32(if T::HAS_MINIMA { zero } else { sums }, codes, low);
            let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<8>(high), low));
            let total = _mm512_fmadd_ps(sum, scale, _mm512_castsi512_ps(first));
            let total = if T::HAS_MINIMA { _mm512_fnmadd_ps(_mm512_castsi512_ps(sums), minimum, total) } else { total };
            Accumulator([_mm512_castps_si512(total), second])
        }
    }

    /// Returns the product; `totals` are the sums of the hidden state's digits.
    ///
    /// # Safety
    /// AVX-512 F is available.
    #[inline(always)]
    unsafe fn total<T: Codes>(self, totals: [i32; 2]) -> f32 {
        let Accumulator([first, second]) = self;
        // SAFETY: by this function's contract.
        unsafe {
            if T::HAS_ROW_SCALE {
                // The codes have an offset, so the sums of products may wrap around. The sums without the offset fit
                // into 32 bits, so wrapping subtraction gives them exactly.
                let [high, low] = [_mm512_reduce_add_epi32(first), _mm512_reduce_add_epi32(second)];
                let signed = |sum: i32, total: i32| sum.wrapping_sub(total.wrapping_mul(T::OFFSET)) as f32;
                return 256.0 * signed(high, totals[0]) + signed(low, totals[1]);
            }
            _mm512_reduce_add_ps(_mm512_castsi512_ps(first))
        }
    }
}

impl Operands<'_> {
    /// Writes to `out[r * TILE + i]` the product of row `i` of the codes and the digits of hidden row `r`.
    ///
    /// # Safety
    /// AVX-512 F, BW, DQ, VL and VNNI are available; the codes are of `T`, in whole units; the hidden rows are packed
    /// in the [`layout`] for `T`, and have at least as many groups; `out` has [`TILE`] floats per hidden row.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) unsafe fn multiply<T: Codes>(&self) {
        // SAFETY: by this function's contract; the rows of a register block exist.
        unsafe {
            register_blocks!(self.rows, self.hidden.rows.len(), 2 x 4, 4 x 2, 4 x 1: |i, r| {
                self.register_block::<T, MR, NR>(i, r)
            });
        }
    }

    /// Computes `MR x NR` outputs. If `r` is 0, also prefetches later rows of the codes.
    ///
    /// # Safety
    /// As for [`Operands::multiply`]; `MR` and `NR` rows exist from `i` and `r` on.
    #[inline(always)]
    unsafe fn register_block<T: Codes, const MR: usize, const NR: usize>(&self, i: usize, r: usize) {
        let (stride, bytes) = (self.stride, T::UNIT_BYTES);
        // SAFETY: by this function's contract.
        unsafe {
            let mut sums = [[Accumulator([_mm512_setzero_si512(); 2]); MR]; NR];
            let (groups, row_bytes) = self.hidden.first_group();
            let hidden: [*const u8; NR] = core::array::from_fn(|n| groups.add((r + n) * row_bytes));
            let first = self.codes.add(i * stride);
            for unit in 0..self.groups / T::GROUPS {
                let at: [*const u8; MR] = core::array::from_fn(|m| first.add(m * stride + unit * bytes));
                if r == 0 {
                    for at in at {
                        for line in (0..bytes).step_by(64) {
                            _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(AHEAD * stride + line).cast());
                        }
                    }
                }
                let scales: [T::Scales; MR] = core::array::from_fn(|m| T::scales(at[m]));
                for group in 0..T::GROUPS {
                    let offset = (unit * T::GROUPS + group) * layout::<T>().group_bytes();
                    // Large closures of `from_fn` would be compiled without the target features.
                    let mut codes = [_mm512_setzero_si512(); MR];
                    let mut factors = [(_mm512_setzero_ps(), _mm512_setzero_ps()); MR];
                    for m in 0..MR {
                        (codes[m], factors[m]) = (T::codes(at[m], group), T::scale(&scales[m], group));
                    }
                    for n in 0..NR {
                        let vector = |i: usize| _mm512_loadu_si512(hidden[n].add(offset + 64 * i).cast());
                        let third = if T::HAS_ROW_SCALE { _mm512_setzero_si512() } else { vector(2) };
                        let digits = [vector(0), vector(1), third];
                        for m in 0..MR {
                            sums[n][m] = sums[n][m].add::<T>(codes[m], digits, factors[m]);
                        }
                    }
                }
            }
            for (n, sums) in sums.into_iter().enumerate() {
                let totals = self.hidden.rows[r + n].totals;
                for (m, sums) in sums.into_iter().enumerate() {
                    *self.out.add((r + n) * TILE + i + m) = sums.total::<T>(totals);
                }
            }
        }
    }
}
