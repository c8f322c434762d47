//! The choice of the instructions of the products.

use crate::isa::Isa;
use flash_sampling_core::Matrix;

/// The instructions of the products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Plain Rust.
    Plain,
    /// Plain Rust, compiled for NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The dot products of 8-bit integers of ARM.
    #[cfg(target_arch = "aarch64")]
    Dotprod,
    /// AVX-512 VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// AMX-INT8, the fastest kernel for calls of many rows.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// The kernels for a weight of this type and size: for calls of few rows, and for calls of more rows.
pub(super) fn kernels(isa: Isa, weight: &Matrix<'_>) -> [Option<Kernel>; 2] {
    #[cfg(target_arch = "x86_64")]
    {
        let is_wide = matches!(isa, Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx);
        let vnni = is_wide && is_x86_feature_detected!("avx512vnni");
        let is_float = weight.dtype().is_float();
        // The kernel with AMX tiles of blocks keeps the offsets of 16 rows, in bytes, as 32-bit integers.
        let is_near = is_float || weight.row_stride_bytes() < 1 << 27;
        let amx = isa == Isa::Amx && is_near && crate::dot::amx::has_integers();
        // The kernels read quantised rows in whole units: two blocks of 32 weights, or one block of 256.
        let has_units = is_float || weight.cols().is_multiple_of(64);
        let few = match is_float {
            true if !vnni => Some(if isa == Isa::Portable { Kernel::Plain } else { Kernel::Avx2 }),
            _ => (vnni && has_units).then_some(Kernel::Vnni),
        };
        [few, (amx && has_units).then_some(Kernel::Amx)]
    }
    #[cfg(target_arch = "aarch64")]
    if isa == Isa::Neon {
        let neon = weight.dtype().is_float().then_some(Kernel::Neon);
        return [if super::dotprod::is_available() { Some(Kernel::Dotprod) } else { neon }, None];
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = isa;
        [weight.dtype().is_float().then_some(Kernel::Plain), None]
    }
}
