//! Changes of single logits: biases, bans and penalties, as one short list per row.

#[cfg(test)]
mod tests;

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
