//! The bytes of a row's summary.
//!
//! ```text
//! row       kind u8 | rest
//!   0 SUMMARY       without filters: draws | log-mass f64 if merged by it | mass and list if log-probabilities are requested
//!                   with filters: list | mass | moments if a filter needs them: 6 words u64
//!                                 | frontiers u32, each: draws, the largest logit first
//!   1 NO_MASS       the shard has no finite logit
//!   2 NAN           token u32 | stage u8: 0 of a raw logit, 1 of a transformed one
//!   3 INFINITE      token u32 | stage u8
//!   4 UNUSABLE      text: an error that no shard should give for a row with valid parameters
//!   5 SKIPPED       the parameters are invalid on every rank
//!                   after 0 to 3, if raw log-probabilities are requested: mass | list
//! draws             count u32 | (token u32 | score f32 | logit f32) ...
//! mass              top edge's bits u32 | bins u32 | u64 ..., from the lowest bin with mass up to the highest
//! list              count u32 | (token u32 | logit f32) ..., by falling logits, then rising tokens
//! ```

use crate::codec::wire::{Reader, WireError, put_items, put_text};
use core::ops::Range;
use flash_sampling_core::backend::selection::SummarySpec;
use flash_sampling_core::backend::{RowSummary, by_logit_rank};
use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, Filters, MassHistogram, Moments, RowError, Stage, StagedError, Winner};

const SUMMARY: u8 = 0;
const NO_MASS: u8 = 1;
const NAN: u8 = 2;
const INFINITE: u8 = 3;
const UNUSABLE: u8 = 4;
const SKIPPED: u8 = 5;

/// The bytes of a draw, and of a listed token.
const DRAW: usize = 12;
pub(super) const LISTED: usize = 8;

/// The parts of a row's summary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'r, 'a> {
    pub(crate) row: &'r Row<'a>,
    /// Whether the merge needs the log-mass.
    pub(crate) by_mass: bool,
}

/// Appends a row's summary; `None`: the row's parameters are invalid.
pub(crate) fn encode_row(bytes: &mut Vec<u8>, layout: Option<Layout<'_, '_>>, summary: &RowSummary) {
    let Some(Layout { row, by_mass }) = layout else { return bytes.push(SKIPPED) };
    let has_mass = if row.filters.is_some() { !summary.list.is_empty() } else { !summary.draws.is_empty() };
    match summary.error {
        None if !has_mass => bytes.push(NO_MASS),
        None => {
            bytes.push(SUMMARY);
            match &row.filters {
                Some(filters) => encode_overview(bytes, filters, summary),
                None => encode_draws(bytes, row, by_mass, summary),
            }
        }
        Some(StagedError { error: RowError::NaN { token }, stage }) => put_bad_logit(bytes, NAN, token, stage),
        Some(StagedError { error: RowError::PositiveInfinity { token }, stage }) => {
            put_bad_logit(bytes, INFINITE, token, stage);
        }
        Some(StagedError { error, .. }) => {
            bytes.push(UNUSABLE);
            return put_text(bytes, &error.to_string());
        }
    }
    if row.raw_logprobs.is_some() {
        put_mass(bytes, summary.raw_mass.as_ref());
        put_list(bytes, summary.raw_top.as_slice());
    }
}

fn put_bad_logit(bytes: &mut Vec<u8>, kind: u8, token: u32, stage: Stage) {
    bytes.push(kind);
    bytes.extend_from_slice(&token.to_le_bytes());
    bytes.push(stage as u8);
}

fn encode_draws(bytes: &mut Vec<u8>, row: &Row<'_>, by_mass: bool, summary: &RowSummary) {
    put_draws(bytes, &summary.draws);
    if by_mass {
        bytes.extend_from_slice(&summary.log_mass.unwrap_or(f64::NEG_INFINITY).to_le_bytes());
    }
    if row.logprobs.is_some() {
        put_mass(bytes, Some(&summary.mass));
        put_list(bytes, &summary.list);
    }
}

