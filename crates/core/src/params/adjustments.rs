//! Changes of single logits: biases, bans and penalties, as one short list per row.

use crate::params::RowParams;
use crate::params::history::Occurrence;
use crate::params::repetitions::Repetitions;
use core::ops::Range;

/// The changes of one token's logit, in this order: `+ bias`, the repetition penalty, `- subtract`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adjustment {
    /// The token.
    pub token: u32,
    /// Added to the logit; -inf for a banned token.
    pub bias: f32,
    /// The repetition penalty: divides a positive logit, multiplies any other logit; 1 = none.
    pub repetition: f32,
    /// Subtracted last: `frequency_penalty * count + presence_penalty`, rounded twice, plus the DRY penalty, rounded
    /// once more. The value is finite, so -inf stays -inf; an infinite penalty bans the token by `bias` instead.
    pub subtract: f32,
}

impl Adjustment {
    /// No change of a token's logit.
    fn none(token: u32) -> Self {
        Adjustment::bias(token, 0.0)
    }

    /// A bias alone.
    pub fn bias(token: u32, bias: f32) -> Self {
        Adjustment { token, bias, repetition: 1.0, subtract: 0.0 }
    }

    /// Combines this item with another item of the same token.
    fn add(&mut self, other: &Adjustment) {
        self.bias += other.bias;
        self.repetition *= other.repetition;
        self.subtract += other.subtract;
    }

    /// The adjusted logit.
    #[inline(always)]
    pub fn apply(&self, logit: f32) -> f32 {
        let l = logit + self.bias;
        let l = if self.repetition == 1.0 {
            l
        } else if l > 0.0 {
            l / self.repetition
        } else {
            l * self.repetition
        };
        l - self.subtract
    }
}

/// The adjustments of the rows of a call, computed once before the pass. A reused value keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct Adjustments {
    items: Vec<Adjustment>,
    /// The end of each row's items.
    ends: Vec<usize>,
    /// For each block of tokens up to the last item's block: the row's first item in the block or after it. Rows with
    /// few items have no starts. Before [`Adjustments::index`], no row has any.
    starts: Vec<u32>,
    /// The end of each row's starts.
    starts_ends: Vec<usize>,
    repetitions: Repetitions,
}

/// Tokens per block. With a thousand items per row and 152k tokens, a block has seven items.
const BLOCK: u32 = 1024;
/// The largest number of blocks per item of an indexed row. Rows with fewer items are searched without an index. The
/// limit bounds the memory, because tokens of unchecked rows can be any numbers.
const BLOCKS_PER_ITEM: usize = 2;

/// The adjustments of a row, with an index: a search of a thousand uncached items waits for memory at every step.
#[derive(Clone, Copy, Debug, Default)]
pub struct IndexedAdjustments<'a> {
    items: &'a [Adjustment],
    starts: &'a [u32],
}

impl<'a> IndexedAdjustments<'a> {
    /// A part of the row's items with at least the items of `tokens`, a range that is not empty.
    #[inline(always)]
    pub fn near(&self, tokens: Range<u32>) -> &'a [Adjustment] {
        if self.starts.is_empty() {
            return self.items;
        }
        let at = |block: u32| self.starts.get(block as usize).map_or(self.items.len(), |&start| start as usize);
        &self.items[at(tokens.start / BLOCK)..at((tokens.end - 1) / BLOCK + 1)]
    }

    /// The part of the index that [`near`](IndexedAdjustments::near) reads, for prefetching.
    #[inline(always)]
    pub fn near_index(&self, tokens: Range<u32>) -> &'a [u32] {
        let block = (tokens.start / BLOCK) as usize;
        &self.starts[block.min(self.starts.len())..(block + 2).min(self.starts.len())]
    }
}

