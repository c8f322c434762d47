//! The bytes of surveys.
//!
//! ```text
//! overview   list | mass | moments if a filter needs them: 6 words u64 | frontiers u32, each: draws, the largest logit first
//! list       count u32 | (token u32 | logit f32) ..., by falling logits, then rising tokens
//! pass       magic u32 | 2 u8 | rows u32 | row ...                   or, when the pass failed:  magic u32 | 1 u8 | text
//! row        number u32 | masses: count u32 | u64 ...                or  number u32 | list, as the row was asked
//!                                                                    or  number u32 | raw logits of own tokens, as a list
//! ```
//!
//! Mass and draws are those of [`summary`](crate::summary).

use crate::call::{MAGIC, PASS};
use crate::lists::Listed;
use crate::summary::{DRAW, put_draws, put_mass};
use crate::wire::{Reader, WireError, put_items};
use core::ops::Range;
use flash_sampling_core::params::Row;
use flash_sampling_core::scan::by_place;
use flash_sampling_core::selection::{Before, Wants};
use flash_sampling_core::{Candidate, Draw, MassHistogram, Moments, Place, Request, RowSummary, Winner};

/// Bytes of a listed token.
const LISTED: usize = 8;

/// Appends the overview of a row.
pub(crate) fn encode_overview(bytes: &mut Vec<u8>, row: &Row<'_>, survey: &RowSummary) {
    put_list(bytes, &survey.list);
    put_mass(bytes, Some(&survey.mass));
    if row.filters.is_some_and(|filters| filters.need_moments()) {
        put_items(bytes, survey.moments.to_words().into_iter().map(u64::to_le_bytes));
    }
    bytes.extend_from_slice(&(survey.frontiers().len() as u32).to_le_bytes());
    for frontier in survey.frontiers() {
        put_draws(bytes, frontier.as_slice().iter().map(|&c| Draw::from(c)));
    }
}

/// Begins the message of a pass for `rows` rows.
pub(crate) fn begin_pass(bytes: &mut Vec<u8>, rows: usize) {
    bytes.clear();
    bytes.extend_from_slice(&MAGIC.to_le_bytes());
    bytes.push(PASS);
    bytes.extend_from_slice(&(rows as u32).to_le_bytes());
}

/// Appends what a pass told of row `r`.
pub(crate) fn encode_told(bytes: &mut Vec<u8>, r: usize, request: &Request<'_>, told: &RowSummary) {
    bytes.extend_from_slice(&(r as u32).to_le_bytes());
    match request {
        Request::Before(_) => {
            bytes.extend_from_slice(&(told.before.len() as u32).to_le_bytes());
            told.before.iter().for_each(|before| bytes.extend_from_slice(&before.mass().to_le_bytes()));
        }
        Request::RawLogits(_) => put_tokens(bytes, told.raw_logits.iter().copied()),
        _ => put_list(bytes, &told.list),
    }
}

fn put_list(bytes: &mut Vec<u8>, list: &[Candidate]) {
    put_tokens(bytes, list.iter().map(|c| (c.winner.token, c.logit)));
}

fn put_tokens(bytes: &mut Vec<u8>, tokens: impl ExactSizeIterator<Item = (u32, f32)>) {
    bytes.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
    put_items(bytes, tokens.map(|(token, logit)| (u64::from(logit.to_bits()) << 32 | u64::from(token)).to_le_bytes()));
}

/// An entry of a list that the shard with `tokens` put.
fn listed(list: &[[u8; LISTED]], tokens: &Range<u32>, at: usize) -> Listed {
    let Some(&entry) = list.get(at) else { return Listed::End };
    let entry = u64::from_le_bytes(entry);
    let (token, logit) = (entry as u32, f32::from_bits((entry >> 32) as u32));
    if tokens.contains(&token) { Listed::Token { token, logit } } else { Listed::Damaged }
}

/// Appends what an overview says of raw logits.
pub(crate) fn encode_raw(bytes: &mut Vec<u8>, survey: &RowSummary) {
    put_mass(bytes, survey.raw_mass.as_ref());
    put_draws(bytes, survey.raw_top.as_slice().iter().map(|&c| Draw::from(c)));
}

/// Reads what an overview says of raw logits, the `most` largest among it, and adds it to `survey`.
pub(crate) fn decode_raw(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    most: u32,
    survey: &mut RowSummary,
) -> Result<(), WireError> {
    read_mass(reader, tokens.len(), survey.raw_mass.get_or_insert_default())?;
    let top = reader.count(DRAW)?;
    if top > most as usize {
        return Err(reader.invalid("more raw logits than asked for"));
    }
    for _ in 0..top {
        let (token, score, logit) = (reader.u32()?, reader.f32()?, reader.f32()?);
        if !tokens.contains(&token) || !score.is_finite() || !logit.is_finite() {
            return Err(reader.invalid("a raw logit that is none of the shard's"));
        }
        survey.raw_top.push(Candidate { winner: Winner::new(score, token), logit });
    }
    Ok(())
}

