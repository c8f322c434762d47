//! The tokens that a row's filters keep, decided from the summary of one pass.
//!
//! Filters rank the tokens of a row by descending logits ([`LogitRank`](crate::summary::winner::LogitRank)), and keep
//! one run of this order. A pass lists the first tokens, and summarizes the whole row as a
//! [`MassHistogram`](crate::backend::MassHistogram). [`Selector::select`] applies the filters to both:
//!
//! * If the run ends inside the list, the kept set is known.
//! * If the run ends below the list at a known logit, the [`Frontier`](crate::backend::Frontier) has the winner. The
//!   same holds if the histogram decides on which side of the end each relevant point of the frontier is.
//! * Otherwise the row takes a second pass. It sums the mass before the few points in doubt ([`PrefixMass`]), or lists
//!   the row down to a logit, so that the run ends inside the list.
//!
//! Masses are the integers of the histogram, summed bin by bin from the top. So the result depends on the row's logits
//! alone, not on tiles, threads, shards, backend or the number of passes. It is the set of exact arithmetic, except if:
//!
//! * a cumulative mass is within 2^-25 of the row's mass from its limit,
//! * a token's mass is within 2^-25 of itself from its limit, or
//! * a logit is within n times 2^-32 nat from a cutoff of top-n-sigma.
//!
//! In a row of equal logits all masses are equal, so the set is exact for every limit.

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