impl Adjustments {
    /// Computes the adjustments of rows. Tokens are strictly ascending within a row.
    pub fn collect<'p>(&mut self, rows: impl IntoIterator<Item = &'p RowParams<'p>>) {
        self.begin();
        rows.into_iter().for_each(|row| self.push(row, None));
    }

    /// [`Adjustments::collect`] for the tokens of one vocabulary shard.
    pub fn collect_within<'p>(&mut self, rows: impl IntoIterator<Item = &'p RowParams<'p>>, tokens: Range<u32>) {
        self.begin();
        rows.into_iter().for_each(|row| self.push(row, Some(&tokens)));
    }

    fn begin(&mut self) {
        self.items.clear();
        self.ends.clear();
        self.starts.clear();
        self.starts_ends.clear();
    }

    /// Builds the index of the rows, for [`Adjustments::indexed`].
    pub fn index(&mut self) {
        self.starts.clear();
        self.starts_ends.clear();
        (0..self.ends.len()).for_each(|row| self.push_starts(row));
    }

    /// Appends the index of a row.
    fn push_starts(&mut self, row: usize) {
        let items = &self.items[row.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[row]];
        let blocks = items.last().map_or(0, |last| last.token / BLOCK + 1);
        if blocks as usize <= BLOCKS_PER_ITEM * items.len() {
            let mut at = 0;
            self.starts.extend((0..blocks).map(|block| {
                at += items[at..].iter().take_while(|item| item.token / BLOCK < block).count();
                at as u32
            }));
        }
        self.starts_ends.push(self.starts.len());
    }

    /// The adjustments of a row. Panics if `row` is out of range.
    pub fn row(&self, row: usize) -> &[Adjustment] {
        let from = row.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.items[from..self.ends[row]]
    }

    /// [`Adjustments::row`] with the [index](Adjustments::index), if it is built.
    pub fn indexed(&self, row: usize) -> IndexedAdjustments<'_> {
        let from = row.checked_sub(1).and_then(|before| self.starts_ends.get(before)).map_or(0, |&end| end);
        let end = self.starts_ends.get(row).map_or(from, |&end| end);
        IndexedAdjustments { items: self.row(row), starts: &self.starts[from..end] }
    }

    /// Appends the items of each knob of a row, for `tokens` or for all tokens, one item per token.
    fn push(&mut self, row: &RowParams<'_>, tokens: Option<&Range<u32>>) {
        let from = self.items.len();
        let is_in_range = |token: &u32| tokens.is_none_or(|tokens| tokens.contains(token));
        let (occurrences, penalty) = row.penalties(tokens);
        self.items.reserve(occurrences.len());
        let stops = if row.stops_are_banned() { row.stop_token_ids } else { &[] };
        let bans = row.banned.iter().chain(stops).map(|&token| (token, f32::NEG_INFINITY));
        let biases = row.logit_bias.iter().copied().chain(bans);
        if row.repetition_penalty == 1.0 {
            self.items.extend(occurrences.iter().filter(|o| o.output_count > 0).map(penalty));
        } else {
            // Without a filter: a filter that passes all items takes four times as long.
            self.items.extend(occurrences.iter().map(penalty));
        }
        let penalised = self.items.len();
        let biases = biases.filter(|(token, _)| is_in_range(token));
        self.items.extend(biases.map(|(token, bias)| Adjustment::bias(token, bias)));
        if let (Some(history), true) = (row.history, row.dry_multiplier != 0.0) {
            let tokens = history.tokens();
            let looked_at = &tokens[tokens.len().saturating_sub(row.dry_penalty_last_n as usize)..];
            let allowed = row.dry_allowed_length.max(1) as usize;
            let found = self.repetitions.find(looked_at, row.dry_sequence_breakers, allowed);
            let found = found.iter().filter(|(token, _)| is_in_range(token));
            self.items.extend(found.map(|&(token, length)| {
                let subtract = row.dry_multiplier * power(row.dry_base, length - allowed);
                Adjustment { subtract, ..Adjustment::none(token) }
            }));
        }
        // Penalties alone are sorted and finite.
        if self.items.len() > penalised {
            self.fold(from);
        }
        self.ends.push(self.items.len());
    }

    /// Sorts the items from index `from` on, and combines the items of the same token.
    ///
    /// The order of combination does not matter: of a token's items, at most two differ from [`Adjustment::none`] in
    /// the same field, or the items are bans.
    fn fold(&mut self, from: usize) {
        if !self.items[from..].is_sorted_by(|a, b| a.token < b.token) {
            self.items[from..].sort_unstable_by_key(|item| item.token);
            let mut end = from;
            for at in from..self.items.len() {
                let item = self.items[at];
                match self.items[from..end].last_mut() {
                    Some(last) if last.token == item.token => last.add(&item),
                    _ => {
                        self.items[end] = item;
                        end += 1;
                    }
                }
            }
            self.items.truncate(end);
        }
        let is_infinite = |item: &Adjustment| item.subtract == f32::INFINITY;
        if self.items[from..].iter().any(is_infinite) {
            for item in self.items[from..].iter_mut().filter(|item| is_infinite(item)) {
                (item.bias, item.subtract) = (f32::NEG_INFINITY, 0.0);
            }
        }
    }
}

/// `base^exponent`, possibly infinite. Multiplications in float64 give the same bits on every machine.
fn power(base: f32, exponent: usize) -> f32 {
    let mut power = 1.0f64;
    for _ in 0..exponent {
        if base == 1.0 || power == f64::INFINITY {
            break;
        }
        power *= f64::from(base);
    }
    power as f32
}

