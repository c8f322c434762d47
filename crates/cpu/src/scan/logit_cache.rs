//! A cache of the logits above a row's mass cutoff, for top-p.
//!
//! Bins give the mass before a token, except the mass before it in its own bin. If the winner is in the bin of the
//! limit, only a pass over the whole weight would decide the row. This happens to every 150th row with much mass in
//! many tokens: with 64 rows, every fourth call took such a pass for one row. So each worker caches the logits that
//! enter bins, up to its capacity. A header precedes each tile's logits, and points to the row's previous tile.

use crate::simd::SPAN;
use flash_sampling_core::backend::selection::PrefixMass;
use flash_sampling_core::backend::{LogitRank, MassHistogram};

/// The capacity of a call, as the fraction `KEPT / OF` of its logits: rows of language models need 26%. Each worker has
/// room for `MORE` additional logits per row, for an imprecise first cutoff and an uneven number of tiles.
const KEPT: u64 = 3;
const OF: u64 = 10;
const MORE: usize = 2048;
/// A call that would cache more than these logits, 12 MiB, caches none.
const WORTH: u64 = 3 << 20;
/// The maximum number of words of all workers, 20 MiB, without the words that each worker gathers at a time. It limits
/// the additional capacity of many workers with many rows, which rows without a cutoff fill.
const MOST: usize = 5 << 20;
/// The maximum number of logits that are gathered at a time, and the words that a vector store may write beyond them.
pub(crate) const GATHERED: usize = 4 * SPAN;
pub(crate) const VECTOR: usize = 16;
/// Words before the logits of a tile: the number of logits, and the start of the row's previous tile.
const HEADER: usize = 2;
const NONE: u32 = u32::MAX;

/// The cached logits of a worker's rows.
#[derive(Debug, Default)]
pub(crate) struct LogitCache {
    words: Vec<u32>,
    end: usize,
}

/// The position of a row's logits in the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedRow {
    last: u32,
    /// Whether the cache has all logits at or above the cutoff at the time of their tile.
    complete: bool,
}

impl Default for CachedRow {
    fn default() -> Self {
        CachedRow { last: NONE, complete: false }
    }
}

impl CachedRow {
    /// Resets the row. `keep`: whether its logits are cached.
    pub(crate) fn begin(&mut self, keep: bool) {
        *self = CachedRow { last: NONE, complete: keep };
    }

    /// Whether all logits are cached.
    #[cfg(test)]
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Caches no further logits of the row.
    #[inline(always)]
    pub(crate) fn end(&mut self) {
        self.complete = false;
    }
}

impl LogitCache {
    /// Empties the cache for a call of `rows` with `tokens` each, on one of `workers`. Returns whether it caches any.
    pub(crate) fn begin(&mut self, rows: usize, tokens: u32, workers: usize) -> bool {
        self.end = 0;
        let logits = rows as u64 * u64::from(tokens) / OF * KEPT;
        let room = logits.div_ceil(workers as u64) as usize + rows * MORE.min(tokens as usize);
        let room = room.min(MOST / workers) + 2 * GATHERED;
        if logits <= WORTH && self.words.len() < room {
            // Frees the old memory first, to avoid twice the memory.
            self.words = Vec::new();
            self.words = vec![0; room];
        }
        logits <= WORTH
    }

    /// Returns room for [`GATHERED`] logits of a row and one more vector; `None` if the row is not cached.
    #[inline(always)]
    pub(crate) fn room(&mut self, run: &mut CachedRow) -> Option<&mut [u32]> {
        if run.complete {
            let room = self.words.get_mut(self.end + HEADER..self.end + HEADER + GATHERED + VECTOR);
            run.complete = room.is_some();
            return room;
        }
        None
    }

    /// Appends `count` logits that the caller wrote to [`LogitCache::room`].
    #[inline(always)]
    pub(crate) fn keep(&mut self, run: &mut CachedRow, count: usize) {
        if count > 0 {
            self.words[self.end] = count as u32;
            self.words[self.end + 1] = run.last;
            run.last = self.end as u32;
            self.end += HEADER + count;
        }
    }

    /// Appends logits; logits below the cutoff are allowed.
    pub(crate) fn extend(&mut self, run: &mut CachedRow, logits: impl Iterator<Item = f32>) {
        let mut logits = logits.peekable();
        while logits.peek().is_some() {
            let Some(room) = self.room(run) else { return };
            let mut count = 0;
            for (word, logit) in room[..GATHERED].iter_mut().zip(&mut logits) {
                *word = logit.to_bits();
                count += 1;
            }
            self.keep(run, count);
        }
    }

    /// Returns the memory of the next logits, for prefetches.
    #[inline(always)]
    pub(crate) fn next(&self) -> &[u32] {
        let from = self.end + GATHERED / 2;
        self.words.get(from..from + GATHERED / 2).unwrap_or_default()
    }

