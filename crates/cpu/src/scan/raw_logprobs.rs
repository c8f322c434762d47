//! Log-probabilities of the model's own law: of the logits before anything that belongs to the row.
//!
//! A pass adds a row's raw logits to a second [`MassHistogram`] where they are asked for. The raw logit of a drawn token is
//! computed again, by the same kernel and so to the same bits: a draw is one token, and to carry a second logit with every
//! candidate would burden the rows that do not ask. Where groups of tokens come one after another, it is computed as soon
//! as the group's sample is taken, while the group's weights are there.

use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, MassHistogram, Samples, TopList, Winner};

/// What a row that asks keeps of its raw logits.
#[derive(Clone, Debug, Default)]
pub(crate) struct RawState {
    /// Made when the first such row comes.
    mass: Option<MassHistogram>,
    top: TopList,
    on: bool,
}

impl RawState {
    /// Empties it for a row.
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

    /// Adds what another worker, or another group of tokens, has of the same row.
    pub(crate) fn merge(&mut self, other: &RawState) {
        if let (true, Some(a), Some(b)) = (self.on, &mut self.mass, &other.mass) {
            a.merge(b);
            self.top.merge(&other.top);
        }
    }

    /// The masses and the largest of a row that asked, after the pass.
    pub(crate) fn kept(&self) -> Option<(&MassHistogram, &TopList)> {
        self.mass.as_ref().filter(|_| self.on).map(|mass| (mass, &self.top))
    }

    /// Gives row `r` of `out`, which asked for it, what was kept; `drawn` are the raw logits of its draws.
    pub(crate) fn note(&self, r: usize, drawn: impl Iterator<Item = f32>, out: &mut Samples) {
        if let (true, Some(mass), Ok(_)) = (self.on, &self.mass, out.row(r)) {
            out.set_raw(r, mass, self.top.as_slice(), drawn);
        }
    }
}
