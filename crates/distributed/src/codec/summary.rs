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

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::backend::{Candidate, LogitRank, by_logit_rank};
    use flash_sampling_core::reference::{Reference, ReferenceVariant};
    use flash_sampling_core::{Head, LogprobsMode, Matrix, PerturbedArgmax, Plan, RowParams};
    use proptest::prelude::*;

    const TOKENS: Range<u32> = 100..400;

    const DRAWN: [u32; 3] = [250, 7, 399];
    const RANKS: [LogitRank; 2] = [LogitRank { logit: 6.0, token: 250 }, LogitRank { logit: 2.5, token: 399 }];

    /// Rows of every kind, with requests of every kind.
    fn rows<'p>(points: &'p [PrefixMass]) -> [(RowParams<'static>, Request<'p>); 9] {
        let row = RowParams { seed: 5, draws: 3, ..RowParams::default() };
        let raw = RowParams { logprobs: Some(3), logprobs_mode: LogprobsMode::Raw, ..row };
        let top_p = RowParams { draws: 2, top_p: 0.8, temperature: 0.7, ..row };
        [
            (RowParams { logprobs: Some(2), ..row }, Request::Decide),
            (RowParams { without_replacement: true, ..row }, Request::Decide),
            (raw, Request::Decide),
            (RowParams { draws: 2, top_p: 0.8, top_n_sigma: 3.0, temperature: 0.7, ..raw }, Request::Overview),
            (RowParams { top_k: 5, ..row }, Request::Overview),
            (top_p, Request::PrefixMass { points, below: f32::NEG_INFINITY }),
            (top_p, Request::List { floor: 9.0 }),
            (raw, Request::Logits { tokens: &DRAWN, stage: Stage::Raw }),
            (top_p, Request::PrefixCount { ranks: &RANKS, stage: Stage::Transformed }),
        ]
    }

    fn points() -> [PrefixMass; 2] {
        [(6.0, 398), (2.5, 399)].map(|(logit, token)| PrefixMass::new(LogitRank { logit, token }))
    }

    fn checked(params: &RowParams<'static>) -> Row<'static> {
        let plan = Plan { max_draws: 3, max_logprobs: Some(3), ..Plan::default() };
        let weight = [0.0f32; 400];
        let head = Head::new(Matrix::new(&weight, 400, 1).unwrap()).unwrap();
        let can = Reference::new(head, plan, ReferenceVariant::Tiled).capabilities();
        params.check(&[], &can, &plan, 400).unwrap()
    }

    fn layout<'r, 'a>(row: &'r Row<'a>, request: &'r Request<'r>) -> Layout<'r, 'a> {
        Layout { row, request, by_mass: row.logprobs.is_some() }
    }

    fn summary(row: &Row<'_>, request: Request<'_>) -> RowSummary {
        let logits: Vec<f32> = TOKENS.map(|t| (t * 7919 % 97) as f32 / 8.0).collect();
        let mut summary = RowSummary::default();
        summary.of(row, request, TOKENS.start, &logits);
        summary.of_raw(row, request, TOKENS.start, &logits);
        summary.log_mass = Some(summary.mass.log_z()).filter(|_| row.logprobs.is_some());
        summary
    }

    fn message() -> Vec<u8> {
        let mut bytes = Vec::new();
        for (params, request) in rows(&points()) {
            let row = checked(&params);
            encode_row(&mut bytes, layout(&row, &request), &summary(&row, request));
        }
        bytes
    }

    fn decode_from(bytes: &[u8], tokens: &Range<u32>, points: &[PrefixMass]) -> Result<Vec<RowSummary>, WireError> {
        let mut reader = Reader::new(bytes);
        let mut all = Vec::new();
        for (params, request) in rows(points) {
            let (row, mut out) = (checked(&params), RowSummary::default());
            out.begin(&row);
            // A damaged message may decode to a reason why there is no summary.
            let _ = decode_row(&mut reader, tokens, layout(&row, &request), &mut out)?;
            out.merge_lists(usize::MAX);
            all.push(out);
        }
        reader.finish().map(|()| all)
    }

    fn decode(bytes: &[u8]) -> Result<Vec<RowSummary>, WireError> {
        decode_from(bytes, &TOKENS, &points())
    }

    #[test]
    fn bytes_carry_summaries() {
        for (r, (got, (params, request))) in decode(&message()).unwrap().iter().zip(rows(&points())).enumerate() {
            let row = checked(&params);
            let want = summary(&row, request);
            assert_eq!((&got.draws, &got.list, &got.mass), (&want.draws, &want.list, &want.mass), "row {r}");
            assert_eq!((got.moments, got.log_mass), (want.moments, want.log_mass), "row {r}");
            assert!(got.frontiers() == want.frontiers(), "row {r}");
            let raw = |s: &RowSummary| s.raw_mass.clone().filter(|mass| !mass.is_empty());
            assert_eq!((raw(got), got.raw_top.as_slice()), (raw(&want), want.raw_top.as_slice()), "row {r}");
            assert_eq!(raw(&want).is_some(), row.raw_logprobs.is_some() && request.is_overview());
            assert_eq!((&got.prefix_masses, &got.logits), (&want.prefix_masses, &want.logits), "row {r}");
            assert_eq!(got.prefix_counts, want.prefix_counts, "row {r}");
            let counts = [want.logits.len(), want.prefix_counts.len()];
            let parts = [want.draws.len(), want.list.len(), want.prefix_masses.len()].into_iter().chain(counts);
            assert!(parts.max() > Some(0), "row {r}");
        }
        assert!(decode_from(&message(), &TOKENS, &points()[..1]).is_err(), "another number of points than requested");
    }

    #[test]
    fn bytes_carry_why_there_is_no_summary() {
        let (row, request) = (checked(&rows(&[])[0].0), Request::Overview);
        let layout = layout(&row, &request);
        let sent = |error, stage| {
            let (mut bytes, mut out, mut sent) = (Vec::new(), RowSummary::default(), RowSummary::default());
            sent.error = Some(StagedError { stage, error });
            encode_row(&mut bytes, layout, &sent);
            decode_row(&mut Reader::new(&bytes), &TOKENS, layout, &mut out).unwrap().map(|()| out.error)
        };
        for (stage, error) in [
            (Stage::Raw, RowError::NaN { token: 123 }),
            (Stage::Transformed, RowError::PositiveInfinity { token: 399 }),
        ] {
            assert_eq!(sent(error, stage), Ok(Some(StagedError { stage, error })));
        }
        let reason = sent(RowError::SupportTooSmall { draws: 2, available: 1 }, Stage::Raw).unwrap_err();
        assert!(reason.contains("2 draws"), "{reason}");
        let mut bytes = Vec::new();
        encode_row(&mut bytes, layout, &RowSummary::default());
        assert_eq!(bytes, [NO_MASS]);
    }

    #[test]
    fn a_cut_or_longer_message_is_refused() {
        let mut bytes = message();
        for cut in 0..bytes.len() {
            assert_eq!(decode(&bytes[..cut]).unwrap_err(), WireError::Truncated { at: cut });
        }
        bytes.push(0);
        assert_eq!(decode(&bytes).unwrap_err(), WireError::Trailing { at: bytes.len() - 1, extra: 1 });
    }

    #[test]
    fn a_token_of_another_shard_is_refused() {
        for tokens in [300..400, 100..200, 500..900] {
            assert!(
                matches!(decode_from(&message(), &tokens, &points()), Err(WireError::Invalid { .. })),
                "{tokens:?}"
            );
        }
    }

    proptest! {
        /// Damaged bytes give an error, or summaries that can be merged; never a panic or a large allocation.
        #[test]
        fn damaged_messages_do_no_harm(damage in prop::collection::vec((0usize..20_000, any::<u8>()), 1..4)) {
            let mut bytes = message();
            let length = bytes.len();
            damage.into_iter().for_each(|(at, byte)| bytes[at % length] = byte);
            let own = |c: &Candidate| TOKENS.contains(&c.winner.token) && c.logit.is_finite();
            for summary in decode(&bytes).into_iter().flatten() {
                prop_assert!(summary.draws.iter().chain(&summary.list).all(own));
                prop_assert!(summary.list.is_sorted_by(|a, b| by_logit_rank(a, b).is_lt()));
                prop_assert!(!summary.mass.log_z().is_nan());
            }
        }
    }
}
