//! The inputs of one launch as one block of bytes: hidden states, rows, masks and biases. One copy takes them up.

use crate::abi::{LogitBias, Row};
use flash_sampling_core::params;

/// The block, with offsets where the device will see addresses.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    hidden: Vec<u8>,
    rows: Vec<Row>,
    words: Vec<u32>,
    /// The mask that was appended last, by address and length, and where: the draws of a row share it.
    last_mask: Option<(usize, usize, u64)>,
    biases: Vec<LogitBias>,
    /// The same of the biases, and the largest of them.
    last_bias: Option<(usize, usize, u64, f32)>,
    bytes: Vec<u8>,
}

impl Staging {
    pub(crate) fn clear(&mut self) {
        self.hidden.clear();
        self.rows.clear();
        self.words.clear();
        self.biases.clear();
        (self.last_mask, self.last_bias) = (None, None);
    }

    /// Appends a row's hidden states, filled up with zeros to `stride` bytes.
    pub(crate) fn push_hidden(&mut self, row: &[u8], stride: usize) {
        let end = self.hidden.len() + stride;
        self.hidden.extend_from_slice(row);
        self.hidden.resize(end, 0);
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Appends a draw of a row. Masks are cut to the vocabulary.
    pub(crate) fn push(&mut self, seed: u64, position: u64, row: &params::Row<'_>, draw: u32, vocab_size: u32) {
        // Offsets are kept as addresses plus one, 0 being the null address.
        let (mask, mask_words) = match row.transform.mask {
            None => (0, 0),
            Some(mask) => {
                let mask = &mask[..mask.len().min(vocab_size.div_ceil(32) as usize)];
                let at = match self.last_mask {
                    Some((address, length, at)) if address == mask.as_ptr().addr() && length == mask.len() => at,
                    _ => {
                        self.words.extend_from_slice(mask);
                        (self.words.len() - mask.len()) as u64
                    }
                };
                self.last_mask = Some((mask.as_ptr().addr(), mask.len(), at));
                (at + 1, mask.len() as u32)
            }
        };
        let biases = row.transform.adjustments;
        let (bias, largest_bias) = match self.last_bias {
            Some((address, length, at, largest)) if address == biases.as_ptr().addr() && length == biases.len() => {
                (at, largest)
            }
            _ => {
                let at = self.biases.len() as u64;
                self.biases.extend(biases.iter().map(|a| LogitBias { token: a.token, value: a.bias }));
                (at, biases.iter().fold(0.0f32, |largest, a| largest.max(a.bias)))
            }
        };
        self.last_bias = Some((biases.as_ptr().addr(), biases.len(), bias, largest_bias));
        self.rows.push(Row {
            seed,
            position,
            mask,
            bias,
            mask_words,
            biases: biases.len() as u32,
            inv_temperature: row.transform.inv_temperature,
            largest_bias,
            draw,
            greedy: row.greedy.into(),
        });
    }

    /// Bytes of the block.
    pub(crate) fn len(&self) -> usize {
        self.rows_at() + size_of_val(self.rows.as_slice()) + size_of_val(self.biases.as_slice()) + 4 * self.words.len()
    }

    /// Where the rows begin.
    pub(crate) fn rows_at(&self) -> usize {
        self.hidden.len().next_multiple_of(16)
    }

    /// The block for the device address `base`, a multiple of 16.
    pub(crate) fn finish(&mut self, base: u64) -> &[u8] {
        let rows_at = self.rows_at();
        let biases_at = rows_at + size_of_val(self.rows.as_slice());
        let words_at = biases_at + size_of_val(self.biases.as_slice());
        for row in &mut self.rows {
            row.bias = if row.biases == 0 { 0 } else { base + biases_at as u64 + 8 * row.bias };
            row.mask = if row.mask == 0 { 0 } else { base + words_at as u64 + 4 * (row.mask - 1) };
        }
        self.bytes.clear();
        self.bytes.extend_from_slice(&self.hidden);
        self.bytes.resize(rows_at, 0);
        self.bytes.extend_from_slice(bytemuck::cast_slice(&self.rows));
        self.bytes.extend_from_slice(bytemuck::cast_slice(&self.biases));
        self.bytes.extend_from_slice(bytemuck::cast_slice(&self.words));
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::{Adjustments, Capabilities, Exactness, Input, Plan, RowParams, Variant};

    #[test]
    fn rows_find_their_masks_and_biases() {
        let can = Capabilities {
            backend: "cuda",
            variant: Variant::Tiled,
            exactness: Exactness::Pathwise,
            input: Input::Hidden,
            without_replacement: false,
            knobs: flash_sampling_core::Knobs::NONE,
            canonical: false,
        };
        let plan = Plan { max_draws: 2, ..Plan::default() };
        let masked = RowParams { mask: Some(&[1, 2, 3, 4]), ..RowParams::default() };
        let biased = RowParams { logit_bias: &[(3, -1.0), (9, 2.5)], mask: Some(&[]), ..RowParams::default() };
        let mut staging = Staging::default();
        staging.push_hidden(&[7; 18], 20);
        let mut adjustments = Adjustments::default();
        adjustments.collect([&masked, &masked, &biased]);
        for (r, (params, draw)) in [(masked, 0), (masked, 1), (biased, 0)].into_iter().enumerate() {
            let row = params.check(adjustments.row(r), &can, &plan, 64).unwrap();
            staging.push(params.seed, params.position, &row, draw, 64);
        }
        let size = staging.len();
        let bytes = staging.finish(4096).to_vec();
        assert_eq!(bytes.len(), size);
        let rows: Vec<Row> = bytes[32..32 + 3 * 56].chunks_exact(56).map(bytemuck::pod_read_unaligned).collect();
        let biases_at = 4096 + 32 + 3 * 56;
        let words_at = biases_at + 16;
        assert_eq!((rows[0].mask, rows[0].mask_words, rows[0].bias), (words_at, 2, 0));
        assert_eq!((rows[1].mask, rows[1].draw), (words_at, 1));
        assert_eq!((rows[2].mask, rows[2].mask_words), (words_at + 8, 0));
        assert_eq!((rows[2].bias, rows[2].biases, rows[2].largest_bias), (biases_at, 2, 2.5));
        assert_eq!(bytes[size - 8..], bytemuck::cast::<[u32; 2], [u8; 8]>([1, 2]));
    }
}
