//! Names the parameter that differs between ranks, from digests of each row's groups of parameters. Ranks exchange
//! these digests only after a mismatch.

use crate::codec::wire::{Wire, WireError};
use crate::error::ShardError;
use flash_sampling_core::RowParams;

/// Encodes the digests of each row's groups.
pub(crate) fn encode(rows: &[RowParams<'_>], bytes: &mut Vec<u8>) {
    bytes.clear();
    rows.iter().flat_map(RowParams::digests).for_each(|digest| digest.put(bytes));
}

/// The first shard that differs from this rank, with the first row and group that differ.
pub(crate) fn first_mismatch(mine: &[u8], all: &[Vec<u8>]) -> ShardError {
    let (mine, groups) = (mine.as_chunks::<8>().0, RowParams::GROUPS);
    let first = |theirs: &Vec<u8>| mine.iter().zip(theirs.as_chunks::<8>().0).position(|(a, b)| a != b);
    let found = all.iter().enumerate().find_map(|(shard, theirs)| Some((shard, first(theirs)?)));
    match found {
        Some((shard, at)) => ShardError::Params { shard, row: at / groups.len(), what: groups[at % groups.len()] },
        // A truncated or damaged message.
        None => {
            let shard = all.iter().position(|theirs| theirs.len() != size_of_val(mine)).unwrap_or(0);
            ShardError::Message { shard, source: WireError::Truncated { at: all.get(shard).map_or(0, Vec::len) } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_differs_is_named_and_a_damaged_message_too() {
        let row = RowParams::default();
        let message = |rows: &[RowParams<'_>]| {
            let mut bytes = Vec::new();
            encode(rows, &mut bytes);
            bytes
        };
        let mine = message(&[row, row]);
        let other = message(&[row, RowParams { position: 3, top_k: 1, ..row }]);
        let said = first_mismatch(&mine, &[mine.clone(), other.clone(), Vec::new()]);
        assert!(matches!(said, ShardError::Params { shard: 1, row: 1, what: "position" }), "{said}");
        for cut in [0, 7, mine.len() - 1, mine.len()] {
            let said = first_mismatch(&mine, &[mine.clone(), mine[..cut].to_vec()]);
            let shard = usize::from(cut < mine.len());
            let ShardError::Message { shard: found, source: WireError::Truncated { .. } } = said else {
                panic!("{said}")
            };
            assert_eq!(found, shard);
        }
        // Of a longer message, the common part is compared.
        let said = first_mismatch(&mine, &[[other, vec![1]].concat()]);
        assert!(matches!(said, ShardError::Params { shard: 0, row: 1, .. }), "{said}");
    }
}
