//! The head of a message: the call of a rank, or its status.
//!
//! ```text
//! call      magic u32 | 0 u8 | number u64 | rows u64 | type u8 | digest of the rows' parameters u64
//! waited    magic u32 | 3 u8 | the same | nanoseconds u64 | ranks u32 | rank u32 ...   a call that a rank gave up
//! pass      magic u32 | 2 u8 | digest of the requests u64                               a further pass of a call
//! failed    magic u32 | 1 u8 | text
//! ```

use crate::codec::wire::{Reader, Wire, WireError, put_items, put_text, wire_struct};
use crate::error::ShardError;
use core::time::Duration;
use flash_sampling_core::backend::Request;
use flash_sampling_core::backend::digest::of_words;
use flash_sampling_core::{DType, RowParams};

/// First bytes of a message; the last two digits are the version of the format.
const MAGIC: u32 = u32::from_le_bytes(*b"fs11");

const ROWS: u8 = 0;
const FAILED: u8 = 1;
const PASS: u8 = 2;
const WAITED: u8 = 3;

/// The status of a rank in a call that is exchanged outside the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallStatus<'a> {
    /// The rank can make the call, or looks for a mismatch.
    Ready,
    /// The rank cannot make the call, for this reason.
    Failed(&'a str),
    /// The rank gave the call up after a timeout.
    TimedOut {
        /// The ranks that did not come; empty if unknown.
        ranks: &'a [usize],
        /// The time that the rank waited.
        limit: Duration,
    },
}

/// The parts of a call that must be the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// The number of the call, over any transport.
    pub(crate) number: u64,
    pub(crate) rows: usize,
    /// The type of the hidden states.
    pub(crate) dtype: DType,
    /// The digest of the parameters of all rows.
    pub(crate) digest: u64,
}

impl Call {
    pub(crate) fn of(number: u64, rows: &[RowParams<'_>], dtype: DType) -> Call {
        Call { number, rows: rows.len(), dtype, digest: of_words(rows.iter().map(RowParams::digest)) }
    }
}

wire_struct!(Call { number, rows, dtype, digest });

/// A digest of the requests of a pass, from their kinds, counts and floors.
pub(crate) fn digest_of(requests: &[Request<'_>]) -> u64 {
    of_words(requests.iter().flat_map(|request| match request {
        Request::Skip => [0, 0],
        Request::Overview | Request::Decide => [1, 0],
        Request::PrefixMass { points, .. } => [2, points.len() as u64],
        Request::List { floor } => [3, u64::from(floor.to_bits())],
        Request::Logits { tokens, stage } => [4 + *stage as u64, tokens.len() as u64],
        Request::PrefixCount { ranks, stage } => [6 + *stage as u64, ranks.len() as u64],
    }))
}

fn begin_with(bytes: &mut Vec<u8>, status: u8) {
    bytes.clear();
    MAGIC.put(bytes);
    status.put(bytes);
}

/// The message of a rank that failed.
pub(crate) fn encode_failure(bytes: &mut Vec<u8>, reason: &str) {
    begin_with(bytes, FAILED);
    put_text(bytes, reason);
}

/// Begins the message of a further pass.
pub(crate) fn begin_pass(bytes: &mut Vec<u8>, requests: &[Request<'_>]) {
    begin_with(bytes, PASS);
    digest_of(requests).put(bytes);
}

pub(crate) fn begin(bytes: &mut Vec<u8>, call: Call) {
    begin_with(bytes, ROWS);
    call.put(bytes);
}

/// Encodes the message of a call that this rank gave up.
pub(crate) fn encode_waited(bytes: &mut Vec<u8>, call: Call, ranks: &[usize], limit: Duration) {
    begin_with(bytes, WAITED);
    call.put(bytes);
    u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).put(bytes);
    put_items(bytes, ranks.iter().map(|&rank| (rank as u32).to_le_bytes()));
}

#[derive(Clone, Copy, Debug)]
enum Head<'m> {
    Call(Call),
    /// A further pass of a call, with a digest of its requests.
    Pass(u64),
    /// A call that the rank gave up, its waiting time, and the ranks that did not come.
    Waited(Call, Duration, &'m [[u8; 4]]),
}

impl Head<'_> {
    /// Whether the rank has passed the call `number`.
    fn is_beyond(&self, number: u64) -> bool {
        match self {
            Head::Call(call) | Head::Waited(call, ..) => call.number > number,
            Head::Pass(_) => false,
        }
    }
}

/// Reads the head of a shard's message.
fn head<'m>(reader: &mut Reader<'m>, shard: usize) -> Result<Head<'m>, ShardError> {
    let head = (|| {
        if u32::take(reader)? != MAGIC {
            return Err(reader.invalid("not a shard's summaries"));
        }
        match u8::take(reader)? {
            ROWS => Call::take(reader).map(|call| Ok(Head::Call(call))),
            WAITED => {
                let (call, limit) = (Call::take(reader)?, Duration::from_nanos(u64::take(reader)?));
                Ok(Ok(Head::Waited(call, limit, reader.items()?)))
            }
            PASS => u64::take(reader).map(|digest| Ok(Head::Pass(digest))),
            FAILED => Ok(Err(reader.text()?.to_owned())),
            _ => Err(reader.invalid("an unknown status")),
        }
    })();
    match head.map_err(|source| ShardError::Message { shard, source })? {
        Ok(head) => Ok(head),
        Err(reason) => Err(ShardError::Failed { shard, reason }),
    }
}

