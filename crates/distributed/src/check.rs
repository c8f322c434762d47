//! A debug check that all ranks have the same call and the same results.

use crate::codec::call::{Head, begin_check, head, none_is_late};
use crate::codec::wire::{Reader, Wire, WireError};
use crate::error::ShardError;
use flash_sampling_core::backend::digest::{of_bytes, of_words};
use flash_sampling_core::{Matrix, RowParams, Samples};

/// Encodes for each row the digests of its hidden states, of its groups of parameters, and of its result.
pub(crate) fn encode(input: Matrix<'_>, rows: &[RowParams<'_>], samples: &Samples, bytes: &mut Vec<u8>) {
    begin_check(bytes);
    for (r, (params, row)) in rows.iter().zip(samples.iter()).enumerate() {
        let result = match row {
            Ok(row) => of_words(row.draws.iter().flat_map(|d| [u64::from(d.token), u64::from(d.score.to_bits())])),
            Err(error) => of_bytes(error.to_string().as_bytes()),
        };
        let words = [of_bytes(input.row_bytes(r))].into_iter().chain(params.digests()).chain([result]);
        words.for_each(|word| word.put(bytes));
    }
}

/// Compares the digests of all ranks with this rank's. A rank that failed, or gave the call up, may send its status
/// instead.
pub(crate) fn compare(mine: &[u8], all: &[Vec<u8>]) -> Result<(), ShardError> {
    let Some((shard, theirs)) = all.iter().enumerate().find(|(_, theirs)| *theirs != mine) else { return Ok(()) };
    none_is_late(all)?;
    let (message, mut reader) = (|source| ShardError::Message { shard, source }, Reader::new(theirs));
    let Head::Checks = head(&mut reader, shard)? else {
        return Err(message(reader.invalid("a call, in place of results to compare")));
    };
    if theirs.len() != mine.len() {
        return Err(message(WireError::Truncated { at: theirs.len() }));
    }
    let [mine, theirs] = [mine, theirs].map(|bytes| bytes[reader.at()..].as_chunks::<8>().0);
    let at = mine.iter().zip(theirs).position(|(a, b)| a != b).unwrap_or_default();
    let groups = RowParams::GROUPS;
    let (row, word) = (at / (groups.len() + 2), at % (groups.len() + 2));
    Err(match word.checked_sub(1) {
        None => ShardError::Inputs { shard, row },
        Some(group) => match groups.get(group) {
            Some(what) => ShardError::Params { shard, row, what },
            None => ShardError::Disagree { shard, row },
        },
    })
}