fn encode_overview(bytes: &mut Vec<u8>, filters: &Filters, summary: &RowSummary) {
    put_list(bytes, &summary.list);
    put_mass(bytes, Some(&summary.mass));
    if filters.need_moments() {
        put_items(bytes, summary.moments.to_words().into_iter().map(u64::to_le_bytes));
    }
    bytes.extend_from_slice(&(summary.frontiers().len() as u32).to_le_bytes());
    summary.frontiers().iter().for_each(|frontier| put_draws(bytes, frontier.as_slice()));
}

fn put_draws(bytes: &mut Vec<u8>, draws: &[Candidate]) {
    bytes.extend_from_slice(&(draws.len() as u32).to_le_bytes());
    put_items(bytes, draws.iter().map(bytes_of));
}

fn bytes_of(c: &Candidate) -> [u8; DRAW] {
    let (words, mut bytes) = ([c.winner.token, c.winner.score.to_bits(), c.logit.to_bits()], [0; DRAW]);
    bytes.as_chunks_mut().0.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_le_bytes());
    bytes
}

/// Appends a mass; `None` is an empty histogram.
fn put_mass(bytes: &mut Vec<u8>, mass: Option<&MassHistogram>) {
    let (top, runs) = mass.map_or((f32::NEG_INFINITY, [&[] as &[u64]; 2]), MassHistogram::run);
    bytes.extend_from_slice(&top.to_bits().to_le_bytes());
    bytes.extend_from_slice(&((runs[0].len() + runs[1].len()) as u32).to_le_bytes());
    runs.into_iter().for_each(|run| put_items(bytes, run.iter().map(|mass| mass.to_le_bytes())));
}

pub(super) fn put_list(bytes: &mut Vec<u8>, list: &[Candidate]) {
    put_tokens(bytes, list.iter().map(|c| (c.winner.token, c.logit)));
}

pub(super) fn put_tokens(bytes: &mut Vec<u8>, tokens: impl ExactSizeIterator<Item = (u32, f32)>) {
    bytes.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
    put_items(bytes, tokens.map(|(token, logit)| (u64::from(logit.to_bits()) << 32 | u64::from(token)).to_le_bytes()));
}

/// Reads the summary of a row from the shard with `tokens`. The inner error is the reason why the shard's summary
/// cannot be used.
///
/// The summary of a row with filters is merged into `out`. Otherwise it becomes `out`, which [`RowSummary::begin`]
/// prepared.
pub(crate) fn decode_row(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    layout: Option<Layout<'_, '_>>,
    out: &mut RowSummary,
) -> Result<Result<(), String>, WireError> {
    let kind = reader.u8()?;
    if kind == UNUSABLE {
        return Ok(Err(reader.text()?.to_owned()));
    }
    let Some(Layout { row, by_mass }) = layout else {
        return if kind == SKIPPED { Ok(Ok(())) } else { Err(reader.invalid("a summary of invalid parameters")) };
    };
    match kind {
        SUMMARY => match &row.filters {
            Some(filters) => decode_overview(reader, tokens, row, filters, out)?,
            None => decode_draws(reader, tokens, row, by_mass, out)?,
        },
        NO_MASS => {}
        NAN | INFINITE => {
            let token = read_token(reader, tokens)?;
            let stage = if reader.flag()? { Stage::Transformed } else { Stage::Raw };
            let error = if kind == NAN { RowError::NaN { token } } else { RowError::PositiveInfinity { token } };
            out.error = StagedError::first(out.error, Some(StagedError { stage, error }));
        }
        SKIPPED => return Err(reader.invalid("no summary of valid parameters")),
        _ => return Err(reader.invalid("an unknown kind of summary")),
    }
    if let Some(most) = row.raw_logprobs {
        read_mass(reader, tokens.len(), out.raw_mass.get_or_insert_default())?;
        for c in read_list(reader, tokens, f32::NEG_INFINITY, most as usize)? {
            out.raw_top.push(c?);
        }
    }
    Ok(Ok(()))
}