/// Where in a message a row's list and its masses are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    list: Range<usize>,
    masses: Range<usize>,
}

impl Places {
    /// An entry of the list that the shard with `tokens` put.
    pub(crate) fn listed(&self, bytes: &[u8], tokens: &Range<u32>, at: usize) -> Listed {
        listed(bytes[self.list.clone()].as_chunks().0, tokens, at)
    }

    /// The error of the list.
    pub(crate) fn damaged(&self) -> WireError {
        WireError::Invalid { what: "a list that is damaged or out of order", at: self.list.end }
    }

    /// Adds the masses that the shard with `tokens` put.
    pub(crate) fn add_masses(
        &self,
        bytes: &[u8],
        tokens: &Range<u32>,
        mass: &mut MassHistogram,
    ) -> Result<(), WireError> {
        if self.masses.is_empty() {
            return Ok(());
        }
        read_mass(&mut Reader::new(&bytes[self.masses.clone()]), tokens.len(), mass).map(drop)
    }
}

/// Reads the overview of a row from the shard with `tokens` and adds it to `survey`, all but its list and its masses: these
/// stay as they lie. Most rows are decided without the list, and the masses of a row are merged where they are looked at.
pub(crate) fn decode_overview(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    row: &Row<'_>,
    survey: &mut RowSummary,
) -> Result<Places, WireError> {
    let Some(filters) = &row.filters else { return Err(reader.invalid("a survey of a row without filters")) };
    let wants = Wants::of(row, filters);
    // Behind its count.
    let from = reader.at() + size_of::<u32>();
    let list = reader.items()?;
    let mut places = Places { list: from..reader.at(), masses: 0..0 };
    let first = match listed(list, tokens, 0) {
        Listed::Token { token, logit } if list.len() <= wants.list => Place { logit, token },
        _ => return Err(reader.invalid("another number of first tokens than asked for")),
    };
    let from = reader.at();
    let (_, run) = (reader.f32()?, reader.items::<8>()?);
    if run.is_empty() == wants.mass {
        return Err(reader.invalid("masses that were not asked for, or none"));
    }
    places.masses = from..reader.at();
    if filters.need_moments() {
        let mut words = [0; Moments::WORDS];
        for word in &mut words {
            *word = reader.u64()?;
        }
        let moments = Moments::from_words(words, filters.temperature, tokens.len() as u64);
        survey.moments.merge(&moments.ok_or_else(|| reader.invalid("moments of no logits"))?);
    }
    if reader.u32()? as usize != survey.frontiers().len() {
        return Err(reader.invalid("another number of frontiers than draws"));
    }
    for frontier in survey.frontiers_mut() {
        let mut largest = None;
        for _ in 0..reader.count(DRAW)? {
            let (token, score, logit) = (reader.u32()?, reader.f32()?, reader.f32()?);
            // Scores may be infinite: where the temperature comes after the filters.
            if !tokens.contains(&token) || score.is_nan() || !logit.is_finite() {
                return Err(reader.invalid("a point that is none of the shard's"));
            }
            let point = Candidate { winner: Winner::new(score, token), logit };
            largest.get_or_insert(point.place());
            frontier.push(point);
        }
        if largest != Some(first) {
            return Err(reader.invalid("a frontier that does not begin with the first token"));
        }
    }
    Ok(places)
}

/// Reads a mass histogram and adds it to `mass`; whether it has any.
pub(crate) fn read_mass(reader: &mut Reader<'_>, tokens: usize, mass: &mut MassHistogram) -> Result<bool, WireError> {
    let (top, run) = (reader.f32()?, reader.items()?);
    // The bits of all are a bound that vectors find.
    let bits = run.iter().fold(0, |bits, mass| bits | u64::from_le_bytes(*mass));
    if !is_mass(bits, tokens) && !run.iter().all(|mass| is_mass(u64::from_le_bytes(*mass), tokens)) {
        return Err(reader.invalid("a mass beyond that of the shard's tokens"));
    }
    if mass.add_run(top, run) { Ok(!run.is_empty()) } else { Err(reader.invalid("not a mass histogram")) }
}

/// Whether so many tokens can have a mass: each has less than 2^31 units, which keeps sums over shards from overflowing.
fn is_mass(mass: u64, tokens: usize) -> bool {
    mass < ((tokens as u64) << 31).max(1)
}

