//! Raw log-probabilities: log-probabilities of the model's logits, before all transforms of the row.
//!
//! On request, a pass adds a row's raw logits to a second [`MassHistogram`]. The same kernel recomputes the raw logit
//! of a drawn token, which so has the same bits. A second logit with every candidate would slow down all rows. A stream
//! of groups recomputes the raw logit right after it takes the group's sample, while the group's weights are available.

use flash_sampling_core::Samples;
use flash_sampling_core::backend::{Candidate, MassHistogram, Row, TopList, Winner};

/// The state of a row with raw log-probabilities.
#[derive(Clone, Debug, Default)]
pub(crate) struct RawState {
    /// Allocated by the first row with raw log-probabilities.
    mass: Option<MassHistogram>,
    top: TopList,
    on: bool,
}

impl RawState {
    /// Resets the state for a row.
    pub(crate) fn begin(&mut self, row: &Row<'_>) {
        self.on = row.raw_logprobs.is_some();
        if self.on {
            self.mass.get_or_insert_default().clear();
            self.top.reset(row.raw_logprobs.unwrap_or(0) as usize, 0.0);
        }
    }

    /// Whether the row needs raw logits.
    #[inline(always)]
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Adds raw logits, finite or -inf; `logits[i]` belongs to token `first + i`.
    #[inline(always)]
    pub(crate) fn add(&mut self, first: u32, logits: &[f32]) {
        if let (true, Some(mass)) = (self.on, &mut self.mass) {
            mass.extend_from_slice(logits);
            for (token, &logit) in (first..).zip(logits) {
                if logit >= self.top.threshold() && logit > f32::NEG_INFINITY {
                    self.top.push(Candidate { winner: Winner::new(logit, token), logit });
                }
            }
        }
    }

    /// Adds the state of other tokens of the same row.
    pub(crate) fn merge(&mut self, other: &RawState) {
        if let (true, Some(a), Some(b)) = (self.on, &mut self.mass, &other.mass) {
            a.merge(b);
            self.top.merge(&other.top);
        }
    }

    /// Returns the masses and the largest raw logits of the row after the pass, if the row requests them.
    pub(crate) fn kept(&self) -> Option<(&MassHistogram, &TopList)> {
        self.mass.as_ref().filter(|_| self.on).map(|mass| (mass, &self.top))
    }

    /// Sets the raw log-probabilities of row `r` of `out`, if the row requests them. `drawn`: its draws' raw logits.
    pub(crate) fn note(&self, r: usize, drawn: impl Iterator<Item = f32>, out: &mut Samples) {
        if let (true, Some(mass), Ok(_)) = (self.on, &self.mass, out.row(r)) {
            out.set_raw(r, mass, self.top.as_slice(), drawn);
        }
    }
}