fn decode_draws(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    row: &Row<'_>,
    by_mass: bool,
    out: &mut RowSummary,
) -> Result<(), WireError> {
    for _ in 0..reader.count(DRAW)? {
        let draw = read_draw(reader, tokens)?;
        if !draw.winner.score.is_finite() {
            return Err(reader.invalid("a score that is not finite"));
        }
        out.draws.push(draw);
    }
    if row.without_replacement && !out.draws.is_sorted_by(|a, b| a.winner.beats(&b.winner)) {
        return Err(reader.invalid("draws out of order"));
    }
    if by_mass {
        let log_mass = reader.f64()?;
        if !log_mass.is_finite() {
            return Err(reader.invalid("a log-mass that is not finite"));
        }
        out.log_mass = Some(log_mass);
    }
    if let Some(most) = row.logprobs {
        if !read_mass(reader, tokens.len(), &mut out.mass)? {
            return Err(reader.invalid("a summary without mass"));
        }
        for c in read_list(reader, tokens, f32::NEG_INFINITY, most as usize)? {
            out.list.push(c?);
        }
    }
    Ok(())
}

fn decode_overview(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    row: &Row<'_>,
    filters: &Filters,
    out: &mut RowSummary,
) -> Result<(), WireError> {
    let spec = SummarySpec::of(row, filters);
    let Some(first) = out.add_list(read_list(reader, tokens, f32::NEG_INFINITY, spec.list)?)? else {
        return Err(reader.invalid("no first token"));
    };
    if read_mass(reader, tokens.len(), &mut out.mass)? != spec.mass {
        return Err(reader.invalid("masses that were not requested, or none"));
    }
    if filters.need_moments() {
        let mut words = [0; Moments::WORDS];
        for word in &mut words {
            *word = reader.u64()?;
        }
        let moments = Moments::from_words(words, filters.temperature, tokens.len() as u64);
        out.moments.merge(&moments.ok_or_else(|| reader.invalid("moments of no logits"))?);
    }
    if reader.u32()? as usize != out.frontiers().len() {
        return Err(reader.invalid("another number of frontiers than draws"));
    }
    for frontier in out.frontiers_mut() {
        let mut largest = None;
        for _ in 0..reader.count(DRAW)? {
            let point = read_draw(reader, tokens)?;
            largest.get_or_insert(point);
            frontier.push(point);
        }
        if largest.is_none_or(|largest| largest.logit_rank() != first.logit_rank()) {
            return Err(reader.invalid("a frontier that does not begin with the first token"));
        }
    }
    Ok(())
}

/// Reads a token of the shard.
fn read_token(reader: &mut Reader<'_>, tokens: &Range<u32>) -> Result<u32, WireError> {
    let token = reader.u32()?;
    if tokens.contains(&token) { Ok(token) } else { Err(reader.invalid("a token of another shard")) }
}

/// Reads a draw. Its score may be infinite if the temperature follows the filters.
fn read_draw(reader: &mut Reader<'_>, tokens: &Range<u32>) -> Result<Candidate, WireError> {
    let (token, score, logit) = (read_token(reader, tokens)?, reader.f32()?, reader.f32()?);
    if score.is_nan() || !logit.is_finite() {
        return Err(reader.invalid("a score that is NaN, or a logit that is not finite"));
    }
    Ok(Candidate { winner: Winner::new(score, token), logit })
}

/// Reads at most `most` tokens of the shard with logits of at least `floor`, in their order.
pub(super) fn read_list<'r>(
    reader: &mut Reader<'r>,
    tokens: &Range<u32>,
    floor: f32,
    most: usize,
) -> Result<impl Iterator<Item = Result<Candidate, WireError>> + use<'r>, WireError> {
    let (list, tokens) = (reader.items::<LISTED>()?, tokens.clone());
    let damaged = reader.invalid("a list that is damaged, out of order or longer than requested");
    if list.len() > most {
        return Err(damaged);
    }
    let mut last: Option<Candidate> = None;
    Ok(list.iter().map(move |&entry| {
        let entry = u64::from_le_bytes(entry);
        let (token, logit) = (entry as u32, f32::from_bits((entry >> 32) as u32));
        let c = Candidate { winner: Winner::new(logit, token), logit };
        let is_next = last.is_none_or(|last| by_logit_rank(&last, &c).is_lt());
        if !tokens.contains(&token) || !logit.is_finite() || logit < floor || !is_next {
            return Err(damaged);
        }
        last = Some(c);
        Ok(c)
    }))
}

