//! The logits above a row's floor, as a worker's passes leave them: what bins do not tell of a row's top-p.
//!
//! Bins tell the mass before a token but for what comes before it in its own bin. Where the winner lies in the bin in which
//! the limit is, which happens to every 150th row with much mass in many tokens, a pass over the whole weight had to tell:
//! with 64 rows every fourth call took one, for one row. So the logits that go into bins stay where they were
//! gathered for that, as long as there is room: the rows of a worker one after another, each tile's with the way to the row's
//! tile before.

use crate::simd::SPAN;
use flash_sampling_core::MassHistogram;
use flash_sampling_core::backend::selection::PrefixMass;
use flash_sampling_core::summary::winner::LogitRank;

/// Logits of a call that there is room for, of so many: rows as language models have them need 26%. Each worker has room
/// for some more of a row: before its floor is well known, and where it takes more tiles than others.
const KEPT: u64 = 3;
const OF: u64 = 10;
const MORE: usize = 2048;
/// A call that would keep more than these of its logits, 12 MiB, keeps none.
const WORTH: u64 = 3 << 20;
/// Words of all workers together, 20 MiB, beyond what each gathers at a time: many workers with many rows have less room
/// for more of a row, and rows without a floor, which would keep all, fill it.
const MOST: usize = 5 << 20;
/// Logits that are gathered at a time, at most, and what a vector may write beyond them.
pub(crate) const GATHERED: usize = 4 * SPAN;
pub(crate) const VECTOR: usize = 16;
/// Words before the logits of a tile: how many there are, and where the row's tile before begins.
const HEADER: usize = 2;
const NONE: u32 = u32::MAX;

/// The logits of a worker's rows.
#[derive(Debug, Default)]
pub(crate) struct LogitCache {
    words: Vec<u32>,
    end: usize,
}

/// Where a row's logits are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedRow {
    last: u32,
    /// Whether all are there that reach the floor of their time.
    complete: bool,
}

impl Default for CachedRow {
    fn default() -> Self {
        CachedRow { last: NONE, complete: false }
    }
}

impl CachedRow {
    /// The logits of a row of which none was seen; whether they are to be kept.
    pub(crate) fn begin(&mut self, keep: bool) {
        *self = CachedRow { last: NONE, complete: keep };
    }

    /// Whether all are kept.
    #[cfg(test)]
    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Keeps no more of the row.
    #[inline(always)]
    pub(crate) fn end(&mut self) {
        self.complete = false;
    }
}

impl LogitCache {
    /// Empties it for a call of `rows` with `tokens` each, one of so many workers; whether it is worth keeping any.
    pub(crate) fn begin(&mut self, rows: usize, tokens: u32, workers: usize) -> bool {
        self.end = 0;
        let logits = rows as u64 * u64::from(tokens) / OF * KEPT;
        let room = logits.div_ceil(workers as u64) as usize + rows * MORE.min(tokens as usize);
        let room = room.min(MOST / workers) + 2 * GATHERED;
        if logits <= WORTH && self.words.len() < room {
            // Both at once would be twice the memory.
            self.words = Vec::new();
            self.words = vec![0; room];
        }
        logits <= WORTH
    }

    /// Room for [`GATHERED`] logits of a row, and a vector more; none where they are not kept.
    #[inline(always)]
    pub(crate) fn room(&mut self, run: &mut CachedRow) -> Option<&mut [u32]> {
        if run.complete {
            let room = self.words.get_mut(self.end + HEADER..self.end + HEADER + GATHERED + VECTOR);
            run.complete = room.is_some();
            return room;
        }
        None
    }

    /// Keeps `count` logits, which were written to the [room](LogitCache::room) for them.
    #[inline(always)]
    pub(crate) fn keep(&mut self, run: &mut CachedRow, count: usize) {
        if count > 0 {
            self.words[self.end] = count as u32;
            self.words[self.end + 1] = run.last;
            run.last = self.end as u32;
            self.end += HEADER + count;
        }
    }

    /// Keeps some logits: others than those that reach the floor do no harm.
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

    /// Where the next logits will be, for prefetching that.
    #[inline(always)]
    pub(crate) fn next(&self) -> &[u32] {
        let from = self.end + GATHERED / 2;
        self.words.get(from..from + GATHERED / 2).unwrap_or_default()
    }

    /// The logits of a row, in no order.
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

    /// The mass before a token in its own bin, from what all workers keep of its row, where the highest of their floors is
    /// `floor`; `None` where that does not tell.
    pub(crate) fn before<'a>(
        workers: impl Iterator<Item = (&'a LogitCache, CachedRow)> + Clone,
        rank: LogitRank,
        floor: f32,
    ) -> Option<PrefixMass> {
        let edge = MassHistogram::edge(rank.logit);
        // Sizes at which a mass is that of its entry.
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
        // Of equal logits the lower token comes first, and tokens are not kept.
        (equal == 1).then(|| PrefixMass::with_mass(rank, mass))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_it_tells_is_what_a_pass_would(
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
            let told = LogitCache::before(workers.iter().zip(runs), rank, floor);
            let equal = logits.iter().filter(|&&logit| logit == rank.logit).count();
            let inside = MassHistogram::edge(rank.logit) >= floor;
            prop_assert_eq!(told, (inside && equal == 1).then_some(plain));
            runs[1].end();
            prop_assert_eq!(LogitCache::before(workers.iter().zip(runs), rank, floor), None);
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
        // What it would be without the limit is more.
        assert!(most > 4 << 20, "{most} words");
    }

    #[test]
    fn rows_without_room_are_not_kept() {
        let (mut above, mut run) = (LogitCache::default(), CachedRow::default());
        // More rows than there is room for.
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
