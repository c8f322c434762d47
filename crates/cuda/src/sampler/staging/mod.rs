//! Packs the inputs of a launch into one block of bytes: hidden states, rows, masks, biases and penalties. One copy
//! moves the block to the device, or two if the lists are page-locked.

mod lists;

use crate::abi::{DeviceAddress, PENALISED, Row};
use crate::device::RowFeatures;
use crate::error::CudaError;
use crate::sampler::pinned_items::{ITEM, PinnedItems};
use crate::sampler::row_stride;
use core::ops::Range;
use cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_core::{Matrix, RowParams, backend};
use lists::may_penalise;
use std::sync::Arc;

/// The block of inputs, with offsets instead of device addresses.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// The input rows of the hidden states at the block's start, and the bytes of each.
    sources: Vec<usize>,
    stride: usize,
    rows: Vec<Row>,
    /// The tokens of the shard, and the size of the whole vocabulary.
    tokens: Range<u32>,
    vocab_size: u32,
    /// The address and length of the last mask, and its offset in the block: the draws of a row share it.
    last_mask: Option<(usize, usize, u64)>,
    /// Biases, penalties and masks. A row's penalties follow its biases, eight bytes each; a mask has two words per
    /// item.
    lists: PinnedItems,
    /// Whether any row has a mask that forbids most tokens, or penalties.
    has_knobs: bool,
    /// The address of the lists in the rows; `None` if the rows have offsets.
    lists_address: Option<u64>,
    /// The spare vector of [`Staging::arrange`].
    arranged: Vec<Row>,
    bytes: Vec<u8>,
}

/// The maximum number of mask words before a shard's first token that a kernel reads, in its first 256 tokens.
const WORDS_BEFORE: usize = 255 / 32;

/// Whether a mask forbids most of the vocabulary. Reads the mask only until this is certain.
fn forbids_most(mask: &[u32], vocab_size: u32) -> bool {
    let most = u64::from(vocab_size).div_ceil(8);
    let mut allowed = 0;
    mask.chunks(64).all(|words| {
        allowed += words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        allowed < most
    }) && allowed < most
}

/// The maximum number of bytes of lists and masks for these rows, for any shard.
pub(crate) fn max_list_bytes(rows: &[RowParams<'_>], vocab_size: u32) -> usize {
    let of_row = |row: &RowParams<'_>| {
        let biases = row.logit_bias.len() + row.banned.len() + row.stop_token_ids.len();
        let items = biases + row.history.map_or(0, |history| history.occurrences().len());
        let words = row.mask.map_or(0, |mask| mask.len().min(vocab_size.div_ceil(32) as usize));
        ITEM * (2 * items + 1 + words.div_ceil(2))
    };
    rows.iter().map(of_row).sum()
}

impl Staging {
    /// Creates the inputs for draws from some tokens of a vocabulary.
    pub(crate) fn of(tokens: Range<u32>, vocab_size: u32) -> Self {
        Staging { tokens, vocab_size, ..Staging::default() }
    }

    /// Like [`Staging::of`], with page-locked lists: a copy of [`Staging::finish_rows`], then a copy of the lists.
    pub(crate) fn locked(tokens: Range<u32>, vocab_size: u32, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        Ok(Staging { lists: PinnedItems::locked(stream)?, ..Staging::of(tokens, vocab_size) })
    }

    pub(crate) fn clear(&mut self) {
        self.sources.clear();
        self.rows.clear();
        self.lists.clear();
        (self.last_mask, self.has_knobs, self.lists_address) = (None, false, None);
    }

    /// The features of the rows: `Any` if a row has penalties beyond biases, or a mask that forbids most tokens.
    pub(crate) fn features(&self) -> RowFeatures {
        match self.has_knobs {
            true => RowFeatures::Any,
            false if self.rows.iter().all(|row| row.mask.is_null() && row.biases == 0) => RowFeatures::Bare,
            false => RowFeatures::Unpenalised,
        }
    }

