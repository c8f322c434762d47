//! The choice of vector code for a tile.

use super::{Span, summarize};
use crate::isa::Isa;
use crate::scan::row_state::RowState;
use crate::simd::Plain;
#[cfg(target_arch = "x86_64")]
use crate::simd::avx512::Avx512;
#[cfg(target_arch = "aarch64")]
use crate::simd::neon::Neon;

/// The instruction set of all code except the dot products. Results do not depend on the instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Simd {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Simd {
    /// Returns the vector code for an available instruction set.
    pub(crate) fn of(isa: Isa) -> Simd {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Simd::Avx2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => Simd::Avx512,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Simd::Neon,
            _ => Simd::Portable,
        }
    }

    /// Whether a mass cutoff takes less time than bins for all tokens of a row with top-p.
    ///
    /// With AVX2, a row of 151936 logits takes 0.47 ms without a cutoff, and 0.67 ms with one.
    pub(crate) fn has_fast_cutoff(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => false,
            _ => true,
        }
    }

    pub(super) fn summarize(self, span: Span<'_, '_>, state: &mut RowState) {
        match self {
            // SAFETY: plain Rust is always available.
            Simd::Portable => unsafe { summarize::<Plain>(span, state) },
            // SAFETY: the caller of `of` passes an available instruction set.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => unsafe { summarize_avx2(span, state) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => unsafe { summarize_avx512(span, state) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => unsafe { summarize_neon(span, state) },
        }
    }
}

/// # Safety
/// AVX2 and FMA are available.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn summarize_avx2(span: Span<'_, '_>, state: &mut RowState) {
    // SAFETY: by this function's contract.
    unsafe { summarize::<Plain>(span, state) };
}

/// # Safety
/// AVX-512 F, BW, DQ and VL, and POPCNT are available.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
unsafe fn summarize_avx512(span: Span<'_, '_>, state: &mut RowState) {
    // SAFETY: by this function's contract.
    unsafe { summarize::<Avx512>(span, state) };
}

/// # Safety
/// NEON is available.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn summarize_neon(span: Span<'_, '_>, state: &mut RowState) {
    // SAFETY: by this function's contract.
    unsafe { summarize::<Neon>(span, state) };
}
