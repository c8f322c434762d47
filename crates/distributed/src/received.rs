//! The summaries that another shard sent, checked as they are read.

use crate::call::{FAILED, MAGIC, PASS, header};
use crate::error::ShardError;
use crate::filtered::{OpenRows, kept_list};
use crate::summary::{ANSWER, DRAW, INFINITE, NAN, NO_MASS, NOT_ASKED, SURVEY, ShardSummary, UNUSABLE};
use crate::surveyed::{Places, decode_overview, decode_pass, decode_raw, read_mass};
use crate::wire::{Reader, WireError};
use core::ops::Range;
use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, Draw, MassHistogram, Request, RowError, RowSample, RowSummary, Stage, Winner};

/// The received summaries of one shard; keeps its memory from call to call.
#[derive(Debug, Default)]
pub(crate) struct Received {
    rows: Vec<Result<Answer, RowError>>,
    /// Of each row, of a bad logit.
    stages: Vec<Stage>,
    /// Of rows with filters.
    places: Vec<Places>,
    /// What the last pass told of rows that take surveys.
    surveys: Vec<RowSummary>,
    draws: Vec<Draw>,
    top: Vec<Candidate>,
    masses: Vec<MassHistogram>,
}

/// What a row's answer is to hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected<'r, 'a> {
    /// The row: an overview when it has filters, and otherwise draws; and raw masses when it asks for them.
    pub(crate) row: &'r Row<'a>,
    /// Whether the merge needs the log-mass.
    pub(crate) by_mass: bool,
}

/// Where a row's parts lie in [`Received`].
#[derive(Clone, Debug)]
struct Answer {
    draws: Range<usize>,
    log_mass: Option<f64>,
    mass: Option<usize>,
    top: Range<usize>,
}