    /// Marks rows as [`RowFeatures::Any`] if some shard's list may have penalties beyond biases.
    ///
    /// All ranks then load the same kernels. A kernel load on one rank could block behind a waiting rank on the same
    /// GPU.
    pub(crate) fn expect_penalties_of(&mut self, rows: &[RowParams<'_>]) {
        self.has_knobs |= rows.iter().any(may_penalise);
    }

    /// Appends words of a mask and returns the index of their first item.
    fn push_words(&mut self, words: &[u32]) -> Result<u64, CudaError> {
        let at = self.lists.len();
        if !words.is_empty() {
            let items = self.lists.grow(words.len().div_ceil(2), at)?;
            // With an odd number of words, the second half of the last item is unused.
            items.last_mut().into_iter().for_each(|last| *last = 0);
            bytemuck::cast_slice_mut::<u64, u32>(items)[..words.len()].copy_from_slice(words);
        }
        Ok(at as u64)
    }

    /// Reserves memory for this many bytes of lists and masks, so that a smaller call allocates nothing.
    pub(crate) fn reserve(&mut self, bytes: usize) -> Result<(), CudaError> {
        self.lists.reserve(bytes.div_ceil(ITEM))
    }

    /// Appends the hidden states of row `r` of the input.
    pub(crate) fn push_hidden(&mut self, r: usize) {
        self.sources.push(r);
    }

    /// The tokens of the shard.
    pub(crate) fn tokens(&self) -> Range<u32> {
        self.tokens.clone()
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The rows, with offsets instead of device addresses.
    pub(crate) fn staged(&self) -> &[Row] {
        &self.rows
    }

    /// Appends draws of the input row `r`, each with the row's hidden states.
    pub(crate) fn push_of(
        &mut self,
        r: usize,
        params: &RowParams<'_>,
        row: &backend::Row<'_>,
        draws: impl IntoIterator<Item = u32>,
    ) -> Result<(), CudaError> {
        self.push(params, row, draws)?;
        self.sources.resize(self.rows.len(), r);
        Ok(())
    }

    /// Appends draws of a row with these parameters.
    ///
    /// The block has only the mask words of the shard's tokens, but the row's mask address is that of word 0, which is
    /// outside these words. Kernels read tokens in parts that begin at multiples of 256 (`scan.cuh`). So they may read
    /// up to [`WORDS_BEFORE`] words before the shard's words, which is other data in the block.
    pub(crate) fn push(
        &mut self,
        params: &RowParams<'_>,
        row: &backend::Row<'_>,
        draws: impl IntoIterator<Item = u32>,
    ) -> Result<(), CudaError> {
        // Stores offsets plus one, since 0 is the null address.
        let (mask, mask_words) = match row.transform.mask {
            None => (0, 0),
            Some(mask) => {
                let cut = |end: u32| mask.len().min(end.div_ceil(32) as usize);
                let own = &mask[mask.len().min(self.tokens.start as usize / 32)..cut(self.tokens.end)];
                let at = match self.last_mask {
                    Some((address, length, at)) if address == mask.as_ptr().addr() && length == mask.len() => at,
                    _ => {
                        self.has_knobs = self.has_knobs || forbids_most(&mask[..cut(self.vocab_size)], self.vocab_size);
                        self.push_words(own)?
                    }
                };
                self.last_mask = Some((mask.as_ptr().addr(), mask.len(), at));
                (at + 1, cut(self.tokens.end) as u32)
            }
        };
        let list = lists::push(row.transform.adjustments, &mut self.lists)?;
        self.has_knobs |= list.biases & PENALISED != 0;
        self.rows.extend(draws.into_iter().map(|draw| Row {
            seed: params.seed,
            position: params.position,
            mask: DeviceAddress::new(mask),
            bias: DeviceAddress::new(list.at),
            mask_words,
            biases: list.biases,
            inv_temperature: row.transform.inv_temperature,
            largest_bias: list.largest_bias,
            draw,
            greedy: row.greedy.into(),
        }));
        Ok(())
    }

    /// Reserves the hidden states of an input, each padded with zeros. Without an input, the block has none.
    pub(crate) fn take_hidden(&mut self, input: Option<&Matrix<'_>>) {
        self.stride = input.map_or(0, |input| row_stride(input.cols()) * input.dtype().block_bytes());
    }

    /// Reorders the rows by their indices in `order`.
    pub(crate) fn arrange(&mut self, order: &[u32]) {
        self.arranged.clear();
        self.arranged.extend(order.iter().map(|&row| self.rows[row as usize]));
        core::mem::swap(&mut self.rows, &mut self.arranged);
    }

    pub(crate) fn len(&self) -> usize {
        self.lists_at() + ITEM * self.lists.len()
    }

    pub(crate) fn rows_at(&self) -> usize {
        (self.sources.len() * self.stride).next_multiple_of(16)
    }

    /// The offset of lists and masks, after the rows.
    pub(crate) fn lists_at(&self) -> usize {
        self.rows_at() + size_of_val(self.rows.as_slice())
    }

    /// Builds the block for the device address `base`, a multiple of 16, with hidden states of the input.
    pub(crate) fn finish(&mut self, input: Option<&Matrix<'_>>, base: DeviceAddress<u8>) -> &[u8] {
        let mut bytes = core::mem::take(&mut self.bytes);
        bytes.resize(self.len(), 0);
        let lists_at = self.lists_at();
        self.finish_rows(input, base, &mut bytes[..lists_at]);
        bytes[lists_at..].copy_from_slice(bytemuck::cast_slice(self.lists.own()));
        self.bytes = bytes;
        &self.bytes
    }

    /// Copies the block to device memory, which grows to the block's size, and returns its address.
    pub(crate) fn copy_to(
        &mut self,
        memory: &mut CudaSlice<u8>,
        input: Option<&Matrix<'_>>,
        stream: &Arc<CudaStream>,
    ) -> Result<DeviceAddress<u8>, CudaError> {
        let failed = CudaError::driver("copy the inputs of a call");
        self.take_hidden(input);
        if self.len() > memory.len() {
            *memory = stream.alloc_zeros(self.len().next_power_of_two()).map_err(&failed)?;
        }
        let base = DeviceAddress::of(memory, stream);
        stream.memcpy_htod(self.finish(input, base), memory).map_err(failed)?;
        Ok(base)
    }

    /// Builds the block without the lists, as [`Staging::finish`], in `out` of [`Staging::lists_at`] bytes.
    pub(crate) fn finish_rows(&mut self, input: Option<&Matrix<'_>>, base: DeviceAddress<u8>, out: &mut [u8]) {
        let (hidden, zeros) = out[..self.rows_at()].split_at_mut(self.sources.len() * self.stride);
        let copies = self.sources.iter().zip(hidden.chunks_exact_mut(self.stride.max(1)));
        for (states, out) in copies.filter_map(|(&row, out)| Some((input?.row_bytes(row), out))) {
            out[..states.len()].copy_from_slice(states);
            out[states.len()..].fill(0);
        }
        zeros.fill(0);
        self.place_rows(base, out);
    }

    /// Lists and masks. If page-locked, a separate copy places them after the rows.
    pub(crate) fn lists(&mut self) -> &mut PinnedItems {
        &mut self.lists
    }

    /// Writes the rows, which follow the hidden states.
    fn place_rows(&mut self, base: DeviceAddress<u8>, out: &mut [u8]) {
        let (rows_at, lists_at) = (self.rows_at(), self.lists_at());
        debug_assert!(self.rows.is_empty() || lists_at >= 4 * WORDS_BEFORE, "a row lies before the words");
        let lists = base.get() + lists_at as u64;
        let first_word = lists.wrapping_sub(4 * u64::from(self.tokens.start / 32));
        let before = self.lists_address.replace(lists);
        for row in &mut self.rows {
            let bias = match before {
                _ if row.biases == 0 => 0,
                Some(before) => row.bias.get() - before + lists,
                None => lists + 8 * row.bias.get(),
            };
            let mask = match before {
                _ if row.mask.is_null() => 0,
                Some(before) => row.mask.get().wrapping_sub(before).wrapping_add(lists),
                None => first_word.wrapping_add(8 * (row.mask.get() - 1)),
            };
            (row.bias, row.mask) = (DeviceAddress::new(bias), DeviceAddress::new(mask));
        }
        out[rows_at..].copy_from_slice(bytemuck::cast_slice(&self.rows));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::backend::Adjustments;
    use flash_sampling_core::{Capabilities, Exactness, History, Input, Plan, Variant};

    #[test]
    fn a_mask_forbids_most_where_it_allows_less_than_an_eighth() {
        for vocab_size in [0u32, 1, 8, 9, 4000, 151_936] {
            let words = vocab_size.div_ceil(32) as usize;
            for allowed in [0, 1, vocab_size / 8, vocab_size.div_ceil(8), vocab_size / 4, vocab_size] {
                // From the end, so that the last words decide.
                let mut mask = vec![0u32; words];
                (0..allowed.min(vocab_size)).rev().for_each(|i| {
                    let token = vocab_size - 1 - i;
                    mask[token as usize / 32] |= 1 << (token % 32);
                });
                let count: u32 = mask.iter().map(|word| word.count_ones()).sum();
                assert_eq!(forbids_most(&mask, vocab_size), 8 * count < vocab_size, "{allowed} of {vocab_size}");
            }
        }
    }

    #[test]
    fn a_block_begins_with_the_hidden_states_of_its_rows() {
        let states: Vec<f32> = (0..18).map(|i| i as f32).collect();
        let input = Matrix::new(&states, 6, 3).unwrap();
        let (params, plan) = (RowParams::default(), Plan::default());
        let row = params.check(&[], &CAN, &plan, 64).unwrap();
        let mut staging = Staging::of(0..64, 64);
        staging.push_of(4, &params, &row, [0]).unwrap();
        staging.push_of(0, &params, &row, [0, 1]).unwrap();
        staging.take_hidden(Some(&input));
        let bytes = staging.finish(Some(&input), DeviceAddress::new(64)).to_vec();
        let of = |r: usize| [input.row_bytes(r), &[0; 20]].concat();
        assert_eq!((bytes.len(), &bytes[..96]), (96 + 3 * 56, [of(4), of(0), of(0)].concat().as_slice()));
        staging.take_hidden(None);
        assert_eq!(staging.finish(None, DeviceAddress::new(64)), &bytes[96..]);
        // `clear` removes all contents.
        staging.clear();
        assert_eq!(staging.len(), 0);
    }

    const CAN: Capabilities = Capabilities {
        backend: "cuda",
        variant: Variant::Tiled,
        exactness: Exactness::Pathwise,
        input: Input::Hidden,
        without_replacement: false,
        knobs: flash_sampling_core::Knobs::ADJUSTMENTS,
        canonical: false,
        shadow: false,
    };

    #[test]
    fn a_shard_takes_its_words_of_a_mask() {
        let mask: Vec<u32> = (0..10).collect();
        for (len, tokens, own) in [(10, 70..200, 2..7), (5, 70..200, 2..5), (1, 70..200, 1..1), (10, 64..64, 2..2)] {
            let params = RowParams { mask: Some(&mask[..len]), ..RowParams::default() };
            let row = params.check(&[], &CAN, &Plan::default(), 320).unwrap();
            let mut staging = Staging::of(tokens.clone(), 320);
            staging.push(&params, &row, [0]).unwrap();
            let bytes = staging.finish(None, DeviceAddress::new(4096)).to_vec();
            let row: Row = bytemuck::pod_read_unaligned(&bytes[..56]);
            assert_eq!((row.mask.get(), row.mask_words), (4096 + 56 - 4 * 2, own.end), "{len} words, {tokens:?}");
            let mut words: Vec<u32> = own.collect();
            words.resize(words.len().next_multiple_of(2), 0);
            assert_eq!(bytes[56..], *bytemuck::cast_slice::<u32, u8>(&words));
        }
    }

    #[test]
    fn rows_find_their_masks_and_biases() {
        let plan = Plan { max_draws: 2, ..Plan::default() };
        let masked = RowParams { mask: Some(&[1, 2, 3, 4]), ..RowParams::default() };
        let biased = RowParams { logit_bias: &[(3, -1.0), (9, 2.5)], mask: Some(&[]), ..RowParams::default() };
        let history = History::new(&[5, 9]);
        let penalised = RowParams { history: Some(&history), repetition_penalty: 0.5, ..biased };
        let mut staging = Staging::of(0..64, 64);
        let all = [(masked, 0), (masked, 1), (biased, 0), (penalised, 0)];
        let mut adjustments = Adjustments::default();
        adjustments.collect(all.iter().map(|(params, _)| params));
        for (r, (params, draw)) in all.into_iter().enumerate() {
            let row = params.check(adjustments.row(r), &CAN, &plan, 64).unwrap();
            staging.push(&params, &row, [draw]).unwrap();
        }
        let (size, most) = (staging.len(), max_list_bytes(&all.map(|(params, _)| params), 64));
        assert!(most >= size - staging.lists_at(), "{most}");
        let bytes = staging.finish(None, DeviceAddress::new(4096)).to_vec();
        assert_eq!(bytes.len(), size);
        let rows: Vec<Row> = bytes[..4 * 56].chunks_exact(56).map(bytemuck::pod_read_unaligned).collect();
        let words_at = 4096 + 4 * 56;
        let lists_at = words_at + 8;
        assert_eq!((rows[0].mask.get(), rows[0].mask_words, rows[0].bias.get()), (words_at, 2, 0));
        assert_eq!((rows[1].mask.get(), rows[1].draw), (words_at, 1));
        assert_eq!((rows[2].mask.get(), rows[2].mask_words), (words_at + 8, 0));
        assert_eq!((rows[2].bias.get(), rows[2].biases, rows[2].largest_bias), (lists_at, 2, 2.5));
        let (at, biases) = (lists_at + 16, 3 | PENALISED);
        assert_eq!((rows[3].bias.get(), rows[3].biases, rows[3].largest_bias), (at, biases, 2.5));
        let list: [f32; 14] = bytemuck::pod_read_unaligned(&bytes[(at - 4096) as usize..][..56]);
        let tokens = [list[0], list[2], list[4]].map(f32::to_bits);
        assert_eq!((tokens, [list[1], list[3], list[5]]), ([3, 5, 9], [-1.0, 0.0, 2.5]));
        assert_eq!(list[6..], [0.5, 0.0, 1.0, 0.0, 0.5, 0.0, 0.5, 0.0]);
        assert_eq!(bytes[(words_at - 4096) as usize..][..8], bytemuck::cast::<[u32; 2], [u8; 8]>([1, 2]));
        assert_eq!(size, 4 * 56 + 8 * (1 + 2 + 3 + 4));
    }
}