impl<'p> RowParams<'p> {
    /// The tokens of `tokens`, or of all, that may have penalties, ascending; and the penalty of one token.
    ///
    /// Without a repetition penalty, only generated tokens have a penalty.
    fn penalties(&self, tokens: Option<&Range<u32>>) -> (&'p [Occurrence], impl Fn(&Occurrence) -> Adjustment + 'p) {
        let (repetition, frequency, presence) =
            (self.repetition_penalty, self.frequency_penalty, self.presence_penalty);
        let counts = frequency != 0.0 || presence != 0.0;
        let occurrences = match self.history {
            Some(history) if counts || repetition != 1.0 => {
                tokens.map_or(history.occurrences(), |tokens| history.occurrences_within(tokens))
            }
            _ => &[],
        };
        (occurrences, move |o| {
            let subtract = if o.output_count > 0 { frequency * o.output_count as f32 + presence } else { 0.0 };
            Adjustment { repetition, subtract, ..Adjustment::none(o.token) }
        })
    }

    /// Whether the sequence has fewer generated tokens than `min_tokens`.
    fn stops_are_banned(&self) -> bool {
        (self.history.map_or(0, |h| h.output().len()) as u64) < u64::from(self.min_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::history::History;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_list_does_what_its_knobs_say(
            prompt in prop::collection::vec(0u32..16, 0..12), output in prop::collection::vec(0u32..16, 0..12),
            bias in prop::collection::btree_map(0u32..16, -2f32..2.0, 0..8), banned in prop::collection::vec(0u32..16, 0..4),
            stops in prop::collection::vec(0u32..16, 0..3), min_tokens in 0u32..14,
            repetition in prop_oneof![Just(1f32), 0.5f32..2.0], frequency in prop_oneof![Just(0f32), -1f32..1.0],
            presence in prop_oneof![Just(0f32), -1f32..1.0],
        ) {
            let bias: Vec<_> = bias.into_iter().collect();
            let mut history = History::new(&prompt);
            history.extend(output.iter().copied());
            let row = RowParams {
                logit_bias: &bias, banned: &banned, stop_token_ids: &stops, min_tokens, history: Some(&history),
                repetition_penalty: repetition, frequency_penalty: frequency, presence_penalty: presence,
                ..RowParams::default()
            };
            let mut all = Adjustments::default();
            all.collect_within([&row, &RowParams::default(), &row], 5..11);
            let within = [all.row(0).to_vec(), all.row(2).to_vec()];
            prop_assert!(all.row(1).is_empty());
            all.collect([&RowParams::default(), &row, &RowParams::default()]);
            let of_whole: Vec<_> = all.row(1).iter().filter(|a| (5..11).contains(&a.token)).copied().collect();
            prop_assert_eq!(within, [of_whole.clone(), of_whole]);
            prop_assert!(all.row(0).is_empty() && all.row(2).is_empty());
            prop_assert!(all.row(1).windows(2).all(|w| w[0].token < w[1].token));
            for token in 0..16 {
                for logit in [-3.0f32, 0.0, 3.0] {
                    let count = output.iter().filter(|&&t| t == token).count() as f32;
                    let mut want = logit;
                    if banned.contains(&token) || (output.len() < min_tokens as usize && stops.contains(&token)) {
                        want = f32::NEG_INFINITY;
                    }
                    want += bias.iter().find(|b| b.0 == token).map_or(0.0, |b| b.1);
                    if count > 0.0 || prompt.contains(&token) {
                        want = if want > 0.0 { want / repetition } else { want * repetition };
                    }
                    if count > 0.0 {
                        want -= frequency * count + presence;
                    }
                    let adjustment = all.row(1).iter().find(|a| a.token == token);
                    prop_assert_eq!(adjustment.map_or(logit, |a| a.apply(logit)), want);
                }
            }
        }
    }

    #[test]
    fn long_lists_with_repeats_are_folded_within_their_row() {
        let banned: Vec<u32> = (0..40_000).rev().chain(0..9).collect();
        let stops: Vec<u32> = (0..40_000).rev().step_by(2).collect();
        let row = RowParams { banned: &banned, stop_token_ids: &stops, min_tokens: 1, ..RowParams::default() };
        let last = RowParams { logit_bias: &[(39_999, 2.0)], ..RowParams::default() };
        let mut all = Adjustments::default();
        all.collect([&row, &row, &last, &last]);
        for r in 0..2 {
            assert_eq!(all.row(r).len(), 40_000);
            assert!((0..).zip(all.row(r)).all(|(token, a)| *a == Adjustment::bias(token, f32::NEG_INFINITY)));
        }
        assert_eq!((all.row(2), all.row(3)), (&[Adjustment::bias(39_999, 2.0)][..], all.row(2)));
    }

    #[test]
    fn no_value_makes_a_logit_nan() {
        let large = crate::params::LARGEST_PENALTY;
        let mut history = History::new(&[1, 2, 3, 1, 2]);
        history.extend([3, 1, 2]);
        for penalty in [large, -large] {
            for (dry_multiplier, dry_base) in [(f32::MAX, 1.0), (f32::MAX, f32::MAX)] {
                let row = RowParams {
                    history: Some(&history),
                    banned: &[2],
                    repetition_penalty: f32::MIN_POSITIVE,
                    frequency_penalty: penalty,
                    presence_penalty: penalty,
                    dry_multiplier,
                    dry_base,
                    dry_allowed_length: 1,
                    ..RowParams::default()
                };
                row.check_values().unwrap();
                let mut all = Adjustments::default();
                all.collect([&row]);
                let item = |token| *all.row(0).iter().find(|a| a.token == token).unwrap();
                for logit in [f32::NEG_INFINITY, f32::MIN, -1.0, 0.0, f32::MAX] {
                    assert!([1, 2, 3].iter().all(|&token| !item(token).apply(logit).is_nan()), "{row:?}");
                }
                assert!([1, 2, 3].iter().all(|&token| item(token).apply(f32::NEG_INFINITY) == f32::NEG_INFINITY));
                // The penalty of the token that continues the repetition exceeds every finite logit.
                assert!(
                    dry_base == 1.0
                        || item(3)
                            == Adjustment { repetition: f32::MIN_POSITIVE, ..Adjustment::bias(3, f32::NEG_INFINITY) }
                );
            }
        }
        for penalty in [large.next_up(), -large.next_up(), f32::NAN] {
            let row = RowParams { frequency_penalty: penalty, ..RowParams::default() };
            assert!(row.check_values().unwrap_err().to_string().ends_with("but must be between -2^64 and 2^64"));
        }
    }

    #[test]
    fn the_index_leaves_no_item_out() {
        let biases: Vec<(u32, f32)> = (0..500u32).map(|i| (i * i % 997 * 7 + 3000, 1.0)).collect();
        let rows = [&biases[..], &[], &biases[..300], &[(5, 1.0)], &[(u32::MAX, 1.0)]];
        let rows = rows.map(|logit_bias| RowParams { logit_bias, ..RowParams::default() });
        let mut all = Adjustments::default();
        for _ in 0..2 {
            all.collect(&rows);
            assert!(all.indexed(0).starts.is_empty() && all.indexed(4).near(0..1) == all.row(4));
            all.index();
            assert!(!all.indexed(0).starts.is_empty() && all.indexed(4).starts.is_empty());
            for r in 0..rows.len() {
                for tokens in [0..1, 0..4, 0..256, 1000..1030, 4096..5120, 4095..4097, 9000..9256, 20_000..20_001] {
                    let inside = |items: &[Adjustment]| items.iter().filter(|a| tokens.contains(&a.token)).count();
                    let near = all.indexed(r).near(tokens.clone());
                    assert_eq!(inside(near), inside(all.row(r)), "row {r}, {tokens:?}");
                    assert!(r != 0 || near.len() < 200, "{tokens:?}");
                }
            }
        }
    }

    #[test]
    fn dry_takes_more_the_longer_the_repetition() {
        let mut history = History::new(&[5, 1, 2, 3, 4, 5, 2, 3, 6, 5]);
        history.extend([1, 2, 3]);
        // 4 continues "5 1 2 3", 6 continues "2 3"; token 6 has a bias too.
        let row = RowParams {
            history: Some(&history),
            dry_multiplier: 0.5,
            dry_base: 2.0,
            dry_allowed_length: 2,
            logit_bias: &[(6, 1.0)],
            ..RowParams::default()
        };
        let mut all = Adjustments::default();
        let last_three = RowParams { dry_penalty_last_n: 3, ..row };
        let broken = RowParams { dry_sequence_breakers: &[1], ..row };
        all.collect([&row, &last_three, &broken, &RowParams { history: None, ..row }]);
        let bias = |subtract| Adjustment { subtract, ..Adjustment::bias(6, 1.0) };
        assert_eq!(all.row(0), [Adjustment { subtract: 2.0, ..Adjustment::none(4) }, bias(0.5)]);
        assert_eq!((all.row(1), all.row(3)), (&[bias(0.0)][..], &[bias(0.0)][..]));
        assert_eq!(all.row(2), [Adjustment { subtract: 0.5, ..Adjustment::none(4) }, bias(0.5)]);
        all.collect_within([&row], 0..6);
        assert_eq!(all.row(0), [Adjustment { subtract: 2.0, ..Adjustment::none(4) }]);
        assert_eq!(power(1.75, 300), f32::INFINITY);
    }
}