impl Received {
    /// Reads the message of `shard`, which covers `tokens`, of a call that it shares with this rank, and adds its overviews to
    /// `open`. `expected` says what the answer for each of the call's rows is to hold, or nothing where its parameters are
    /// invalid.
    pub(crate) fn decode<'r, 'a: 'r>(
        &mut self,
        bytes: &[u8],
        shard: usize,
        tokens: &Range<u32>,
        expected: impl Iterator<Item = Option<Expected<'r, 'a>>>,
        open: &mut OpenRows,
    ) -> Result<(), ShardError> {
        self.rows.clear();
        self.stages.clear();
        self.places.clear();
        self.draws.clear();
        self.top.clear();
        self.masses.clear();
        let message = |source| ShardError::Message { shard, source };
        let mut reader = Reader::new(bytes);
        header(&mut reader, shard)?;
        for (r, expected) in expected.enumerate() {
            let kind = reader.u8().map_err(message)?;
            if kind == UNUSABLE {
                let reason = reader.text().map_err(message)?.to_owned();
                return Err(ShardError::Answer { shard, row: r, reason });
            }
            let summary = match expected {
                Some(expected) => self.answer_of(kind, &mut reader, tokens, r, &expected, open),
                None if kind == NOT_ASKED => Ok(Err(RowError::NoFiniteLogit)),
                None => Err(reader.invalid("an answer to invalid parameters")),
            };
            self.rows.push(summary.map_err(message)?);
        }
        reader.finish().map_err(message)
    }

    /// Reads the message of a further pass, in which `asked` rows take part.
    pub(crate) fn decode_pass<'a>(
        &mut self,
        bytes: &[u8],
        shard: usize,
        tokens: &Range<u32>,
        asked: impl Iterator<Item = (usize, Request<'a>)>,
    ) -> Result<(), ShardError> {
        let mut reader = Reader::new(bytes);
        self.surveys.resize_with(self.rows.len().max(self.surveys.len()), RowSummary::default);
        let told = &mut self.surveys;
        let read = (|| {
            if reader.u32()? != MAGIC {
                return Err(reader.invalid("not a shard's surveys"));
            }
            match reader.u8()? {
                PASS => decode_pass(&mut reader, tokens, asked, told).map(|()| None),
                FAILED => Ok(Some(reader.text()?.to_owned())),
                _ => Err(reader.invalid("an unknown status")),
            }
        })();
        match read.and_then(|failed| reader.finish().map(|()| failed)) {
            Ok(None) => Ok(()),
            Ok(Some(reason)) => Err(ShardError::Failed { shard, reason }),
            Err(source) => Err(ShardError::Message { shard, source }),
        }
    }

    /// The answer for row `r`.
    fn answer_of(
        &mut self,
        kind: u8,
        reader: &mut Reader<'_>,
        tokens: &Range<u32>,
        r: usize,
        expected: &Expected<'_, '_>,
        open: &mut OpenRows,
    ) -> Result<Result<Answer, RowError>, WireError> {
        let Expected { row, .. } = expected;
        self.stages.resize(r + 1, Stage::default());
        let answer = if row.filters.is_some() {
            self.survey_of(kind, reader, tokens, r, row, open)?
        } else {
            self.row_of(kind, reader, tokens, r, expected)?
        };
        if let Some(most) = row.raw_logprobs {
            decode_raw(reader, tokens, most, open.overview_mut(r))?;
        }
        Ok(answer)
    }

    /// The overview of row `r`, of which [`Received::places`] has the rest then.
    fn survey_of(
        &mut self,
        kind: u8,
        reader: &mut Reader<'_>,
        tokens: &Range<u32>,
        r: usize,
        row: &Row<'_>,
        open: &mut OpenRows,
    ) -> Result<Result<Answer, RowError>, WireError> {
        self.places.resize(r + 1, Places::default());
        match kind {
            SURVEY => self.places[r] = decode_overview(reader, tokens, row, open.overview_mut(r))?,
            NO_MASS => {}
            NAN | INFINITE => {
                let error = self.bad_logit(kind, reader, tokens, r)?;
                open.note_error(r, self.stages[r], error);
            }
            _ => return Err(reader.invalid("no survey of a row with filters")),
        }
        // It has no draws of its own.
        Ok(Err(RowError::NoFiniteLogit))
    }

    /// Where in the shard's message the list and the masses of a row with filters are.
    pub(crate) fn places(&self, row: usize) -> &Places {
        &self.places[row]
    }

    /// Gives the memory of long lists back.
    pub(crate) fn trim(&mut self, rows: usize) {
        self.surveys.iter_mut().for_each(|survey| survey.trim(kept_list(rows)));
    }

    /// What the shard told of a row of the last pass.
    pub(crate) fn survey(&self, row: usize) -> &RowSummary {
        &self.surveys[row]
    }

    fn row_of(
        &mut self,
        kind: u8,
        reader: &mut Reader<'_>,
        tokens: &Range<u32>,
        r: usize,
        expected: &Expected<'_, '_>,
    ) -> Result<Result<Answer, RowError>, WireError> {
        let Expected { row, by_mass } = expected;
        let error = match kind {
            ANSWER => return self.answer(reader, tokens, row.logprobs.is_some(), *by_mass).map(Ok),
            NO_MASS => RowError::NoFiniteLogit,
            NAN | INFINITE => self.bad_logit(kind, reader, tokens, r)?,
            NOT_ASKED => return Err(reader.invalid("no answer to valid parameters")),
            _ => return Err(reader.invalid("an unknown kind of answer")),
        };
        Ok(Err(error))
    }

    /// The error of row `r`, whose stage [`Received::stage`] gives then.
    fn bad_logit(
        &mut self,
        kind: u8,
        reader: &mut Reader<'_>,
        tokens: &Range<u32>,
        r: usize,
    ) -> Result<RowError, WireError> {
        let token = token(reader, tokens)?;
        self.stages[r] = if reader.flag()? { Stage::Transformed } else { Stage::Raw };
        Ok(if kind == NAN { RowError::NaN { token } } else { RowError::PositiveInfinity { token } })
    }

    fn answer(
        &mut self,
        reader: &mut Reader<'_>,
        tokens: &Range<u32>,
        logprobs: bool,
        by_mass: bool,
    ) -> Result<Answer, WireError> {
        let (from, count) = (self.draws.len(), reader.count(DRAW)?);
        for _ in 0..count {
            self.draws.push(draw(reader, tokens)?);
        }
        let mut answer =
            Answer { draws: from..self.draws.len(), log_mass: None, mass: None, top: self.top.len()..self.top.len() };
        if by_mass {
            let log_mass = reader.f64()?;
            if !log_mass.is_finite() {
                return Err(reader.invalid("a log-mass that is not finite"));
            }
            answer.log_mass = Some(log_mass);
        }
        if logprobs {
            self.mass(reader, tokens.len())?;
            answer.mass = Some(self.masses.len() - 1);
            for _ in 0..reader.count(DRAW)? {
                let Draw { token, score, logit } = draw(reader, tokens)?;
                self.top.push(Candidate { winner: Winner::new(score, token), logit });
            }
            answer.top.end = self.top.len();
        }
        Ok(answer)
    }

    fn mass(&mut self, reader: &mut Reader<'_>, tokens: usize) -> Result<(), WireError> {
        let mut mass = MassHistogram::default();
        if !read_mass(reader, tokens, &mut mass)? {
            return Err(reader.invalid("an answer without mass"));
        }
        self.masses.push(mass);
        Ok(())
    }

    /// The stage of the bad logit that a row's error names.
    pub(crate) fn stage(&self, row: usize) -> Stage {
        self.stages.get(row).copied().unwrap_or_default()
    }

    /// The summary of a row.
    pub(crate) fn row(&self, row: usize) -> ShardSummary<'_> {
        let answer = self.rows[row].as_ref().map_err(|error| *error)?;
        Ok(RowSample {
            draws: &self.draws[answer.draws.clone()],
            log_z: answer.log_mass,
            top: &self.top[answer.top.clone()],
            raw_logits: &[],
            mass: answer.mass.map(|i| &self.masses[i]),
            kept: None,
            passes: 1,
        })
    }
}

