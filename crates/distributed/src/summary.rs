//! What a shard leaves behind of a call, and its bytes.
//!
//! ```text
//! message   magic u32 | 0 u8 | rows u32 | type u8 | digest of the rows' parameters u64 | row ...
//!           or, when the whole call failed:  magic u32 | 1 u8 | text
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
//! mass              top edge's bits u32 | bins u32 | (bin u32 | mass u64) ..., bins ascending, no mass of 0
//! ```
//!
//! Overviews, and the messages of further passes: [`surveyed`](crate::surveyed).

use crate::stage::Stage;
use crate::surveyed::encode_overview;
use crate::wire::put_text;
use flash_sampling_core::digest::of_words;
use flash_sampling_core::params::Row;
use flash_sampling_core::{DType, Draw, LogprobsMode, MassHistogram, RowError, RowParams, RowSample, RowSurvey};

/// What a shard says about a row: its draws and, when asked for, its log-mass (`log_z`), mass histogram and largest
/// logits, all over its own tokens; or why it has none. [`RowError::NoFiniteLogit`] is the summary of a shard without
/// mass, the identity of every merge.
pub type ShardSummary<'a> = Result<RowSample<'a>, RowError>;

/// First bytes of a message; the last two digits are the version of the format.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"fs05");

pub(crate) const ROWS: u8 = 0;
pub(crate) const FAILED: u8 = 1;
pub(crate) const PASS: u8 = 2;

pub(crate) const ANSWER: u8 = 0;
pub(crate) const NO_MASS: u8 = 1;
pub(crate) const NAN: u8 = 2;
pub(crate) const INFINITE: u8 = 3;
pub(crate) const UNUSABLE: u8 = 4;
pub(crate) const NOT_ASKED: u8 = 5;
pub(crate) const SURVEY: u8 = 6;

/// Bytes of a draw.
pub(crate) const DRAW: usize = 12;
/// Bytes of a bin.
pub(crate) const BIN: usize = 12;

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
pub(crate) fn encode_survey(
    bytes: &mut Vec<u8>,
    words: &mut Vec<u64>,
    params: &RowParams<'_>,
    row: &Row<'_>,
    survey: &RowSurvey,
    stage: Stage,
) {
    let error = survey.error.or_else(|| survey.list.is_empty().then_some(RowError::NoFiniteLogit));
    if let Some(error) = error {
        return encode_row(bytes, words, params, false, &Err(error), stage);
    }
    bytes.push(SURVEY);
    encode_overview(bytes, words, row, survey);
}

/// Appends a row's summary. `by_mass`: the merge needs the log-mass; `stage`: that of a bad logit.
pub(crate) fn encode_row(
    bytes: &mut Vec<u8>,
    words: &mut Vec<u64>,
    params: &RowParams<'_>,
    by_mass: bool,
    summary: &ShardSummary<'_>,
    stage: Stage,
) {
    match summary {
        Ok(sample) => {
            bytes.push(ANSWER);
            put_draws(bytes, sample.draws.len(), sample.draws.iter().copied());
            if by_mass {
                bytes.extend_from_slice(&sample.log_z.unwrap_or(f64::NEG_INFINITY).to_le_bytes());
            }
            if params.logprobs.is_some() && params.logprobs_mode != LogprobsMode::Raw {
                put_mass(bytes, words, sample.mass.unwrap_or(&MassHistogram::default()));
                put_draws(bytes, sample.top.len(), sample.top.iter().map(|&c| Draw::from(c)));
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

pub(crate) fn put_draws(bytes: &mut Vec<u8>, count: usize, draws: impl Iterator<Item = Draw>) {
    bytes.extend_from_slice(&(count as u32).to_le_bytes());
    for draw in draws {
        bytes.extend_from_slice(&draw.token.to_le_bytes());
        bytes.extend_from_slice(&draw.score.to_le_bytes());
        bytes.extend_from_slice(&draw.logit.to_le_bytes());
    }
}

pub(crate) fn put_mass(bytes: &mut Vec<u8>, words: &mut Vec<u64>, mass: &MassHistogram) {
    words.clear();
    mass.to_words(words);
    bytes.extend_from_slice(&(words[0] as u32).to_le_bytes());
    let bins = || (0u32..).zip(&words[1..]).filter(|(_, mass)| **mass > 0);
    bytes.extend_from_slice(&(bins().count() as u32).to_le_bytes());
    for (bin, mass) in bins() {
        bytes.extend_from_slice(&bin.to_le_bytes());
        bytes.extend_from_slice(&mass.to_le_bytes());
    }
}
