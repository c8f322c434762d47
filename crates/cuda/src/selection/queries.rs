//! What is asked of stored logits, and what that comes to.

use crate::abi::{DeviceAddress, Item, Row};
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use flash_sampling_core::Candidate;

/// What is asked of a stored row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    pub(crate) item: Item,
    /// Seed, position and draw of the noise; greedy: by logit. The transforms are done.
    pub(crate) noise: Row,
}

/// How wishes are granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The best token.
    Draws,
    /// The `limit` best tokens.
    Lists,
    /// Tokens among which the frontier of a draw is, best score first. The noise's `inv_temperature` is what logits are multiplied
    /// by for scores.
    Frontiers,
    /// The tokens with a logit of at least the item's `slack`, the largest first.
    Above,
}

/// What the canonical arithmetic works with: the inputs that the stored logits come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CanonicalInputs {
    pub(crate) head: DeviceHead,
    /// `[rows, hidden]`, a row for each stored one.
    pub(crate) hidden: DeviceMatrix,
    /// Mask, bias and temperature of each stored row.
    pub(crate) rows: DeviceAddress<Row>,
}

/// What wishes came to, in their order.
#[derive(Debug, Default)]
pub(crate) struct QueryResults {
    candidates: Vec<Candidate>,
    ends: Vec<usize>,
}

impl QueryResults {
    pub(crate) fn clear(&mut self) {
        self.candidates.clear();
        self.ends.clear();
    }

    /// The candidates of a wish, best first, at most its limit.
    pub(crate) fn get(&self, wish: usize) -> &[Candidate] {
        let start = wish.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.candidates[start..self.ends[wish]]
    }

    pub(crate) fn push(&mut self, candidates: impl IntoIterator<Item = Candidate>) {
        self.candidates.extend(candidates);
        self.ends.push(self.candidates.len());
    }
}
