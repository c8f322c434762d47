//! The bytes of a row's summary. Sender and receiver know the row and the request, which determine the parts.
//!
//! ```text
//! row       kind u8 | rest
//!   0 SUMMARY       the parts, by request:
//!     overview        without filters: draws | log-mass f64 if merged by it | mass and list if log-probabilities are
//!                     requested
//!                     with filters: list | mass | moments if a filter needs them: 6 words u64
//!                     | frontiers u32, each: draws, the largest logit first
//!     prefix mass     masses before the points: count u32 | u64 ...
//!     list            list
//!     logits          of own tokens: count u32 | (token u32 | logit f32) ...
//!     prefix count    tokens before the ranks: count u32 | u32 ...
//!   1 NO_MASS       the shard has no finite logit
//!   2 BAD_LOGIT     token u32 | stage u8: 0 of a raw logit, 1 of a transformed one | whether it is NaN u8
//!   3 UNUSABLE      text: an error that no shard should give for a row with valid parameters
//!                   after 0 to 2 of an overview, if raw log-probabilities are requested: mass | list
//! draws     count u32 | (token u32 | score f32 | logit f32) ...
//! mass      top edge's bits u32 | bins u32 | u64 ..., from the lowest bin with mass up to the highest
//! list      count u32 | (token u32 | logit f32) ..., by descending logits, then ascending tokens
//! ```

#[cfg(test)]
mod tests;

use crate::codec::parts::{
    DRAW, LISTED, is_mass, put_draws, put_list, put_mass, put_tokens, take_draw, take_list, take_mass, take_token,
};
use crate::codec::wire::{Reader, Wire, WireError, put_items, put_text};
use core::ops::Range;
use flash_sampling_core::RowError;
use flash_sampling_core::backend::selection::{PrefixMass, SummarySpec};
use flash_sampling_core::backend::{Filters, Moments, Request, Row, RowSummary, Stage, StagedError};

const SUMMARY: u8 = 0;
const NO_MASS: u8 = 1;
const BAD_LOGIT: u8 = 2;
const UNUSABLE: u8 = 3;

/// The row, the request and the merge, which determine the parts of a summary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'r, 'a> {
    pub(crate) row: &'r Row<'a>,
    pub(crate) request: &'r Request<'r>,
    /// Whether the merge needs the log-mass.
    pub(crate) by_mass: bool,
}

pub(crate) fn encode_row(bytes: &mut Vec<u8>, layout: Layout<'_, '_>, summary: &RowSummary) {
    let Layout { row, request, by_mass } = layout;
    let has_mass = if row.filters.is_some() { !summary.list.is_empty() } else { !summary.draws.is_empty() };
    match summary.error {
        None if request.is_overview() && !has_mass => bytes.push(NO_MASS),
        None => {
            bytes.push(SUMMARY);
            match (request, &row.filters) {
                (Request::Skip, _) => {}
                (Request::Overview | Request::Decide, Some(filters)) => put_overview(bytes, filters, summary),
                (Request::Overview | Request::Decide, None) => put_sample(bytes, row, by_mass, summary),
                (Request::PrefixMass { .. }, _) => {
                    put_items(bytes, summary.prefix_masses.iter().map(|before| before.mass().to_le_bytes()));
                }
                (Request::List { .. }, _) => put_list(bytes, &summary.list),
                (Request::Logits { .. }, _) => put_tokens(bytes, summary.logits.iter().copied()),
                (Request::PrefixCount { .. }, _) => {
                    put_items(bytes, summary.prefix_counts.iter().map(|count| count.to_le_bytes()));
                }
            }
        }
        Some(StagedError {
            error: error @ (RowError::NaN { token } | RowError::PositiveInfinity { token }),
            stage,
        }) => {
            bytes.push(BAD_LOGIT);
            token.put(bytes);
            stage.put(bytes);
            matches!(error, RowError::NaN { .. }).put(bytes);
        }
        Some(StagedError { error, .. }) => {
            bytes.push(UNUSABLE);
            return put_text(bytes, &error.to_string());
        }
    }
    if request.is_overview() && row.raw_logprobs.is_some() {
        put_mass(bytes, summary.raw_mass.as_ref());
        put_list(bytes, summary.raw_top.as_slice());
    }
}

