//! The inputs of one launch as one block of bytes: hidden states, rows, masks, biases and penalties. One copy takes them
//! up.

use crate::abi::{LogitBias, PENALISED, Penalty, Row};
use crate::device::choice::RowKinds;
use core::ops::Range;
use flash_sampling_core::{Adjustment, Matrix, RowParams, params};

/// The block, with offsets where the device will see addresses.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    hidden: Vec<u8>,
    /// Or the rows of the input that they are, and the bytes of each here.
    sources: Vec<usize>,
    stride: usize,
    rows: Vec<Row>,
    words: Vec<u32>,
    /// Words of each mask before those that are there.
    words_before: u64,
    /// The mask that was appended last, by address and length, and where: the draws of a row share it.
    last_mask: Option<(usize, usize, u64)>,
    /// Biases, and where a row has penalties those behind its biases: both take eight bytes.
    lists: Vec<LogitBias>,
    /// Whether any row has a mask that forbids most tokens, or penalties.
    has_knobs: bool,
    /// For [`Staging::arrange`].
    arranged: Vec<Row>,
    bytes: Vec<u8>,
}

/// Words of a mask that tokens before a shard's first may have in the first 256 that kernels take.
const WORDS_BEFORE: usize = 255 / 32;

/// The list of a row's biases and penalties.
#[derive(Clone, Copy, Debug)]
struct List {
    /// Entries before it.
    at: u64,
    /// As [`Row::biases`] has it.
    biases: u32,
    largest_bias: f32,
}

/// Writes adjustments as biases and as penalties. Returns what stands before the penalties, the least of each, and the largest
/// bias, at least 0. Four items side by side: a running least would wait for itself.
fn split(adjustments: &[Adjustment], biases: &mut [LogitBias], penalties: &mut [LogitBias]) -> (Penalty, f32) {
    let (mut repetition, mut subtract, mut bias) = ([1.0f32; 4], [0.0f32; 4], [0.0f32; 4]);
    let mut note = |lane: usize, a: &Adjustment, to: &mut LogitBias, penalty: &mut LogitBias| {
        *to = LogitBias { token: a.token, value: a.bias };
        *penalty = bytemuck::cast(Penalty { repetition: a.repetition, subtract: a.subtract });
        repetition[lane] = if a.repetition < repetition[lane] { a.repetition } else { repetition[lane] };
        subtract[lane] = if a.subtract < subtract[lane] { a.subtract } else { subtract[lane] };
        bias[lane] = if a.bias > bias[lane] { a.bias } else { bias[lane] };
    };
    let (blocks, rest) = adjustments.as_chunks::<4>();
    let (bias_blocks, bias_rest) = biases.as_chunks_mut::<4>();
    let (penalty_blocks, penalty_rest) = penalties.as_chunks_mut::<4>();
    for ((block, biases), penalties) in blocks.iter().zip(bias_blocks).zip(penalty_blocks) {
        (0..4).for_each(|lane| note(lane, &block[lane], &mut biases[lane], &mut penalties[lane]));
    }
    let rest = rest.iter().zip(bias_rest).zip(penalty_rest);
    rest.enumerate().for_each(|(lane, ((a, bias), penalty))| note(lane, a, bias, penalty));
    let least = |lanes: [f32; 4]| lanes.into_iter().fold(f32::INFINITY, f32::min);
    (Penalty { repetition: least(repetition), subtract: least(subtract) }, bias.into_iter().fold(0.0, f32::max))
}

/// Whether a mask forbids most of a vocabulary. It is not read beyond what tells.
fn forbids_most(mask: &[u32], vocab_size: u32) -> bool {
    let most = u64::from(vocab_size).div_ceil(8);
    let mut allowed = 0;
    mask.chunks(64).all(|words| {
        allowed += words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        allowed < most
    }) && allowed < most
}

/// Whether a list of a row may be more than biases, of whatever tokens.
fn may_penalise(row: &RowParams<'_>) -> bool {
    let subtracts = [row.frequency_penalty, row.presence_penalty, row.dry_multiplier].iter().any(|&value| value != 0.0);
    row.history.is_some() && (row.repetition_penalty != 1.0 || subtracts && !row.logit_bias.is_empty())
}

