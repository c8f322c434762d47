//! Queries of stored logits, and their results.

use crate::abi::{DeviceAddress, Item, Row};
use crate::device::{DeviceHead, DeviceMatrix};
use flash_sampling_core::backend::Candidate;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    pub(crate) item: Item,
    /// Seed, position and draw of the noise. A greedy query ranks by logit. The stored logits are already transformed.
    pub(crate) noise: Row,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The best token.
    Draws,
    /// The `limit` best tokens.
    Lists,
    /// Tokens that contain the frontier of a draw, best score first. The noise's `inv_temperature` multiplies logits
    /// for the scores.
    Frontiers,
    /// The tokens with a logit of at least the item's `slack`, largest first.
    Above,
}

/// The inputs of the stored logits, for canonical sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CanonicalInputs {
    pub(crate) head: DeviceHead,
    /// `[rows, hidden]`, one row per stored row.
    pub(crate) hidden: DeviceMatrix,
    /// Mask, bias and temperature of each stored row.
    pub(crate) rows: DeviceAddress<Row>,
}

/// The results of queries, in the order of the queries.
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

    /// The candidates of a query, best first.
    pub(crate) fn get(&self, query: usize) -> &[Candidate] {
        let start = query.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.candidates[start..self.ends[query]]
    }

    pub(crate) fn push(&mut self, candidates: impl IntoIterator<Item = Candidate>) {
        self.candidates.extend(candidates);
        self.ends.push(self.candidates.len());
    }
}