fn put_sample(bytes: &mut Vec<u8>, row: &Row<'_>, by_mass: bool, summary: &RowSummary) {
    put_draws(bytes, &summary.draws);
    if by_mass {
        summary.log_mass.unwrap_or(f64::NEG_INFINITY).put(bytes);
    }
    if row.logprobs.is_some() {
        put_mass(bytes, Some(&summary.mass));
        put_list(bytes, &summary.list);
    }
}

fn put_overview(bytes: &mut Vec<u8>, filters: &Filters, summary: &RowSummary) {
    put_list(bytes, &summary.list);
    put_mass(bytes, Some(&summary.mass));
    if filters.need_moments() {
        summary.moments.to_words().iter().for_each(|word| word.put(bytes));
    }
    (summary.frontiers().len() as u32).put(bytes);
    summary.frontiers().iter().for_each(|frontier| put_draws(bytes, frontier.as_slice()));
}

/// Reads the summary of a row from the shard with `tokens`. The inner error is the reason why the shard's summary
/// cannot be used.
///
/// An overview without filters becomes `out`, which [`RowSummary::begin`] prepared. All other summaries are merged into
/// `out`: a copy of the summary would take as long as reading it.
pub(crate) fn decode_row(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    layout: Layout<'_, '_>,
    out: &mut RowSummary,
) -> Result<Result<(), String>, WireError> {
    let Layout { row, request, by_mass } = layout;
    match u8::take(reader)? {
        SUMMARY => match (request, &row.filters) {
            (Request::Skip, _) => {}
            (Request::Overview | Request::Decide, Some(filters)) => take_overview(reader, tokens, row, filters, out)?,
            (Request::Overview | Request::Decide, None) => take_sample(reader, tokens, row, by_mass, out)?,
            (Request::PrefixMass { points, .. }, _) => take_prefix_masses(reader, tokens, points, out)?,
            (Request::List { floor }, _) => {
                out.add_list(take_list(reader, tokens, *floor, tokens.len())?)?;
            }
            (Request::Logits { tokens: requested, .. }, _) => take_logits(reader, tokens, requested, out)?,
            (Request::PrefixCount { ranks, .. }, _) => take_prefix_counts(reader, tokens, ranks.len(), out)?,
        },
        NO_MASS if request.is_overview() => {}
        BAD_LOGIT => {
            let (token, stage) = (take_token(reader, tokens)?, Stage::take(reader)?);
            let is_nan = bool::take(reader)?;
            let error = if is_nan { RowError::NaN { token } } else { RowError::PositiveInfinity { token } };
            out.error = StagedError::first(out.error, Some(StagedError { stage, error }));
        }
        UNUSABLE => return Ok(Err(reader.text()?.to_owned())),
        _ => return Err(reader.invalid("an unknown kind of summary")),
    }
    if let (true, Some(most)) = (request.is_overview(), row.raw_logprobs) {
        take_mass(reader, tokens, out.raw_mass.get_or_insert_default())?;
        for c in take_list(reader, tokens, f32::NEG_INFINITY, most as usize)? {
            out.raw_top.push(c?);
        }
    }
    Ok(Ok(()))
}