/// Reads the message of a pass; the rows are `asked`, ascending, and `told` has one entry for each row of the call.
pub(crate) fn decode_pass<'a>(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    asked: impl Iterator<Item = (usize, Request<'a>)>,
    told: &mut [RowSummary],
) -> Result<(), WireError> {
    let mut left = reader.u32()?;
    for (r, request) in asked {
        if left == 0 || reader.u32()? as usize != r {
            return Err(reader.invalid("another row than asked for"));
        }
        left -= 1;
        let Some(told) = told.get_mut(r) else { return Err(reader.invalid("a row beyond the call")) };
        told.clear();
        match request {
            Request::Before(doubts) => {
                if reader.u32()? as usize != doubts.len() {
                    return Err(reader.invalid("another number of places than asked for"));
                }
                for doubt in doubts {
                    let mass = reader.u64()?;
                    if !is_mass(mass, tokens.len()) {
                        return Err(reader.invalid("a mass beyond that of the shard's tokens"));
                    }
                    told.before.push(Before::with_mass(doubt.place, mass));
                }
            }
            Request::List { floor } => read_list(reader, tokens, floor, &mut told.list)?,
            Request::RawLogits(drawn) => {
                let count = reader.count(LISTED)?;
                let own = drawn.iter().filter(|token| tokens.contains(token));
                if count != own.clone().count() {
                    return Err(reader.invalid("another number of raw logits than asked for"));
                }
                for &token in own {
                    let (found, logit) = (reader.u32()?, reader.f32()?);
                    if found != token || !logit.is_finite() {
                        return Err(reader.invalid("another raw logit than asked for"));
                    }
                    told.raw_logits.push((token, logit));
                }
            }
            _ => {}
        }
    }
    if left == 0 { Ok(()) } else { Err(reader.invalid("rows that were not asked for")) }
}

