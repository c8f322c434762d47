//! The adjustments of a call's rows, made by all threads.
//!
//! Rows are dealt out in runs, one a thread. Penalties over 1000 tokens for each of 64 rows took one thread a tenth of the
//! time that 16 threads took for all the rest.

use crate::options::Threads;
use flash_sampling_core::{Adjustment, Adjustments, IndexedAdjustments, RowParams};
use rayon::prelude::*;

/// Tokens of histories from which the work is dealt out.
const MANY: usize = 4096;

/// The adjustments of a call's rows. Reusing one keeps its memory.
#[derive(Debug, Default)]
pub(crate) struct ParallelAdjustments {
    parts: Vec<Adjustments>,
    /// Rows of a part.
    each: usize,
}

impl ParallelAdjustments {
    /// The adjustments of rows.
    pub(crate) fn collect(&mut self, rows: &[RowParams<'_>], threads: &Threads) {
        let tokens: usize = rows.iter().map(|row| row.history.map_or(0, |history| history.occurrences().len())).sum();
        let parts = if tokens < MANY { 1 } else { threads.count() };
        self.each = rows.len().div_ceil(parts).max(1);
        self.parts.resize_with(parts.max(self.parts.len()), Adjustments::default);
        let collect = |(part, rows): (&mut Adjustments, &[RowParams<'_>])| {
            part.collect(rows);
            part.index();
        };
        if parts == 1 {
            return collect((&mut self.parts[0], rows));
        }
        let work = self.parts.par_iter_mut().zip(rows.par_chunks(self.each));
        threads.install(|| work.for_each(collect));
    }

    /// The adjustments of a row of those that were collected.
    pub(crate) fn row(&self, r: usize) -> &[Adjustment] {
        self.parts[r / self.each].row(r % self.each)
    }

    /// The same, with an index.
    pub(crate) fn indexed(&self, r: usize) -> IndexedAdjustments<'_> {
        self.parts[r / self.each].indexed(r % self.each)
    }
}
