//! Instruction sets: which ones the machine has, and which one serves a pair of types.

use core::fmt;
use core::str::FromStr;
use flash_sampling_core::DType;
use std::sync::OnceLock;

/// An instruction set for the dot products.
///
/// Each instruction set has one order of summation over hidden, whatever the rows, tiles and threads. Different
/// instruction sets round differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, for any processor.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 with BF16 dot products. Pairs other than bf16 x bf16 run as [`Isa::Avx512`].
    Avx512Bf16,
    /// AMX tiles in bf16. Pairs other than bf16 x bf16 run as [`Isa::Avx512`].
    Amx,
    /// NEON of 64-bit ARM.
    Neon,
}

impl Isa {
    /// All instruction sets; for each architecture, the most general first.
    pub const ALL: [Isa; 6] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx, Isa::Neon];

    /// Whether this machine has the instruction set, and the operating system allows it.
    pub fn is_available(self) -> bool {
        static AVAILABLE: OnceLock<[bool; 6]> = OnceLock::new();
        AVAILABLE.get_or_init(|| Isa::ALL.map(detect))[self as usize]
    }

    /// Returns the instruction sets of this machine.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Returns the fastest available instruction set for a weight and hidden states of these types.
    pub fn best_for(weight: DType, hidden: DType) -> Isa {
        let best = Isa::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Portable);
        best.for_types(weight, hidden)
    }

    /// Returns the instruction set that actually runs if this one is requested.
    pub fn for_types(self, weight: DType, hidden: DType) -> Isa {
        let bf16 = weight == DType::BF16 && hidden == DType::BF16;
        match self {
            Isa::Avx512Bf16 | Isa::Amx if !bf16 => Isa::Avx512,
            isa => isa,
        }
    }

    /// Returns the name that [`FromStr`] reads.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The name is not the name of an instruction set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no instruction set; known are portable, avx2, avx512, avx512bf16, amx, neon")]
pub struct ParseIsaError(String);

impl FromStr for Isa {
    type Err = ParseIsaError;

    fn from_str(s: &str) -> Result<Self, ParseIsaError> {
        Isa::ALL.into_iter().find(|isa| isa.name() == s).ok_or_else(|| ParseIsaError(s.to_owned()))
    }
}

#[cfg(target_arch = "x86_64")]
fn detect(isa: Isa) -> bool {
    match isa {
        Isa::Portable => true,
        Isa::Avx2 => {
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
        }
        Isa::Avx512 => {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("popcnt")
                && detect(Isa::Avx2)
        }
        Isa::Avx512Bf16 => is_x86_feature_detected!("avx512bf16") && detect(Isa::Avx512),
        Isa::Amx => detect(Isa::Avx512) && crate::dot::amx::is_available(),
        Isa::Neon => false,
    }
}

#[cfg(target_arch = "aarch64")]
fn detect(isa: Isa) -> bool {
    match isa {
        Isa::Portable => true,
        // The kernel's order of elements is that of a little-endian processor.
        Isa::Neon => cfg!(target_endian = "little") && std::arch::is_aarch64_feature_detected!("neon"),
        _ => false,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect(isa: Isa) -> bool {
    isa == Isa::Portable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert!("sse9".parse::<Isa>().is_err());
    }

    #[test]
    fn portable_is_everywhere() {
        assert!(Isa::available().contains(&Isa::Portable));
        assert_eq!(Isa::Amx.for_types(DType::F16, DType::BF16), Isa::Avx512);
    }
}
