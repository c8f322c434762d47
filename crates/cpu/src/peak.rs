//! The arithmetic limit of a matmul, for benchmarks.

use crate::dot::Dot;
use crate::error::CpuError;
use crate::isa::Isa;
use flash_sampling_core::DType;

/// Runs at least `count` multiply-adds on the caller's thread, as an arithmetic limit.
///
/// Uses the instructions and the register block for a weight and hidden states of these types, on operands in the
/// first-level cache. A matmul of `[rows, hidden]` with `[vocab, hidden]` takes `rows * vocab * hidden` multiply-adds,
/// so no sampler of this crate is faster than they are. `isa: None` takes the fastest instruction set.
///
/// # Errors
/// [`CpuError::IsaUnavailable`].
pub fn products(isa: Option<Isa>, weight: DType, hidden: DType, count: u64) -> Result<(), CpuError> {
    let isa = isa.unwrap_or_else(|| Isa::best_for(weight, hidden));
    if !isa.is_available() {
        return Err(CpuError::IsaUnavailable { isa, available: Isa::available() });
    }
    Dot::new(isa, weight, hidden).products(count);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_multiplies_all_types_and_one_that_is_missing_is_an_error() {
        let types = [DType::BF16, DType::F16, DType::F32];
        for isa in Isa::ALL {
            for (weight, hidden) in types.into_iter().flat_map(|w| types.map(|h| (w, h))) {
                let outcome = products(Some(isa), weight, hidden, 1 << 18);
                assert_eq!(outcome.is_ok(), isa.is_available(), "{isa} {weight:?} {hidden:?}: {outcome:?}");
            }
        }
    }
}
