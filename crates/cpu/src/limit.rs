//! The arithmetic limit of a matmul, for benchmarks.

use crate::dot::Dot;
use crate::error::CpuError;
use crate::isa::Isa;
use flash_sampling_core::DType;

/// Runs at least `count` multiply-adds on the caller's thread, with the instructions and the register block that multiply
/// a weight and hidden states of these types, on operands that stay in the first-level cache. A matmul of
/// `[rows, hidden]` with `[vocab, hidden]` has `rows * vocab * hidden` of them, and no sampler of this crate can be
/// faster than they are; `isa: None` takes the fastest instruction set, as a sampler does.
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
    use std::time::Instant;

    #[test]
    fn more_products_take_longer_on_every_instruction_set() {
        let types = [DType::BF16, DType::F16, DType::F32];
        for isa in Isa::available() {
            for (weight, hidden) in types.into_iter().flat_map(|w| types.map(|h| (w, h))) {
                let time = |count| {
                    let best = (0..5).map(|_| {
                        let start = Instant::now();
                        products(Some(isa), weight, hidden, count).unwrap();
                        start.elapsed()
                    });
                    best.min().unwrap()
                };
                // Far apart, so that a busy machine does not matter; a loop that the compiler removed would.
                assert!(time(1 << 26) > 8 * time(1 << 18), "{isa} {weight:?} {hidden:?}");
            }
        }
    }
}