/// Reads the call of a shard, before its rows.
pub(crate) fn header(reader: &mut Reader<'_>, shard: usize) -> Result<Call, ShardError> {
    match head(reader, shard)? {
        Head::Call(call) | Head::Waited(call, ..) => Ok(call),
        Head::Pass(_) => {
            Err(ShardError::Message { shard, source: reader.invalid("a further pass, in place of a call") })
        }
    }
}

/// Reads the head of a shard's message of a further pass.
pub(crate) fn pass_header(reader: &mut Reader<'_>, shard: usize, digest: u64) -> Result<(), ShardError> {
    match head(reader, shard)? {
        Head::Pass(theirs) if theirs == digest => Ok(()),
        _ => {
            Err(ShardError::Message { shard, source: reader.invalid("another call or other requests than this pass") })
        }
    }
}

/// Detects ranks that are late for a call: one rank gave the call up, and others have passed it.
///
/// All ranks get the same result, because they have the same messages.
fn none_is_late(messages: &[Vec<u8>]) -> Result<(), ShardError> {
    let heads = || messages.iter().enumerate().map(|(shard, bytes)| head(&mut Reader::new(bytes), shard));
    let mut first: Option<(u64, usize, Duration, &[[u8; 4]])> = None;
    for (shard, head) in heads().enumerate() {
        if let Head::Waited(Call { number, .. }, limit, ranks) = head?
            && first.is_none_or(|(least, ..)| number < least)
        {
            first = Some((number, shard, limit, ranks));
        }
    }
    let Some((number, shard, limit, ranks)) = first else { return Ok(()) };
    let is_beyond = |head: &Result<Head<'_>, _>| head.as_ref().is_ok_and(|head| head.is_beyond(number));
    let beyond: Vec<usize> = heads().enumerate().filter(|(_, head)| is_beyond(head)).map(|(shard, _)| shard).collect();
    if beyond.is_empty() {
        return Ok(());
    }
    let late = ranks.iter().map(|rank| u32::from_le_bytes(*rank) as usize);
    let late: Vec<usize> = late.filter(|&rank| rank < messages.len()).collect();
    Err(ShardError::Late { shard, ranks: if late.is_empty() { beyond } else { late }, limit })
}

/// Whether all shards have the call of this rank, `mine`.
///
/// If one rank gets an error or `false`, every rank does: all have the same messages, and in a mismatch each rank
/// differs from some other rank.
pub(crate) fn is_same_call(messages: &[Vec<u8>], rank: usize, mine: Call) -> Result<bool, ShardError> {
    none_is_late(messages)?;
    let mut is_same = true;
    for (shard, bytes) in messages.iter().enumerate() {
        let theirs = header(&mut Reader::new(bytes), shard)?;
        let mismatch = |what, [found, expected]: [String; 2]| {
            Err(ShardError::Mismatch { shard, other: rank, what, expected, found })
        };
        if theirs.rows != mine.rows {
            return mismatch("row count", [theirs, mine].map(|call| call.rows.to_string()));
        }
        if theirs.dtype != mine.dtype {
            return mismatch("hidden states of type", [theirs, mine].map(|call| format!("{:?}", call.dtype)));
        }
        is_same &= theirs.digest == mine.digest;
    }
    Ok(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mismatches_of_rows_types_and_parameters_are_detected() {
        let row = RowParams { seed: 5, draws: 3, ..RowParams::default() };
        let top_p = RowParams { draws: 2, top_p: 0.8, temperature: 0.7, ..row };
        let (mut bytes, rows) = (Vec::new(), [row, RowParams { without_replacement: true, ..row }, top_p, row]);
        begin(&mut bytes, Call::of(7, &rows, DType::BF16));
        let messages = vec![bytes; 2];
        let call = |rows: &[RowParams<'_>], dtype| is_same_call(&messages, 1, Call::of(7, rows, dtype));
        assert!(matches!(call(&rows, DType::BF16), Ok(true)));
        assert!(call(&rows[..3], DType::BF16).unwrap_err().to_string().contains("3"));
        assert!(call(&rows, DType::F16).is_err());
        let changes: [fn(&mut RowParams<'static>); 5] =
            [|p| p.seed += 1, |p| p.position += 1, |p| p.draws += 1, |p| p.first_draw += 1, |p| p.mask = Some(&[])];
        for change in changes {
            let mut other = rows;
            change(&mut other[2]);
            assert!(matches!(call(&other, DType::BF16), Ok(false)));
        }
    }
}