/// An adjustment that is a bias and no more; subtracting is one where nothing else is done.
fn as_bias(a: &Adjustment) -> Option<LogitBias> {
    let alone = |value| Some(LogitBias { token: a.token, value });
    match a {
        _ if a.bias == f32::NEG_INFINITY => alone(a.bias),
        _ if a.repetition != 1.0 => None,
        _ if a.subtract == 0.0 => alone(a.bias),
        _ if a.bias == 0.0 => alone(-a.subtract),
        _ => None,
    }
}

impl Staging {
    pub(crate) fn clear(&mut self) {
        self.hidden.clear();
        self.sources.clear();
        self.rows.clear();
        self.words.clear();
        self.lists.clear();
        (self.last_mask, self.has_knobs) = (None, false);
    }

    /// What the rows have: anything where one has a mask that forbids most tokens, or penalties that are more than biases.
    pub(crate) fn kinds(&self) -> RowKinds {
        match self.has_knobs {
            true => RowKinds::Any,
            false if self.rows.iter().all(|row| row.mask == 0 && row.biases == 0) => RowKinds::Bare,
            false => RowKinds::Unpenalised,
        }
    }

    /// Takes rows for such with anything where some shard's list of one may be more than biases: ranks load the same kernels. One
    /// that a rank alone loads would stand behind the wait of another on the same GPU.
    pub(crate) fn expect_penalties_of(&mut self, rows: &[RowParams<'_>]) {
        self.has_knobs |= rows.iter().any(may_penalise);
    }

    /// Appends a row's adjustments: as biases where they are no more.
    fn push_list(&mut self, adjustments: &[Adjustment]) -> List {
        let (at, count) = (self.lists.len() as u64, adjustments.len() as u32);
        self.lists.extend(adjustments.iter().map_while(as_bias));
        if self.lists.len() as u64 == at + u64::from(count) {
            let largest_bias = self.lists[at as usize..].iter().fold(0.0f32, |largest, bias| largest.max(bias.value));
            return List { at, biases: count, largest_bias };
        }
        let len = adjustments.len();
        self.lists.resize(at as usize + 2 * len + 1, LogitBias::default());
        let (biases, rest) = self.lists[at as usize..].split_at_mut(len);
        let (first, penalties) = rest.split_at_mut(1);
        let (least, largest_bias) = split(adjustments, biases, penalties);
        first[0] = bytemuck::cast(least);
        List { at, biases: count | PENALISED, largest_bias }
    }

    /// Appends a row's hidden states, filled up with zeros to `stride` bytes.
    pub(crate) fn push_hidden(&mut self, row: &[u8], stride: usize) {
        let end = self.hidden.len() + stride;
        self.hidden.extend_from_slice(row);
        self.hidden.resize(end, 0);
    }

    /// Appends a row's hidden states, of which only the number in the input is kept; for [`Staging::finish_of`], which copies
    /// them once. All rows go this way, or none.
    pub(crate) fn push_hidden_of(&mut self, row: usize, stride: usize) {
        self.sources.push(row);
        self.stride = stride;
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The rows, with offsets where the device will see addresses.
    pub(crate) fn staged(&self) -> &[Row] {
        &self.rows
    }

    /// Appends draws of a row from some tokens of the vocabulary, the same ones of all rows: of a mask the words of these are
    /// taken, and the address is that of the first word, which is not there. Kernels take tokens in parts that begin at multiples
    /// of 256 (`scan.cuh`), so that they may read up to [`WORDS_BEFORE`] words before those that are: of other things in the block.
    pub(crate) fn push(
        &mut self,
        seed: u64,
        position: u64,
        row: &params::Row<'_>,
        draws: impl IntoIterator<Item = u32>,
        (tokens, vocab_size): (&Range<u32>, u32),
    ) {
        self.words_before = (tokens.start / 32).into();
        // Offsets are kept as addresses plus one, 0 being the null address.
        let (mask, mask_words) = match row.transform.mask {
            None => (0, 0),
            Some(mask) => {
                let cut = |end: u32| mask.len().min(end.div_ceil(32) as usize);
                let own = &mask[mask.len().min(tokens.start as usize / 32)..cut(tokens.end)];
                let at = match self.last_mask {
                    Some((address, length, at)) if address == mask.as_ptr().addr() && length == mask.len() => at,
                    _ => {
                        self.words.extend_from_slice(own);
                        self.has_knobs = self.has_knobs || forbids_most(&mask[..cut(vocab_size)], vocab_size);
                        (self.words.len() - own.len()) as u64
                    }
                };
                self.last_mask = Some((mask.as_ptr().addr(), mask.len(), at));
                (at + 1, cut(tokens.end) as u32)
            }
        };
        let list = self.push_list(row.transform.adjustments);
        self.has_knobs |= list.biases & PENALISED != 0;
        self.rows.extend(draws.into_iter().map(|draw| Row {
            seed,
            position,
            mask,
            bias: list.at,
            mask_words,
            biases: list.biases,
            inv_temperature: row.transform.inv_temperature,
            largest_bias: list.largest_bias,
            draw,
            greedy: row.greedy.into(),
        }));
    }

    /// Puts the rows into the order in which `order` names them.
    pub(crate) fn arrange(&mut self, order: &[u32]) {
        self.arranged.clear();
        self.arranged.extend(order.iter().map(|&row| self.rows[row as usize]));
        core::mem::swap(&mut self.rows, &mut self.arranged);
    }

    /// Bytes of the block.
    pub(crate) fn len(&self) -> usize {
        self.rows_at() + size_of_val(self.rows.as_slice()) + size_of_val(self.lists.as_slice()) + 4 * self.words.len()
    }

    /// Where the rows begin.
    pub(crate) fn rows_at(&self) -> usize {
        (self.hidden.len() + self.sources.len() * self.stride).next_multiple_of(16)
    }

    /// The block for the device address `base`, a multiple of 16.
    pub(crate) fn finish(&mut self, base: u64) -> &[u8] {
        let mut bytes = core::mem::take(&mut self.bytes);
        bytes.resize(self.len(), 0);
        let (hidden, zeros) = bytes[..self.rows_at()].split_at_mut(self.hidden.len());
        hidden.copy_from_slice(&self.hidden);
        zeros.fill(0);
        self.finish_in(base, &mut bytes);
        self.bytes = bytes;
        &self.bytes
    }

    /// As [`Staging::finish`] into `out`, [`Staging::len`] bytes, with the hidden states of the input's rows.
    pub(crate) fn finish_of(&mut self, input: &Matrix<'_>, base: u64, out: &mut [u8]) {
        let (hidden, zeros) = out[..self.rows_at()].split_at_mut(self.sources.len() * self.stride);
        for (&row, out) in self.sources.iter().zip(hidden.chunks_exact_mut(self.stride.max(1))) {
            let states = input.row_bytes(row);
            out[..states.len()].copy_from_slice(states);
            out[states.len()..].fill(0);
        }
        zeros.fill(0);
        self.finish_in(base, out);
    }

    /// Writes what stands behind the hidden states.
    fn finish_in(&mut self, base: u64, out: &mut [u8]) {
        let rows_at = self.rows_at();
        let lists_at = rows_at + size_of_val(self.rows.as_slice());
        let words_at = lists_at + size_of_val(self.lists.as_slice());
        debug_assert!(self.rows.is_empty() || words_at >= 4 * WORDS_BEFORE, "a row lies before the words");
        for row in &mut self.rows {
            row.bias = if row.biases == 0 { 0 } else { base + lists_at as u64 + 8 * row.bias };
            let first_word = (base + words_at as u64).wrapping_sub(4 * self.words_before);
            row.mask = if row.mask == 0 { 0 } else { first_word.wrapping_add(4 * (row.mask - 1)) };
        }
        let (_, rest) = out.split_at_mut(rows_at);
        let (rows, rest) = rest.split_at_mut(lists_at - rows_at);
        let (lists, words) = rest.split_at_mut(words_at - lists_at);
        rows.copy_from_slice(bytemuck::cast_slice(&self.rows));
        lists.copy_from_slice(bytemuck::cast_slice(&self.lists));
        words.copy_from_slice(bytemuck::cast_slice(&self.words));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::{Adjustments, Capabilities, Exactness, History, Input, Plan, Variant};

    #[test]
    fn what_is_a_bias_and_no_more_is_one() {
        let of =
            |bias, repetition, subtract| as_bias(&Adjustment { token: 1, bias, repetition, subtract }).map(|b| b.value);
        assert_eq!(of(0.5, 1.0, 0.0), Some(0.5));
        assert_eq!(of(0.0, 1.0, 0.5), Some(-0.5));
        assert_eq!(of(f32::NEG_INFINITY, 2.0, 3.0), Some(f32::NEG_INFINITY));
        assert_eq!((of(0.5, 1.0, 0.5), of(0.0, 2.0, 0.0)), (None, None));
    }

    #[test]
    fn a_mask_forbids_most_where_it_allows_less_than_an_eighth() {
        for vocab_size in [0u32, 1, 8, 9, 4000, 151_936] {
            let words = vocab_size.div_ceil(32) as usize;
            for allowed in [0, 1, vocab_size / 8, vocab_size.div_ceil(8), vocab_size / 4, vocab_size] {
                // From the end, so that the last words tell.
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
    fn bounds_are_those_of_every_item() {
        let bounds = |items: &[Adjustment]| {
            let mut lists = [vec![LogitBias::default(); items.len()], vec![LogitBias::default(); items.len()]];
            let [biases, penalties] = &mut lists;
            let bounds = split(items, biases, penalties);
            for ((item, bias), penalty) in items.iter().zip(biases).zip(penalties) {
                let Penalty { repetition, subtract } = bytemuck::cast(*penalty);
                assert_eq!(*item, Adjustment { token: bias.token, bias: bias.value, repetition, subtract });
            }
            bounds
        };
        for len in 0..20usize {
            for at in 0..len {
                let mut items = vec![Adjustment::bias(1, -1.0); len];
                items[at] = Adjustment { token: 1, bias: 3.0, repetition: 0.5, subtract: -2.0 };
                assert_eq!(bounds(&items), (Penalty { repetition: 0.5, subtract: -2.0 }, 3.0), "{at} of {len}");
            }
            let none = (Penalty { repetition: 1.0, subtract: 0.0 }, 0.0);
            assert_eq!(
                bounds(&vec![Adjustment { subtract: 1.0, repetition: 2.0, ..Adjustment::bias(1, -1.0) }; len]),
                none
            );
        }
    }

    #[test]
    fn hidden_states_come_from_the_input_or_from_a_copy_alike() {
        let states: Vec<f32> = (0..18).map(|i| i as f32).collect();
        let input = Matrix::new(&states, 6, 3).unwrap();
        let (mut copied, mut named) = (Staging::default(), Staging::default());
        for row in [4, 0, 4] {
            copied.push_hidden(input.row_bytes(row), 20);
            named.push_hidden_of(row, 20);
        }
        let mut bytes = vec![1; named.len()];
        named.finish_of(&input, 64, &mut bytes);
        assert_eq!((bytes.len(), bytes.as_slice()), (64, copied.finish(64)));
        // What was there goes.
        named.clear();
        assert_eq!(named.len(), 0);
    }

    #[test]
    fn lists_are_more_than_biases_only_where_a_row_may_penalise() {
        let mut history = History::new(&[1, 2, 3, 1, 2]);
        history.extend([3, 1]);
        let mut of_each = [0; 2];
        for case in 0..64u32 {
            let is = |bit: u32| case >> bit & 1 == 1;
            let value = |bit: u32| f32::from(u8::from(is(bit))) / 2.0;
            let row = RowParams {
                history: is(0).then_some(&history),
                repetition_penalty: 1.0 + value(1),
                frequency_penalty: value(2),
                presence_penalty: value(3),
                dry_multiplier: value(4),
                logit_bias: if is(5) { &[(3, 1.0)] } else { &[] },
                ..RowParams::default()
            };
            let mut adjustments = Adjustments::default();
            adjustments.collect([&row]);
            let is_penalised = adjustments.row(0).iter().any(|a| as_bias(a).is_none());
            assert!(!is_penalised || may_penalise(&row), "{row:?}");
            of_each[usize::from(is_penalised)] += 1;
        }
        assert!(of_each.iter().all(|&count| count > 8), "{of_each:?}");
    }

    const CAN: Capabilities = Capabilities {
        backend: "cuda",
        variant: Variant::Tiled,
        exactness: Exactness::Pathwise,
        input: Input::Hidden,
        without_replacement: false,
        knobs: flash_sampling_core::Knobs::ADJUSTMENTS,
        canonical: false,
    };

    #[test]
    fn a_shard_takes_its_words_of_a_mask() {
        let mask: Vec<u32> = (0..10).collect();
        let mut staging = Staging::default();
        for (len, tokens, own) in [(10, 70..200, 2..7), (5, 70..200, 2..5), (1, 70..200, 1..1), (10, 64..64, 2..2)] {
            let params = RowParams { mask: Some(&mask[..len]), ..RowParams::default() };
            let row = params.check(&[], &CAN, &Plan::default(), 320).unwrap();
            staging.clear();
            staging.push(0, 0, &row, [0], (&tokens, 320));
            let bytes = staging.finish(4096).to_vec();
            let row: Row = bytemuck::pod_read_unaligned(&bytes[..56]);
            assert_eq!((row.mask, row.mask_words), (4096 + 56 - 4 * 2, own.end), "{len} words, {tokens:?}");
            let words: Vec<u32> = own.collect();
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
        let mut staging = Staging::default();
        staging.push_hidden(&[7; 18], 20);
        let all = [(masked, 0), (masked, 1), (biased, 0), (penalised, 0)];
        let mut adjustments = Adjustments::default();
        adjustments.collect(all.iter().map(|(params, _)| params));
        for (r, (params, draw)) in all.into_iter().enumerate() {
            let row = params.check(adjustments.row(r), &CAN, &plan, 64).unwrap();
            staging.push(params.seed, params.position, &row, [draw], (&(0..64), 64));
        }
        let size = staging.len();
        let bytes = staging.finish(4096).to_vec();
        assert_eq!(bytes.len(), size);
        let rows: Vec<Row> = bytes[32..32 + 4 * 56].chunks_exact(56).map(bytemuck::pod_read_unaligned).collect();
        let lists_at = 4096 + 32 + 4 * 56;
        let words_at = lists_at + 8 * (2 + 3 + 4);
        assert_eq!((rows[0].mask, rows[0].mask_words, rows[0].bias), (words_at, 2, 0));
        assert_eq!((rows[1].mask, rows[1].draw), (words_at, 1));
        assert_eq!((rows[2].mask, rows[2].mask_words), (words_at + 8, 0));
        assert_eq!((rows[2].bias, rows[2].biases, rows[2].largest_bias), (lists_at, 2, 2.5));
        let (at, biases) = (lists_at + 16, 3 | PENALISED);
        assert_eq!((rows[3].bias, rows[3].biases, rows[3].largest_bias), (at, biases, 2.5));
        let list: [f32; 14] = bytemuck::pod_read_unaligned(&bytes[(at - 4096) as usize..][..56]);
        let tokens = [list[0], list[2], list[4]].map(f32::to_bits);
        assert_eq!((tokens, [list[1], list[3], list[5]]), ([3, 5, 9], [-1.0, 0.0, 2.5]));
        assert_eq!(list[6..], [0.5, 0.0, 1.0, 0.0, 0.5, 0.0, 0.5, 0.0]);
        assert_eq!(bytes[size - 8..], bytemuck::cast::<[u32; 2], [u8; 8]>([1, 2]));
    }
}
