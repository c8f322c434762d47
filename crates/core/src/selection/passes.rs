//! Which rows with filters take the next pass together.

use super::Need;
use crate::winner::Candidate;
use core::cmp::Reverse;

/// Bytes that the lists of one pass may take; a longer list is alone in its pass.
pub const LIST_BYTES: u64 = 16 << 20;

impl Need {
    /// Bytes of the list that it asks for, of a row of `tokens`.
    fn list_bytes(&self, tokens: u64) -> u64 {
        match self {
            Need::Overview | Need::Before => 0,
            Need::List { bound, .. } => tokens.min(*bound) * size_of::<Candidate>() as u64,
        }
    }
}

/// Takes the rows of the next pass out of `needs`, the longest lists first, as many as their lists have [room](LIST_BYTES); rows
/// of `tokens` each. Every row is taken by some pass.
pub fn next_pass(needs: &mut Vec<(usize, Need)>, tokens: u64, mut take: impl FnMut(usize, Need)) {
    needs.sort_unstable_by_key(|(r, need)| (Reverse(need.list_bytes(tokens)), *r));
    let (mut is_first, mut room) = (true, LIST_BYTES);
    needs.retain(|&(r, need)| {
        let bytes = need.list_bytes(tokens);
        let stays = bytes > room && !is_first;
        if !stays {
            room = room.saturating_sub(bytes);
            is_first = false;
            take(r, need);
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
            let need = |bound: &Option<u64>| bound.map_or(Need::Before, |bound| Need::List { floor: 0.0, bound });
            let mut needs: Vec<_> = bounds.iter().map(need).enumerate().collect();
            let mut taken = Vec::new();
            while !needs.is_empty() {
                let (mut lists, mut bytes) = (0, 0);
                next_pass(&mut needs, tokens, |r, need| {
                    lists += usize::from(need.list_bytes(tokens) > 0);
                    bytes += need.list_bytes(tokens);
                    taken.push((r, need));
                });
                prop_assert!(bytes <= LIST_BYTES || lists == 1, "{} bytes in {} lists", bytes, lists);
            }
            taken.sort_by_key(|(r, _)| *r);
            let want: Vec<_> = bounds.iter().map(need).enumerate().collect();
            prop_assert_eq!(taken, want);
        }
    }
}