fn take_sample(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    row: &Row<'_>,
    by_mass: bool,
    out: &mut RowSummary,
) -> Result<(), WireError> {
    for _ in 0..reader.count(DRAW)? {
        let draw = take_draw(reader, tokens)?;
        if !draw.winner.score.is_finite() {
            return Err(reader.invalid("a score that is not finite"));
        }
        out.draws.push(draw);
    }
    if row.without_replacement && !out.draws.is_sorted_by(|a, b| a.winner.beats(&b.winner)) {
        return Err(reader.invalid("draws out of order"));
    }
    if by_mass {
        let log_mass = f64::take(reader)?;
        if !log_mass.is_finite() {
            return Err(reader.invalid("a log-mass that is not finite"));
        }
        out.log_mass = Some(log_mass);
    }
    if let Some(most) = row.logprobs {
        if !take_mass(reader, tokens, &mut out.mass)? {
            return Err(reader.invalid("a summary without mass"));
        }
        for c in take_list(reader, tokens, f32::NEG_INFINITY, most as usize)? {
            out.list.push(c?);
        }
    }
    Ok(())
}

fn take_overview(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    row: &Row<'_>,
    filters: &Filters,
    out: &mut RowSummary,
) -> Result<(), WireError> {
    let spec = SummarySpec::of(row, filters);
    let first = out.add_list(take_list(reader, tokens, f32::NEG_INFINITY, spec.list)?)?;
    let first = first.ok_or_else(|| reader.invalid("no first token"))?.logit_rank();
    if take_mass(reader, tokens, &mut out.mass)? != spec.mass {
        return Err(reader.invalid("masses that were not requested, or none"));
    }
    if filters.need_moments() {
        let mut words = [0; Moments::WORDS];
        for word in &mut words {
            *word = u64::take(reader)?;
        }
        let moments = Moments::from_words(words, filters.temperature, tokens.len() as u64);
        out.moments.merge(&moments.ok_or_else(|| reader.invalid("moments of no logits"))?);
    }
    if u32::take(reader)? as usize != out.frontiers().len() {
        return Err(reader.invalid("another number of frontiers than draws"));
    }
    for frontier in out.frontiers_mut() {
        let mut largest = None;
        for _ in 0..reader.count(DRAW)? {
            let point = take_draw(reader, tokens)?;
            largest.get_or_insert(point);
            frontier.push(point);
        }
        if largest.is_none_or(|largest| largest.logit_rank() != first) {
            return Err(reader.invalid("a frontier that does not begin with the first token"));
        }
    }
    Ok(())
}

fn take_prefix_masses(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    points: &[PrefixMass],
    out: &mut RowSummary,
) -> Result<(), WireError> {
    let masses = reader.items()?;
    if masses.len() != points.len() {
        return Err(reader.invalid("another number of points than requested"));
    }
    out.prefix_masses.extend(points[out.prefix_masses.len()..].iter().map(|point| PrefixMass::new(point.rank)));
    for (before, mass) in out.prefix_masses.iter_mut().zip(masses) {
        let mass = u64::from_le_bytes(*mass);
        if !is_mass(mass, tokens) {
            return Err(reader.invalid("a mass beyond that of the shard's tokens"));
        }
        before.merge(&PrefixMass::with_mass(before.rank, mass));
    }
    Ok(())
}

fn take_logits(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    requested: &[u32],
    out: &mut RowSummary,
) -> Result<(), WireError> {
    let own = requested.iter().filter(|token| tokens.contains(token));
    if reader.count(LISTED)? != own.clone().count() {
        return Err(reader.invalid("another number of logits than requested"));
    }
    for &token in own {
        let (found, logit) = (u32::take(reader)?, f32::take(reader)?);
        if found != token || logit.is_nan() || logit == f32::INFINITY {
            return Err(reader.invalid("another logit than requested"));
        }
        out.logits.push((token, logit));
    }
    Ok(())
}

fn take_prefix_counts(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    ranks: usize,
    out: &mut RowSummary,
) -> Result<(), WireError> {
    let counts = reader.items()?;
    if counts.len() != ranks {
        return Err(reader.invalid("another number of ranks than requested"));
    }
    out.prefix_counts.resize(ranks, 0);
    for (total, count) in out.prefix_counts.iter_mut().zip(counts) {
        let count = u32::from_le_bytes(*count);
        if count as usize > tokens.len() {
            return Err(reader.invalid("more tokens than the shard has"));
        }
        *total += count;
    }
    Ok(())
}