/// A token of the shard.
fn token(reader: &mut Reader<'_>, tokens: &Range<u32>) -> Result<u32, WireError> {
    let token = reader.u32()?;
    if tokens.contains(&token) { Ok(token) } else { Err(reader.invalid("a token of another shard")) }
}

fn draw(reader: &mut Reader<'_>, tokens: &Range<u32>) -> Result<Draw, WireError> {
    let draw = Draw { token: token(reader, tokens)?, score: reader.f32()?, logit: reader.f32()? };
    if draw.score.is_finite() && draw.logit.is_finite() {
        Ok(draw)
    } else {
        Err(reader.invalid("a score or logit that is not finite"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Call, begin, is_same_call};
    use crate::rows::Checked;
    use crate::summary::{encode_failure, encode_not_asked, encode_row};
    use flash_sampling_core::reference::{Reference, Scheme};
    use flash_sampling_core::{DType, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};
    use proptest::prelude::*;

    const TOKENS: Range<u32> = 100..200;

    /// Parameters of four rows: an answer with everything, one without mass, a NaN, one that is not asked for.
    fn rows() -> [RowParams<'static>; 4] {
        let row = RowParams { seed: 5, draws: 3, logprobs: Some(2), ..RowParams::default() };
        [row, row, RowParams { position: 9, ..row }, RowParams { temperature: -1.0, ..row }]
    }

    fn checked(params: &RowParams<'static>) -> Checked<'static> {
        let plan = Plan { max_draws: 3, max_logprobs: Some(2), ..Plan::default() };
        let weight = [0.0f32; 200];
        let head = Head::new(Matrix::new(&weight, 200, 1).unwrap()).unwrap();
        let can = Reference::new(head, plan, Scheme::Tiled).capabilities();
        params.check(&[], &can, &plan, 200)
    }

    fn expected<'r>(row: &'r Checked<'static>) -> Option<Expected<'r, 'static>> {
        row.as_ref().ok().map(|row| Expected { row, by_mass: true })
    }

    fn samples() -> Samples {
        let candidate = |token, score, logit| Candidate { winner: Winner::new(score, token), logit };
        let mut mass = MassHistogram::default();
        mass.extend_from_slice(&[1.5, -2.0, -200.0, 1.4]);
        let top = [candidate(150, 1.5, 1.5), candidate(199, 1.4, 1.4)];
        let draws = [candidate(100, 3.5, -2.0), candidate(150, 2.0, 1.5), candidate(150, 9.0, 1.5)];
        let mut samples = Samples::new();
        samples.push_row(draws, Some(&mass), &top);
        samples.push_error(RowError::NoFiniteLogit);
        samples.push_error(RowError::NaN { token: 123 });
        samples
    }

    fn message(samples: &Samples) -> Vec<u8> {
        let mut bytes = Vec::new();
        begin(&mut bytes, Call::of(7, &rows(), DType::BF16));
        for (r, params) in rows().iter().enumerate() {
            match checked(params) {
                Ok(row) => encode_row(&mut bytes, &row, true, &samples.row(r), Stage::Raw),
                Err(_) => encode_not_asked(&mut bytes),
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Received, ShardError> {
        let mut summaries = Received::default();
        decode_into(&mut summaries, bytes, &TOKENS).map(|()| summaries)
    }

    fn decode_into(summaries: &mut Received, bytes: &[u8], tokens: &Range<u32>) -> Result<(), ShardError> {
        let rows = rows().map(|row| checked(&row));
        summaries.decode(bytes, 1, tokens, rows.iter().map(expected), &mut OpenRows::default())
    }

    fn wire_error(bytes: &[u8]) -> WireError {
        match decode(bytes).unwrap_err() {
            ShardError::Message { shard: 1, source } => source,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn bytes_carry_the_summaries() {
        let samples = samples();
        let bytes = message(&samples);
        let mut summaries = decode(&bytes).unwrap();
        // A second call of the same shape finds nothing of the first.
        decode_into(&mut summaries, &bytes, &TOKENS).unwrap();
        let (sent, received) = (samples.row(0).unwrap(), summaries.row(0).unwrap());
        assert_eq!(received.draws, sent.draws);
        assert_eq!(received.log_z, sent.log_z);
        assert_eq!(received.top, sent.top);
        assert_eq!(received.mass, sent.mass);
        assert_eq!(summaries.row(1).unwrap_err(), RowError::NoFiniteLogit);
        assert_eq!(summaries.row(2).unwrap_err(), RowError::NaN { token: 123 });
        assert_eq!((summaries.stage(1), summaries.stage(2)), (Stage::Transformed, Stage::Raw));
    }

    #[test]
    fn a_cut_or_longer_message_is_refused() {
        let mut bytes = message(&samples());
        for cut in 0..bytes.len() {
            assert_eq!(wire_error(&bytes[..cut]), WireError::Truncated { at: cut });
        }
        bytes.push(0);
        assert_eq!(wire_error(&bytes), WireError::Trailing { at: bytes.len() - 1, extra: 1 });
    }

    #[test]
    fn other_rows_types_and_parameters_are_told_apart() {
        let messages = vec![message(&samples()); 2];
        let call = |rows: &[RowParams<'_>], dtype| is_same_call(&messages, Call::of(7, rows, dtype));
        assert!(matches!(call(&rows(), DType::BF16), Ok(true)));
        let error = call(&rows()[..3], DType::BF16).unwrap_err();
        assert!(matches!(error, ShardError::Rows { shard: 0, expected: 3, found: 4 }));
        let error = call(&rows(), DType::F16).unwrap_err();
        let (expected, found) = (DType::F16, DType::BF16);
        assert!(
            matches!(error, ShardError::Type { shard: 0, expected: e, found: f, .. } if (e, f) == (expected, found)),
            "{error}"
        );
        let changes: [fn(&mut RowParams<'static>); 5] =
            [|p| p.seed += 1, |p| p.position += 1, |p| p.draws += 1, |p| p.first_draw += 1, |p| p.mask = Some(&[])];
        for change in changes {
            let mut other = rows();
            change(&mut other[2]);
            assert!(matches!(call(&other, DType::BF16), Ok(false)));
        }
    }

    #[test]
    fn a_token_of_another_shard_is_refused() {
        let bytes = message(&samples());
        let mut summaries = Received::default();
        for tokens in [101..200, 100..199, 300..400] {
            let error = decode_into(&mut summaries, &bytes, &tokens).unwrap_err();
            assert!(matches!(error, ShardError::Message { source: WireError::Invalid { .. }, .. }), "{error}");
        }
    }

    #[test]
    fn a_failure_and_an_unusable_answer_keep_their_words() {
        let mut bytes = Vec::new();
        encode_failure(&mut bytes, "out of memory");
        let error = decode(&bytes).unwrap_err();
        assert!(matches!(&error, ShardError::Failed { shard: 1, reason } if reason == "out of memory"));

        let mut samples = samples();
        samples.clear();
        (0..3).for_each(|_| samples.push_error(RowError::SupportTooSmall { draws: 2, available: 1 }));
        let error = decode(&message(&samples)).unwrap_err();
        assert!(matches!(&error, ShardError::Answer { shard: 1, row: 0, reason } if reason.contains("2 draws")));
    }

    proptest! {
        /// Damaged bytes are an error or summaries that can be read; never a panic, never a large allocation.
        #[test]
        fn damaged_messages_do_no_harm(damage in prop::collection::vec((0usize..1000, any::<u8>()), 1..6)) {
            let mut bytes = message(&samples());
            let length = bytes.len();
            damage.into_iter().for_each(|(at, byte)| bytes[at % length] = byte);
            if let Ok(summaries) = decode(&bytes) {
                for row in 0..rows().len() {
                    if let Ok(sample) = summaries.row(row) {
                        prop_assert!(sample.draws.iter().all(|d| TOKENS.contains(&d.token) && d.score.is_finite()));
                        prop_assert!(sample.mass.unwrap().log_z().is_finite());
                    }
                }
            }
        }
    }
}