    /// Returns the logits of a row, in unspecified order.
    pub(crate) fn logits(&self, run: CachedRow) -> impl Iterator<Item = f32> + '_ {
        let mut next = run.last;
        let tiles = core::iter::from_fn(move || {
            let at = next as usize;
            let [count, before] = *self.words.get(at..)?.first_chunk::<HEADER>()?;
            next = before;
            self.words.get(at + HEADER..at + HEADER + count as usize)
        });
        tiles.flatten().map(|&bits| f32::from_bits(bits))
    }

    /// Returns the mass before a token in its own bin, from the cached logits of all workers; `None` if they do not
    /// determine it. `floor` is the highest of the workers' cutoffs.
    pub(crate) fn prefix_mass<'a>(
        workers: impl Iterator<Item = (&'a LogitCache, CachedRow)> + Clone,
        rank: LogitRank,
        floor: f32,
    ) -> Option<PrefixMass> {
        let edge = MassHistogram::edge(rank.logit);
        // Within this range, the mass of a logit equals the mass of its entry.
        if edge < floor || edge.abs() > 1e5 || !workers.clone().all(|(_, run)| run.complete) {
            return None;
        }
        let next = edge + 0.125;
        let (mut mass, mut equal) = (0, 0);
        for logit in workers.flat_map(|(above, run)| above.logits(run)) {
            if logit > rank.logit && logit < next {
                mass += u64::from(MassHistogram::entry_of(logit) as u32);
            }
            equal += u32::from(logit == rank.logit);
        }
        // With equal logits, the lower token comes first, but the cache has no tokens.
        (equal == 1).then(|| PrefixMass::with_mass(rank, mass))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cached_logits_give_the_mass_of_a_pass(
            logits in prop::collection::vec(prop_oneof![9 => -2f32..2.0, 1 => Just(0.25f32)], 1..900),
            splits in (0usize..900, 0usize..900), at in 0usize..900, floor in -3f32..2.0,
        ) {
            let floor = MassHistogram::edge(floor);
            let at = at % logits.len();
            let (a, b) = (splits.0 % logits.len(), splits.1 % logits.len());
            let (a, b) = (a.min(b), a.max(b));
            let rank = LogitRank { logit: logits[at], token: at as u32 };
            let mut plain = PrefixMass::new(rank);
            plain.extend_from_slice(0, &logits);
            // Two workers, one of them with two tiles, and a tile of another row between them.
            let mut workers = [LogitCache::default(), LogitCache::default()];
            let (mut runs, mut other) = ([CachedRow::default(); 2], CachedRow::default());
            assert!(workers[0].begin(2, 1000, 2) && workers[1].begin(2, 1000, 2));
            runs.iter_mut().chain([&mut other]).for_each(|run| run.begin(true));
            let reaching = |logits: &[f32]| logits.iter().copied().filter(|&l| l >= floor).collect::<Vec<_>>().into_iter();
            workers[0].extend(&mut runs[0], reaching(&logits[..a]));
            workers[0].extend(&mut other, reaching(&logits));
            workers[0].extend(&mut runs[0], reaching(&logits[a..b]));
            workers[1].extend(&mut runs[1], reaching(&logits[b..]));
            let found = LogitCache::prefix_mass(workers.iter().zip(runs), rank, floor);
            let equal = logits.iter().filter(|&&logit| logit == rank.logit).count();
            let inside = MassHistogram::edge(rank.logit) >= floor;
            prop_assert_eq!(found, (inside && equal == 1).then_some(plain));
            runs[1].end();
            prop_assert_eq!(LogitCache::prefix_mass(workers.iter().zip(runs), rank, floor), None);
        }
    }

    #[test]
    fn all_workers_hold_at_most_20_mib() {
        let mut most = 0;
        for (rows, tokens) in
            [(1, 151_936), (64, 151_936), (256, 40_000), (1024, 10_000), (10_000, 1000), (1 << 20, 10)]
        {
            for workers in [1, 2, 16, 64, 256] {
                let mut above = LogitCache::default();
                assert!(above.begin(rows, tokens, workers));
                let words = above.words.len() - 2 * GATHERED;
                assert!(words * workers <= 5 << 20, "{rows} rows of {tokens}, {workers} workers: {words} words each");
                most = most.max(words * workers);
            }
        }
        // Without the limit, the number would be larger.
        assert!(most > 4 << 20, "{most} words");
    }

    #[test]
    fn rows_without_room_are_not_kept() {
        let (mut above, mut run) = (LogitCache::default(), CachedRow::default());
        // More rows than the cache has room for.
        assert!(!above.begin(1 << 10, 1 << 17, 1));
        run.begin(false);
        assert!(above.room(&mut run).is_none());
        assert!(above.begin(1, 1000, 1));
        run.begin(true);
        above.extend(&mut run, (0..1000).map(|i| i as f32));
        assert!(run.complete && above.logits(run).count() == 1000);
        above.extend(&mut run, (0..1000).map(|i| i as f32));
        assert!(!run.complete);
    }
}
