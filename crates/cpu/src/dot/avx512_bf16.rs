//! Dot products of bf16 pairs: 32 elements per step, one instruction. The instruction has its own rounding of sums and
//! flushes subnormals, so its bits differ from the AVX-512 kernel's.

use super::lanes::{self, Lanes};
use super::pack::PackedRows;
use core::arch::x86_64::*;
use flash_sampling_core::Matrix;

/// AVX-512 BF16.
struct Avx512Bf16;

impl Lanes for Avx512Bf16 {
    type Sums = __m512;
    type Weights = __m512bh;
    type PackedInput = __m512bh;
    const STEP: usize = 32;
    const WEIGHT_BYTES: usize = 64;
    const HIDDEN_BYTES: usize = 64;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller guarantees the instruction set (here and below) and the pointers.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn weights(at: *const u8) -> __m512bh {
        // SAFETY: as above; both types are 64 bytes of plain data.
        unsafe { core::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(at.cast())) }
    }
    #[inline(always)]
    unsafe fn hidden(at: *const u8) -> __m512bh {
        // SAFETY: as above.
        unsafe { Self::weights(at) }
    }
    #[inline(always)]
    unsafe fn multiply_add(sums: __m512, w: __m512bh, h: __m512bh) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_dpbf16_ps(sums, w, h) }
    }
    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn total(sums: __m512) -> f32 {
        // SAFETY: as above.
        unsafe { _mm512_reduce_add_ps(sums) }
    }
}

/// Multiplies a tile; see [`lanes::tile`].
///
/// # Safety
/// AVX-512 F, BW, DQ, VL and BF16 are available, and the requirements of [`lanes::tile`] hold.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn tile(weight: &Matrix<'_>, hidden: PackedRows<'_>, out: &mut [f32]) {
    // SAFETY: by this function's contract.
    unsafe { lanes::tile::<Avx512Bf16, 4, 6, 8>(weight, hidden, out) }
}
