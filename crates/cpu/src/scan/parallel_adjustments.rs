//! Collects the adjustments of a call's rows on all threads.
//!
//! Each thread takes one run of rows. On one thread, penalties over 1000 tokens for each of 64 rows took a tenth of the
//! time of the other work of the call on 16 threads.

use crate::options::Threads;
use flash_sampling_core::RowParams;
use flash_sampling_core::backend::{Adjustment, Adjustments, IndexedAdjustments};
use rayon::prelude::*;

/// The number of history tokens from which all threads share the work.
const MANY: usize = 4096;

/// The adjustments of a call's rows. A reused value keeps its memory.
#[derive(Debug, Default)]
pub(crate) struct ParallelAdjustments {
    parts: Vec<Adjustments>,
    /// The rows per part.
    each: usize,
}

impl ParallelAdjustments {
    /// Collects the adjustments of rows.
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

    /// The adjustments of a collected row.
    pub(crate) fn row(&self, r: usize) -> &[Adjustment] {
        self.parts[r / self.each].row(r % self.each)
    }

    /// Returns the adjustments of a collected row, with an index.
    pub(crate) fn indexed(&self, r: usize) -> IndexedAdjustments<'_> {
        self.parts[r / self.each].indexed(r % self.each)
    }
}
