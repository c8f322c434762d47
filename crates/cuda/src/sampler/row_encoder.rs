//! Encodes row parameters for the kernels, for callers of the entry points over device memory.

use crate::abi::{DeviceAddress, Row, RowFilters};
use crate::device::RowFeatures;
use crate::sampler::{CudaTiled, Staging};
use core::ops::Range;
use flash_sampling_core::backend::Adjustments;
use flash_sampling_core::{Capabilities, Knob, Knobs, Plan, RowError, RowParams};

/// Encodes [`RowParams`] as one block of bytes: one [`abi::Row`](crate::abi::Row) per row, followed by masks, biases
/// and penalties. Reuses its memory.
///
/// A launch of [`DeviceTiled`](crate::DeviceTiled) reads the block from a fixed device address. So a CUDA graph can
/// capture the launch once, and replay it after each copy of a new block to this address.
#[derive(Debug)]
pub struct RowEncoder {
    vocab_size: u32,
    tokens: Range<u32>,
    staging: Staging,
    adjustments: Adjustments,
    filters: Vec<RowFilters>,
}

/// A row that the kernels cannot draw.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("row {row}: {error}")]
pub struct RowEncodeError {
    /// The index of the row.
    pub row: usize,
    /// The reason.
    #[source]
    pub error: RowError,
}

impl RowEncoder {
    /// The capabilities of a launch without the host.
    const CAPABILITIES: Capabilities = Capabilities {
        without_replacement: false,
        knobs: Knobs::ADJUSTMENTS.union(Knobs::of(&[Knob::MinP, Knob::TopK, Knob::TopP])),
        canonical: false,
        shadow: false,
        ..CudaTiled::CAPABILITIES
    };

    /// Creates an encoder for a head of `tokens` (global ids, `0..vocab_size` without shards) of a vocabulary.
    pub fn new(tokens: Range<u32>, vocab_size: u32) -> Self {
        let staging = Staging::of(tokens.clone(), vocab_size);
        RowEncoder { vocab_size, tokens, staging, adjustments: Adjustments::default(), filters: Vec::new() }
    }

    /// Encodes the first draw of each row, and replaces the rows of the last call.
    ///
    /// # Errors
    /// The error of the first row that is invalid or unsupported. Supported are one draw with masks, penalties and
    /// biases, and the filters of [`RowFilters::of`].
    pub fn encode(&mut self, rows: &[RowParams<'_>]) -> Result<(), RowEncodeError> {
        self.staging.clear();
        self.filters.clear();
        for (r, params) in rows.iter().enumerate() {
            let encoded = self.push(params);
            encoded.map_err(|error| RowEncodeError { row: r, error })?;
        }
        Ok(())
    }

    fn push(&mut self, params: &RowParams<'_>) -> Result<(), RowError> {
        self.adjustments.collect_within([params], self.tokens.clone());
        let (can, plan) = (&Self::CAPABILITIES, &Plan::default());
        let row = params.check(self.adjustments.row(0), can, plan, self.vocab_size)?;
        // The filters have another order, or top-k is too large.
        let refused = || RowError::Unsupported { knob: Knob::TopK, alternative: can.alternative(plan) };
        let filters = match &row.filters {
            None => RowFilters::OFF,
            Some(filters) => RowFilters::of(filters).ok_or_else(refused)?,
        };
        let staged = self.staging.push(params, &row, [row.first_draw]);
        staged.expect("lists in memory that is not page-locked always have room");
        self.filters.push(filters);
        Ok(())
    }

    /// The number of bytes of the block.
    pub fn len(&self) -> usize {
        self.staging.len()
    }

    /// Whether no rows are encoded.
    pub fn is_empty(&self) -> bool {
        self.staging.rows() == 0
    }

    /// Builds the block for the device address `base`, a multiple of 16, to which the caller copies it.
    ///
    /// The rows begin at `base`. Another call builds the block for another address.
    pub fn block(&mut self, base: DeviceAddress<u8>) -> &[u8] {
        self.staging.finish(None, base)
    }

    /// The rows of the last block, with the addresses of their lists and masks.
    pub fn rows(&self) -> &[Row] {
        self.staging.staged()
    }

    /// The filters of each row, [`RowFilters::OFF`] without any. [`DeviceFilters`](crate::DeviceFilters) applies them;
    /// [`DeviceTiled`](crate::DeviceTiled) does not.
    pub fn filters(&self) -> &[RowFilters] {
        &self.filters
    }

    /// The features of the rows. A captured launch keeps its features.
    pub fn features(&self) -> RowFeatures {
        self.staging.features()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_the_rows_and_what_they_point_to() {
        let mut encoder = RowEncoder::new(0..64, 64);
        let biased = RowParams { seed: 7, position: 3, logit_bias: &[(9, 2.5)], ..RowParams::default() };
        let masked = RowParams { mask: Some(&[6, 1]), top_k: 4, ..RowParams::default() };
        encoder.encode(&[biased, masked]).unwrap();
        assert_eq!((encoder.features(), encoder.len()), (RowFeatures::Any, 2 * 56 + 8 + 8));
        assert_eq!(encoder.filters(), [RowFilters::OFF, RowFilters { top_k: 4, ..RowFilters::OFF }]);
        let block = encoder.block(DeviceAddress::new(4096)).to_vec();
        let rows: [Row; 2] = bytemuck::pod_read_unaligned(&block[..112]);
        assert_eq!((rows[0].seed, rows[0].position, rows[0].biases, rows[0].largest_bias), (7, 3, 1, 2.5));
        assert_eq!((rows[0].bias.get(), rows[1].mask.get(), rows[1].mask_words), (4096 + 112, 4096 + 120, 2));
        let again = encoder.block(DeviceAddress::new(256)).to_vec();
        encoder.block(DeviceAddress::new(4096 << 20));
        assert_eq!(encoder.block(DeviceAddress::new(4096)), block);
        let rows: [Row; 2] = bytemuck::pod_read_unaligned(&again[..112]);
        assert_eq!((rows[0].bias.get(), rows[1].mask.get()), (256 + 112, 256 + 120));
        // `encode` replaces all earlier content.
        encoder.encode(&[RowParams::default()]).unwrap();
        assert_eq!((encoder.features(), encoder.len(), encoder.filters().len()), (RowFeatures::Bare, 56, 1));
    }

    #[test]
    fn a_row_that_requests_more_than_a_draw_is_named() {
        let mut encoder = RowEncoder::new(0..64, 64);
        let more = RowParams { typical_p: 0.5, ..RowParams::default() };
        assert_eq!(encoder.encode(&[RowParams::default(), more]).map_err(|error| error.row), Err(1));
    }
}
