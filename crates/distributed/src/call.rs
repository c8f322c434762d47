//! The head of a message: what a rank was called with.
//!
//! ```text
//! call      magic u32 | 0 u8 | rows u32 | type u8 | digest of the rows' parameters u64
//! ```

use crate::error::ShardError;
use crate::wire::Reader;
use flash_sampling_core::digest::of_words;
use flash_sampling_core::{DType, RowParams};

/// First bytes of a message; the last two digits are the version of the format.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"fs07");

pub(crate) const ROWS: u8 = 0;
pub(crate) const FAILED: u8 = 1;
pub(crate) const PASS: u8 = 2;

/// What every rank must have been called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) rows: usize,
    /// Of the hidden states.
    pub(crate) dtype: DType,
    /// Of the parameters of all rows.
    pub(crate) digest: u64,
}

impl Call {
    pub(crate) fn of(rows: &[RowParams<'_>], dtype: DType) -> Call {
        Call { rows: rows.len(), dtype, digest: of_words(rows.iter().map(RowParams::digest)) }
    }
}

/// Begins a message.
pub(crate) fn begin(bytes: &mut Vec<u8>, call: Call) {
    bytes.clear();
    bytes.extend_from_slice(&MAGIC.to_le_bytes());
    bytes.push(ROWS);
    bytes.extend_from_slice(&(call.rows as u32).to_le_bytes());
    bytes.push(element(call.dtype));
    bytes.extend_from_slice(&call.digest.to_le_bytes());
}

/// The number of a type in messages.
pub(crate) fn element(dtype: DType) -> u8 {
    match dtype {
        DType::BF16 => 0,
        DType::F16 => 1,
        DType::F32 => 2,
    }
}

/// The type of a number.
pub(crate) fn of_element(number: u8) -> Option<DType> {
    [DType::BF16, DType::F16, DType::F32].into_iter().find(|&dtype| element(dtype) == number)
}

/// What a shard was called with, before its rows.
pub(crate) fn header(reader: &mut Reader<'_>, shard: usize) -> Result<Call, ShardError> {
    let header = (|| {
        if reader.u32()? != MAGIC {
            return Err(reader.invalid("not a shard's summaries"));
        }
        match reader.u8()? {
            ROWS => {
                let rows = reader.u32()? as usize;
                let dtype = of_element(reader.u8()?).ok_or_else(|| reader.invalid("an unknown type"))?;
                Ok(Ok(Call { rows, dtype, digest: reader.u64()? }))
            }
            FAILED => Ok(Err(reader.text()?.to_owned())),
            _ => Err(reader.invalid("an unknown status")),
        }
    })();
    match header.map_err(|source| ShardError::Message { shard, source })? {
        Ok(call) => Ok(call),
        Err(reason) => Err(ShardError::Failed { shard, reason }),
    }
}

/// Whether all shards were called with the parameters of this rank. Where it is an error or `false`, it is one or the other
/// on every rank: all have the same messages, and of ranks that differ each differs from some other.
pub(crate) fn is_same_call(messages: &[Vec<u8>], mine: Call) -> Result<bool, ShardError> {
    let mut is_same = true;
    for (shard, bytes) in messages.iter().enumerate() {
        let theirs = header(&mut Reader::new(bytes), shard)?;
        if theirs.rows != mine.rows {
            return Err(ShardError::Rows { shard, expected: mine.rows, found: theirs.rows });
        }
        if theirs.dtype != mine.dtype {
            let (expected, found) = (mine.dtype, theirs.dtype);
            return Err(ShardError::Type { shard, what: "hidden states", expected, found });
        }
        is_same &= theirs.digest == mine.digest;
    }
    Ok(is_same)
}