/// Reads a mass histogram and adds it to `mass`; returns whether it has any mass.
fn read_mass(reader: &mut Reader<'_>, tokens: usize, mass: &mut MassHistogram) -> Result<bool, WireError> {
    let (top, run) = (reader.f32()?, reader.items()?);
    // The union of all bits is a bound that vector units compute.
    let bits = run.iter().fold(0, |bits, mass| bits | u64::from_le_bytes(*mass));
    if !is_mass(bits, tokens) && !run.iter().all(|mass| is_mass(u64::from_le_bytes(*mass), tokens)) {
        return Err(reader.invalid("a mass beyond that of the shard's tokens"));
    }
    if mass.add_run(top, run) { Ok(!run.is_empty()) } else { Err(reader.invalid("not a mass histogram")) }
}

/// Whether `tokens` tokens can have this mass. A token has less than 2^31 units, so sums over shards do not overflow.
pub(super) fn is_mass(mass: u64, tokens: usize) -> bool {
    mass < ((tokens as u64) << 31).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::call::{Call, begin, is_same_call};
    use flash_sampling_core::backend::Request;
    use flash_sampling_core::reference::{Reference, ReferenceVariant};
    use flash_sampling_core::{DType, Head, LogprobsMode, Matrix, PerturbedArgmax, Plan, RowParams};
    use proptest::prelude::*;

    const TOKENS: Range<u32> = 100..400;

    /// Rows of every kind.
    fn rows() -> [RowParams<'static>; 6] {
        let row = RowParams { seed: 5, draws: 3, ..RowParams::default() };
        let raw = RowParams { logprobs: Some(3), logprobs_mode: LogprobsMode::Raw, ..row };
        [
            RowParams { logprobs: Some(2), ..row },
            RowParams { without_replacement: true, ..row },
            raw,
            RowParams { draws: 2, top_p: 0.8, top_n_sigma: 3.0, temperature: 0.7, ..raw },
            RowParams { top_k: 5, ..row },
            RowParams { temperature: -1.0, ..row },
        ]
    }

    fn checked(params: &RowParams<'static>) -> Result<Row<'static>, RowError> {
        let plan = Plan { max_draws: 3, max_logprobs: Some(3), ..Plan::default() };
        let weight = [0.0f32; 400];
        let head = Head::new(Matrix::new(&weight, 400, 1).unwrap()).unwrap();
        let can = Reference::new(head, plan, ReferenceVariant::Tiled).capabilities();
        params.check(&[], &can, &plan, 400)
    }

    fn layout<'r>(row: &'r Result<Row<'static>, RowError>) -> Option<Layout<'r, 'static>> {
        row.as_ref().ok().map(|row| Layout { row, by_mass: row.logprobs.is_some() })
    }

    fn summary(row: &Row<'_>) -> RowSummary {
        let logits: Vec<f32> = TOKENS.map(|t| (t * 7919 % 97) as f32 / 8.0).collect();
        let mut summary = RowSummary::default();
        summary.of(row, Request::Overview, TOKENS.start, &logits);
        summary.of_raw(row, Request::Overview, TOKENS.start, &logits);
        summary.log_mass = Some(summary.mass.log_z()).filter(|_| row.logprobs.is_some());
        summary
    }

    fn message() -> Vec<u8> {
        let mut bytes = Vec::new();
        for params in rows() {
            let row = checked(&params);
            encode_row(&mut bytes, layout(&row), &row.as_ref().map(summary).unwrap_or_default());
        }
        bytes
    }

    fn decode_from(bytes: &[u8], tokens: &Range<u32>) -> Result<Vec<RowSummary>, WireError> {
        let mut reader = Reader::new(bytes);
        let mut read = |params: RowParams<'static>| {
            let (row, mut out) = (checked(&params), RowSummary::default());
            row.as_ref().iter().for_each(|row| out.begin(row));
            decode_row(&mut reader, tokens, layout(&row), &mut out)?.unwrap();
            out.merge_lists(usize::MAX);
            Ok(out)
        };
        let all = rows().into_iter().map(&mut read).collect::<Result<_, _>>()?;
        reader.finish().map(|()| all)
    }

    fn decode(bytes: &[u8]) -> Result<Vec<RowSummary>, WireError> {
        decode_from(bytes, &TOKENS)
    }

    #[test]
    fn bytes_carry_summaries() {
        for (r, (got, params)) in decode(&message()).unwrap().iter().zip(rows()).enumerate() {
            let Ok(row) = checked(&params) else { continue };
            let want = summary(&row);
            assert_eq!((&got.draws, &got.list, &got.mass), (&want.draws, &want.list, &want.mass), "row {r}");
            assert_eq!((got.moments, got.log_mass), (want.moments, want.log_mass), "row {r}");
            assert!(got.frontiers() == want.frontiers(), "row {r}");
            let raw = |s: &RowSummary| s.raw_mass.clone().filter(|mass| !mass.is_empty());
            assert_eq!((raw(got), got.raw_top.as_slice()), (raw(&want), want.raw_top.as_slice()), "row {r}");
            assert_eq!(raw(&want).is_some(), row.raw_logprobs.is_some());
            assert!(!want.draws.is_empty() || !want.list.is_empty());
        }
    }

    #[test]
    fn bytes_carry_why_there_is_no_summary() {
        let row = checked(&rows()[0]);
        for (stage, error) in [
            (Stage::Raw, RowError::NaN { token: 123 }),
            (Stage::Transformed, RowError::PositiveInfinity { token: 399 }),
        ] {
            let (mut bytes, mut out, mut sent) = (Vec::new(), RowSummary::default(), RowSummary::default());
            sent.error = Some(StagedError { stage, error });
            encode_row(&mut bytes, layout(&row), &sent);
            decode_row(&mut Reader::new(&bytes), &TOKENS, layout(&row), &mut out).unwrap().unwrap();
            assert_eq!(out.error, sent.error);
        }
        let error = RowError::SupportTooSmall { draws: 2, available: 1 };
        let (mut bytes, mut out, mut sent) = (Vec::new(), RowSummary::default(), RowSummary::default());
        sent.error = Some(StagedError { stage: Stage::Raw, error });
        encode_row(&mut bytes, layout(&row), &sent);
        let reason = decode_row(&mut Reader::new(&bytes), &TOKENS, layout(&row), &mut out).unwrap().unwrap_err();
        assert!(reason.contains("2 draws"), "{reason}");
        let mut bytes = Vec::new();
        encode_row(&mut bytes, layout(&row), &RowSummary::default());
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
            assert!(matches!(decode_from(&message(), &tokens), Err(WireError::Invalid { .. })), "{tokens:?}");
        }
    }

    #[test]
    fn other_rows_types_and_parameters_are_found() {
        let mut bytes = Vec::new();
        begin(&mut bytes, Call::of(7, &rows(), DType::BF16));
        let messages = vec![bytes; 2];
        let call = |rows: &[RowParams<'_>], dtype| is_same_call(&messages, Call::of(7, rows, dtype));
        assert!(matches!(call(&rows(), DType::BF16), Ok(true)));
        assert!(call(&rows()[..3], DType::BF16).unwrap_err().to_string().contains("3"));
        assert!(call(&rows(), DType::F16).is_err());
        let changes: [fn(&mut RowParams<'static>); 5] =
            [|p| p.seed += 1, |p| p.position += 1, |p| p.draws += 1, |p| p.first_draw += 1, |p| p.mask = Some(&[])];
        for change in changes {
            let mut other = rows();
            change(&mut other[2]);
            assert!(matches!(call(&other, DType::BF16), Ok(false)));
        }
    }

    proptest! {
        /// Damaged bytes are an error or summaries that can be merged; never a panic, never a large allocation.
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
