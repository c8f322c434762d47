//! The tokens that a row's filters keep, decided from the summary of one pass.
//!
//! Filters rank the tokens of a row by falling logits ([`LogitRank`](crate::summary::winner::LogitRank)), and keep one run of
//! this order. A pass lists the first tokens, and summarizes the whole row as a
//! [`MassHistogram`](crate::backend::MassHistogram); [`Selector::select`] walks the filters over these two. Where the run ends
//! inside the list the kept set is known. Where it ends below the list at a known logit, or where the histogram alone
//! decides on which side of the end a [`Frontier`](crate::backend::Frontier) point lies, the winner is known. Other rows take a
//! second pass: one that sums the mass before the few points in doubt ([`PrefixMass`]), or one that lists the row down
//! to a logit, and with that list the same walk ends inside it.
//!
//! Masses are the integers of the histogram, summed bin by bin from the top, so the answer is a function of the row's
//! logits alone: the same for any tiles, threads, shards or backend, and whether or not a second pass was needed. It is
//! the set that exact arithmetic gives, except where a cumulative mass meets its limit to within 2^-25 of the row's
//! mass, a token's own mass its limit to within 2^-25 of that, or a cut of top-n-sigma a logit to within n times 2^-32
//! nat. In a row of equal logits masses are equal, so it is that set for every limit.

mod cumulative_mass;
mod filter_resolver;
mod passes;
mod prefix_mass;
mod rank_range;
mod row_result;
mod row_view;
mod selector;
mod tail_mass;
#[cfg(test)]
mod tests;
mod typical;

pub use filter_resolver::{FilterResolver, FilteredRow, FollowUp, SummarySpec, largest, winner};
pub use passes::{LIST_BYTES, next_pass};
pub use prefix_mass::PrefixMass;
pub use rank_range::RankRange;
pub use row_result::RowResult;
pub use row_view::RowView;
pub use selector::Selector;
pub use tail_mass::TailMass;

use core::ops::Range;

/// The tokens that the filters keep, as far as a pass decides them.
#[derive(Clone, Debug, PartialEq)]
pub enum Selection {
    /// These entries of the list are kept.
    Listed(Range<usize>),
    /// These tokens are kept, more than the list has.
    RankRange(RankRange),
    /// The first tokens are kept until their mass reaches a limit, more than the list has. The histogram decides most
    /// tokens.
    Prefix,
    /// Undecided; a list of every token with a logit of at least `floor` decides.
    Unlisted {
        /// In nats.
        floor: f32,
    },
}