fn read_list(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    floor: f32,
    list: &mut Vec<Candidate>,
) -> Result<(), WireError> {
    for _ in 0..reader.count(LISTED)? {
        let (token, logit) = (reader.u32()?, reader.f32()?);
        let c = Candidate { winner: Winner::new(logit, token), logit };
        if !tokens.contains(&token) || !logit.is_finite() || logit < floor {
            return Err(reader.invalid("a token that is none of the shard's, or was not asked for"));
        }
        if list.last().is_some_and(|last| by_place(last, &c).is_ge()) {
            return Err(reader.invalid("a list out of order"));
        }
        list.push(c);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lists::Lists;
    use flash_sampling_core::reference::{Reference, Scheme};
    use flash_sampling_core::{Head, LogprobsMode, Matrix, PerturbedArgmax, Plan, RowParams};
    use proptest::prelude::*;

    const TOKENS: Range<u32> = 100..400;

    fn params() -> RowParams<'static> {
        RowParams { seed: 3, draws: 2, top_p: 0.8, top_n_sigma: 3.0, temperature: 0.7, ..RowParams::default() }
    }

    #[test]
    fn bytes_carry_what_an_overview_says_of_raw_logits() {
        let plan = Plan { max_logprobs: Some(3), ..Plan::default() };
        let weight = [0.0f32; 400];
        let head = Head::new(Matrix::new(&weight, 400, 1).unwrap()).unwrap();
        let can = Reference::new(head, plan, Scheme::Tiled).capabilities();
        let params = RowParams { logprobs: Some(3), logprobs_mode: LogprobsMode::Raw, ..RowParams::default() };
        let row = params.check(&[], &can, &plan, 400).unwrap();
        let logits: Vec<f32> = TOKENS.map(|t| (t * 7919 % 97) as f32 / 8.0).collect();
        let mut survey = RowSummary::default();
        survey.of(&row, Request::Overview, TOKENS.start, &[]);
        survey.of_raw(&row, Request::Overview, TOKENS.start, &logits);
        let mut bytes = Vec::new();
        encode_raw(&mut bytes, &survey);
        let decode = |bytes: &[u8], most| {
            let (mut reader, mut got) = (Reader::new(bytes), RowSummary::default());
            got.begin(&row);
            decode_raw(&mut reader, &TOKENS, most, &mut got)?;
            reader.finish().map(|()| got)
        };
        let got = decode(&bytes, 3).unwrap();
        assert!(got.raw_mass == survey.raw_mass && !got.raw_mass.unwrap().is_empty());
        assert!(got.raw_top.as_slice() == survey.raw_top.as_slice() && got.raw_top.as_slice().len() == 3);
        assert!(decode(&bytes, 2).is_err());
        for end in 0..bytes.len() {
            assert!(decode(&bytes[..end], 3).is_err(), "{end} bytes");
        }
    }

    fn row() -> Row<'static> {
        let weight = [0.0f32; 400];
        let head = Head::new(Matrix::new(&weight, 400, 1).unwrap()).unwrap();
        let plan = Plan { max_draws: 2, ..Plan::default() };
        let can = Reference::new(head, plan, Scheme::Tiled).capabilities();
        params().check(&[], &can, &plan, 400).unwrap()
    }

    fn survey(request: Request<'_>) -> RowSummary {
        let logits: Vec<f32> = TOKENS.map(|t| (t * 7919 % 97) as f32 / 8.0).collect();
        let mut survey = RowSummary::default();
        survey.of(&row(), request, TOKENS.start, &logits);
        survey
    }

    fn overview() -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_overview(&mut bytes, &row(), &survey(Request::Overview));
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<RowSummary, WireError> {
        let (mut reader, mut survey) = (Reader::new(bytes), RowSummary::default());
        survey.begin(&row());
        let places = decode_overview(&mut reader, &TOKENS, &row(), &mut survey)?;
        reader.finish()?;
        places.add_masses(bytes, &TOKENS, &mut survey.mass)?;
        let listed = |_, at| places.listed(bytes, &TOKENS, at);
        let merged = Lists::default().merge(1, usize::MAX, listed, &mut survey.list);
        merged.map(|()| survey).map_err(|_| places.damaged())
    }

    fn places() -> [Before; 2] {
        [(6.0, 398), (2.5, 399)].map(|(logit, token)| Before::new(flash_sampling_core::Place { logit, token }))
    }

    fn decode_told(bytes: &[u8], places: &[Before]) -> Result<Vec<RowSummary>, WireError> {
        let asked = [(1, Request::Before(places)), (4, Request::List { floor: 9.0 })];
        let (mut reader, mut told) = (Reader::new(bytes), vec![RowSummary::default(); 5]);
        assert!(reader.u32()? == MAGIC && reader.u8()? == PASS);
        decode_pass(&mut reader, &TOKENS, asked.into_iter(), &mut told)?;
        reader.finish().map(|()| told)
    }

    #[test]
    fn bytes_carry_an_overview() {
        let (got, want) = (decode(&overview()).unwrap(), survey(Request::Overview));
        assert_eq!((&got.list, &got.mass, got.moments), (&want.list, &want.mass, want.moments));
        assert!(got.frontiers() == want.frontiers() && want.frontiers().len() == 2);
    }

    #[test]
    fn bytes_carry_what_a_pass_told() {
        let (mut bytes, places) = (Vec::new(), places());
        let told = [(1, Request::Before(&places)), (4, Request::List { floor: 9.0 })];
        begin_pass(&mut bytes, told.len());
        let told = told.map(|(r, request)| (r, request, survey(request)));
        told.iter().for_each(|(r, request, told)| encode_told(&mut bytes, *r, request, told));
        let got = decode_told(&bytes, &places).unwrap();
        assert!(got[1].before == told[0].2.before && got[1].before.iter().all(|b| b.mass() > 0));
        assert!(got[4].list == told[1].2.list && !got[4].list.is_empty());
        // Another floor or another number of places than was asked for.
        assert!(decode_told(&bytes, &places[..1]).is_err());
        for end in 5..bytes.len() {
            assert!(decode_told(&bytes[..end], &places).is_err(), "{end} bytes");
        }
    }

    #[test]
    fn a_truncated_overview_is_refused() {
        let bytes = overview();
        for end in 0..bytes.len() {
            assert!(decode(&bytes[..end]).is_err(), "{end} of {} bytes", bytes.len());
        }
    }

    #[test]
    fn the_error_of_a_damaged_list_says_where_it_ends() {
        let mut bytes = overview();
        // The second token of the list, behind its count and the first.
        bytes[12..16].copy_from_slice(&TOKENS.end.to_le_bytes());
        let end = 4 + survey(Request::Overview).list.len() * LISTED;
        let want = WireError::Invalid { what: "a list that is damaged or out of order", at: end };
        assert!(end < bytes.len() && decode(&bytes).unwrap_err() == want);
    }

    proptest! {
        #[test]
        fn a_damaged_overview_is_an_error_or_an_overview(at in 0usize..4000, value: u8) {
            let mut bytes = overview();
            let at = at % bytes.len();
            bytes[at] = value;
            if let Ok(survey) = decode(&bytes) {
                prop_assert!(survey.list.iter().all(|c| TOKENS.contains(&c.winner.token) && c.logit.is_finite()));
                prop_assert!(survey.list.windows(2).all(|w| by_place(&w[0], &w[1]).is_lt()));
            }
        }
    }
}
