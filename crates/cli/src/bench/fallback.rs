//! Counts the rows that fall back from a shadow to the weight, at several temperatures.

use crate::bench::cases::{Inputs, Ours, sampler};
use crate::bench::record::Fallback;
use crate::error::CommandError;
use crate::input::synthetic::Logits;
use crate::interrupt::Interrupt;
use flash_sampling::{RowParams, Samples, VariantConfig};

/// The temperatures.
const TEMPERATURES: [f32; 4] = [0.3, 0.7, 1.0, 1.5];
/// The calls of a temperature for each round of the timing.
const CALLS: usize = 10;

/// Draws LLM-like rows by the tiled variant with a shadow, in calls of `rows` rows, and counts the rows that fall back.
/// Every call has its own position, and other hidden states if there are enough.
///
/// # Errors
/// Errors of the backend, Ctrl-C.
pub fn count(
    inputs: &Inputs,
    ours: &Ours,
    (rows, rounds): (usize, usize),
    interrupt: &Interrupt,
) -> Result<Vec<Fallback>, CommandError> {
    let Some(head) = inputs.head_with_shadow()? else { return Ok(Vec::new()) };
    let mut sampler = sampler(head, ours.backend.clone(), VariantConfig::Tiled, rows)?;
    let (calls, mut out) = (CALLS * rounds, Samples::new());
    let mut counts = Vec::new();
    for temperature in TEMPERATURES {
        let mut fallback_rows = 0;
        for call in 0..calls {
            interrupt.check()?;
            let first = call * rows % (inputs.rows() + 1 - rows);
            let row = |r| RowParams { seed: r, position: call as u64, temperature, ..RowParams::default() };
            let params: Vec<_> = (0..rows as u64).map(row).collect();
            sampler.sample(inputs.states_from(Logits::Peaked, first, rows)?, &params, &mut out)?;
            fallback_rows += out.fallback_rows();
        }
        counts.push(Fallback { temperature, rows: calls * rows, fallback_rows });
    }
    Ok(counts)
}
