//! Comparison of draws of ranks with draws of one GPU.

use flash_sampling::GpuExchange;
use flash_sampling_core::Samples;

/// Asserts that rows have the same draws or errors to the last bit.
///
/// NCCL does not transfer logits, so its logits may differ by the rounding of a subtraction.
pub(crate) fn are_same(exchange: GpuExchange, found: &Samples, want: &Samples, name: &str) {
    assert_eq!(found.len(), want.len(), "{name}");
    for (r, (found, want)) in found.iter().zip(want.iter()).enumerate() {
        let (mut found, want) = (found.map(|row| row.draws.to_vec()), want.map(|row| row.draws.to_vec()));
        if let (Ok(found), Ok(want), GpuExchange::Nccl) = (&mut found, &want, exchange) {
            for (found, want) in found.iter_mut().zip(want) {
                let rounding = 1e-6 * (want.score.abs() + want.logit.abs() + 1.0);
                assert!((found.logit - want.logit).abs() <= rounding, "{name}, row {r}: {found:?}, not {want:?}");
                found.logit = want.logit;
            }
        }
        assert_eq!(found, want, "{name}, row {r}");
    }
}
