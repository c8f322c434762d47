//! The rows with filters that share the next pass.

use super::FollowUp;
use crate::summary::winner::Candidate;
use core::cmp::Reverse;

/// The limit of the lists of one pass, in bytes. A longer list gets a separate pass.
pub const LIST_BYTES: u64 = 16 << 20;

impl FollowUp {
    /// The bytes of the list of this pass, for a row of `tokens`.
    fn list_bytes(&self, tokens: u64) -> u64 {
        match self {
            FollowUp::Overview | FollowUp::PrefixMass => 0,
            FollowUp::List { bound, .. } => tokens.min(*bound) * size_of::<Candidate>() as u64,
        }
    }
}

/// Removes the rows of the next pass from `undecided`, and calls `take` with each.
///
/// Each row has `tokens`. The longest lists that fit [`LIST_BYTES`] come first. Every row gets a pass eventually.
pub fn next_pass(undecided: &mut Vec<(usize, FollowUp)>, tokens: u64, mut take: impl FnMut(usize, FollowUp)) {
    undecided.sort_unstable_by_key(|(r, follow_up)| (Reverse(follow_up.list_bytes(tokens)), *r));
    let (mut is_first, mut room) = (true, LIST_BYTES);
    undecided.retain(|&(r, follow_up)| {
        let bytes = follow_up.list_bytes(tokens);
        let stays = bytes > room && !is_first;
        if !stays {
            room = room.saturating_sub(bytes);
            is_first = false;
            take(r, follow_up);
        }
        stays
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_row_is_taken_once_and_lists_that_share_a_pass_have_room(
            bounds in prop::collection::vec(prop_oneof![Just(None), (0u64..2_000_000).prop_map(Some)], 0..40),
            tokens in 1u64..2_000_000,
        ) {
            let follow_up = |bound: &Option<u64>| bound.map_or(FollowUp::PrefixMass, |bound| FollowUp::List { floor: 0.0, bound });
            let mut undecided: Vec<_> = bounds.iter().map(follow_up).enumerate().collect();
            let mut taken = Vec::new();
            while !undecided.is_empty() {
                let (mut lists, mut bytes) = (0, 0);
                next_pass(&mut undecided, tokens, |r, follow_up| {
                    lists += usize::from(follow_up.list_bytes(tokens) > 0);
                    bytes += follow_up.list_bytes(tokens);
                    taken.push((r, follow_up));
                });
                prop_assert!(bytes <= LIST_BYTES || lists == 1, "{} bytes in {} lists", bytes, lists);
            }
            taken.sort_by_key(|(r, _)| *r);
            let want: Vec<_> = bounds.iter().map(follow_up).enumerate().collect();
            prop_assert_eq!(taken, want);
        }
    }
}
