//! Raw log-probabilities over shards.
//!
//! The masses of raw logits merge like any masses, and come with the overviews; those of masked tokens count too, so they
//! come from shards that have nothing to draw as well. The raw logit of a drawn token is known where the token is: once the
//! rows are drawn, one more exchange asks for these.

use crate::error::ShardError;
use crate::filtered::{Ask, OpenRows};
use crate::rows::Checked;
use flash_sampling_core::{RowSummary, Samples};

impl OpenRows {
    /// Asks for the raw logits of what was drawn, in the rows that have raw log-probabilities; false when there are none.
    pub(crate) fn next_raw(&mut self, rows: &[Checked<'_>], out: &Samples) -> bool {
        let OpenRows { rows: open, members, .. } = self;
        members.clear();
        for (r, row) in rows.iter().enumerate() {
            let asks = row.as_ref().is_ok_and(|row| row.raw_logprobs.is_some());
            if let (true, Ok(sample)) = (asks, out.row(r)) {
                open[r].drawn.clear();
                open[r].drawn.extend(sample.draws.iter().map(|draw| draw.token));
                open[r].ask = Some(Ask::Raw);
                members.push(r);
            }
        }
        !members.is_empty()
    }

    /// Gives the rows what the shards told. `told(shard, row)` is asked only for the rows of the pass.
    pub(crate) fn note_raw<'s>(
        &mut self,
        shards: usize,
        told: impl Fn(usize, usize) -> &'s RowSummary,
        out: &mut Samples,
    ) -> Result<(), ShardError> {
        for &r in &self.members {
            let open = &mut self.rows[r];
            let told = || (0..shards).flat_map(|shard| &told(shard, r).raw_logits);
            open.logits.clear();
            for &token in &open.drawn {
                let found = told().find(|(own, _)| *own == token);
                open.logits.push(found.ok_or(ShardError::RawLogit { row: r, token })?.1);
            }
            let RowSummary { raw_mass, raw_top, .. } = &open.overview;
            let Some(raw_mass) = raw_mass else { continue };
            out.note_raw(r, raw_mass, raw_top.as_slice(), open.logits.iter().copied());
        }
        Ok(())
    }
}
