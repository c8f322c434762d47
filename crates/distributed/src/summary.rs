//! What a shard leaves behind of a call, and its bytes.
//!
//! ```text
//! message   call | row ...                                       or, when the whole call failed:  magic u32 | 1 u8 | text
//! row       kind u8 | rest
//!   0 ANSWER        draws | log-mass f64 if merged by it | mass and top if log-probabilities were asked for
//!   1 NO_MASS       the shard has no finite logit
//!   2 NAN           token u32 | stage u8: 0 of a raw logit, 1 of a transformed one
//!   3 INFINITE      token u32 | stage u8
//!   4 UNUSABLE      text: an error that no shard should give for a row with valid parameters
//!   5 NOT_ASKED     the parameters are invalid, as every rank finds for itself
//!   6 SURVEY        overview, of a row with filters
//!                   behind any of these but 4 and 5, where raw log-probabilities were asked for: mass | draws
//! draws, top        count u32 | (token u32 | score f32 | logit f32) ...
//! mass              top edge's bits u32 | bins u32 | u64 ..., from the lowest bin with mass up to the highest
//! ```
//!
//! The head of a message: [`call`](crate::call). Overviews, and the messages of further passes:
//! [`surveyed`](crate::surveyed).

use crate::call::{FAILED, MAGIC};
use crate::surveyed::encode_overview;
use crate::wire::{put_items, put_text};
use flash_sampling_core::params::Row;
use flash_sampling_core::{Draw, MassHistogram, RowError, RowSample, RowSummary, Stage};

/// What a shard says about a row: its draws and, when asked for, its log-mass (`log_z`), mass histogram and largest
/// logits, all over its own tokens; or why it has none. [`RowError::NoFiniteLogit`] is the summary of a shard without
/// mass, the identity of every merge.
pub type ShardSummary<'a> = Result<RowSample<'a>, RowError>;

pub(crate) const ANSWER: u8 = 0;
pub(crate) const NO_MASS: u8 = 1;
pub(crate) const NAN: u8 = 2;
pub(crate) const INFINITE: u8 = 3;
pub(crate) const UNUSABLE: u8 = 4;
pub(crate) const NOT_ASKED: u8 = 5;
pub(crate) const SURVEY: u8 = 6;

/// Bytes of a draw.
pub(crate) const DRAW: usize = 12;

/// The message of a call that failed.
pub(crate) fn encode_failure(bytes: &mut Vec<u8>, reason: &str) {
    bytes.clear();
    bytes.extend_from_slice(&MAGIC.to_le_bytes());
    bytes.push(FAILED);
    put_text(bytes, reason);
}

/// Appends a row that was not asked for, because its parameters are invalid.
pub(crate) fn encode_not_asked(bytes: &mut Vec<u8>) {
    bytes.push(NOT_ASKED);
}

/// Appends a row's overview, or why there is none.
pub(crate) fn encode_survey(bytes: &mut Vec<u8>, row: &Row<'_>, survey: &RowSummary, stage: Stage) {
    let error = survey.error.or_else(|| survey.list.is_empty().then_some(RowError::NoFiniteLogit));
    if let Some(error) = error {
        return encode_row(bytes, row, false, &Err(error), stage);
    }
    bytes.push(SURVEY);
    encode_overview(bytes, row, survey);
}

/// Appends a row's summary. `by_mass`: the merge needs the log-mass; `stage`: that of a bad logit.
pub(crate) fn encode_row(bytes: &mut Vec<u8>, row: &Row<'_>, by_mass: bool, summary: &ShardSummary<'_>, stage: Stage) {
    match summary {
        Ok(sample) => {
            bytes.push(ANSWER);
            put_draws(bytes, sample.draws.iter().copied());
            if by_mass {
                bytes.extend_from_slice(&sample.log_z.unwrap_or(f64::NEG_INFINITY).to_le_bytes());
            }
            if row.logprobs.is_some() {
                put_mass(bytes, sample.mass);
                put_draws(bytes, sample.top.iter().map(|&c| Draw::from(c)));
            }
        }
        Err(RowError::NoFiniteLogit) => bytes.push(NO_MASS),
        Err(RowError::NaN { token }) => {
            bytes.push(NAN);
            bytes.extend_from_slice(&token.to_le_bytes());
            bytes.push(stage as u8);
        }
        Err(RowError::PositiveInfinity { token }) => {
            bytes.push(INFINITE);
            bytes.extend_from_slice(&token.to_le_bytes());
            bytes.push(stage as u8);
        }
        Err(error) => {
            bytes.push(UNUSABLE);
            put_text(bytes, &error.to_string());
        }
    }
}

pub(crate) fn put_draws(bytes: &mut Vec<u8>, draws: impl ExactSizeIterator<Item = Draw>) {
    bytes.extend_from_slice(&(draws.len() as u32).to_le_bytes());
    put_items(bytes, draws.map(bytes_of));
}

fn bytes_of(draw: Draw) -> [u8; DRAW] {
    let (words, mut bytes) = ([draw.token, draw.score.to_bits(), draw.logit.to_bits()], [0; DRAW]);
    bytes.as_chunks_mut().0.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_le_bytes());
    bytes
}

/// No mass: an empty histogram.
pub(crate) fn put_mass(bytes: &mut Vec<u8>, mass: Option<&MassHistogram>) {
    let (top, runs) = mass.map_or((f32::NEG_INFINITY, [&[] as &[u64]; 2]), MassHistogram::run);
    bytes.extend_from_slice(&top.to_bits().to_le_bytes());
    bytes.extend_from_slice(&((runs[0].len() + runs[1].len()) as u32).to_le_bytes());
    runs.into_iter().for_each(|run| put_items(bytes, run.iter().map(|mass| mass.to_le_bytes())));
}
