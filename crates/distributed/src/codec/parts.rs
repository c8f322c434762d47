//! The parts of a row's summary as bytes: draws, lists and masses. A reader accepts only tokens of its shard.

use crate::codec::wire::{Reader, Wire, WireError, put_all, put_items};
use core::ops::Range;
use flash_sampling_core::backend::{Candidate, MassHistogram, Winner, by_logit_rank};

/// The bytes of a draw, and of a listed token.
pub(super) const DRAW: usize = 12;
pub(super) const LISTED: usize = 8;

pub(super) fn put_draws(bytes: &mut Vec<u8>, draws: &[Candidate]) {
    let bytes_of = |c: &Candidate| {
        let (words, mut bytes) = ([c.winner.token, c.winner.score.to_bits(), c.logit.to_bits()], [0; DRAW]);
        bytes.as_chunks_mut().0.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_le_bytes());
        bytes
    };
    put_items(bytes, draws.iter().map(bytes_of));
}

/// Appends a mass; `None` is an empty histogram.
pub(super) fn put_mass(bytes: &mut Vec<u8>, mass: Option<&MassHistogram>) {
    let (top, runs) = mass.map_or((f32::NEG_INFINITY, [&[] as &[u64]; 2]), MassHistogram::run);
    top.put(bytes);
    ((runs[0].len() + runs[1].len()) as u32).put(bytes);
    runs.into_iter().for_each(|run| put_all(bytes, run.iter().map(|mass| mass.to_le_bytes())));
}

/// Appends a list of the largest logits.
pub(super) fn put_list(bytes: &mut Vec<u8>, list: &[Candidate]) {
    put_tokens(bytes, list.iter().map(|c| (c.winner.token, c.logit)));
}

pub(super) fn put_tokens(bytes: &mut Vec<u8>, tokens: impl ExactSizeIterator<Item = (u32, f32)>) {
    put_items(bytes, tokens.map(|(token, logit)| (u64::from(logit.to_bits()) << 32 | u64::from(token)).to_le_bytes()));
}

/// Takes a token of the shard.
pub(super) fn take_token(reader: &mut Reader<'_>, tokens: &Range<u32>) -> Result<u32, WireError> {
    let token = u32::take(reader)?;
    if tokens.contains(&token) { Ok(token) } else { Err(reader.invalid("a token of another shard")) }
}

/// Takes a draw. If the temperature follows the filters, the score may be infinite.
pub(super) fn take_draw(reader: &mut Reader<'_>, tokens: &Range<u32>) -> Result<Candidate, WireError> {
    let (token, score, logit) = (take_token(reader, tokens)?, f32::take(reader)?, f32::take(reader)?);
    if score.is_nan() || !logit.is_finite() {
        return Err(reader.invalid("a score that is NaN, or a logit that is not finite"));
    }
    Ok(Candidate { winner: Winner::new(score, token), logit })
}

/// Takes at most `most` tokens of the shard in their order, with logits of at least `floor`.
pub(super) fn take_list<'r>(
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

/// Takes a mass histogram and adds it to `mass`; returns whether it has any mass.
pub(super) fn take_mass(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    mass: &mut MassHistogram,
) -> Result<bool, WireError> {
    let (top, run) = (f32::take(reader)?, reader.items()?);
    // A bound that vector units compute: the union of all bits.
    let bits = run.iter().fold(0, |bits, mass| bits | u64::from_le_bytes(*mass));
    if !is_mass(bits, tokens) && !run.iter().all(|mass| is_mass(u64::from_le_bytes(*mass), tokens)) {
        return Err(reader.invalid("a mass beyond that of the shard's tokens"));
    }
    if mass.add_run(top, run) { Ok(!run.is_empty()) } else { Err(reader.invalid("not a mass histogram")) }
}

/// Whether a shard's tokens can have this mass. A token has less than 2^31 units, so sums over shards do not overflow.
pub(super) fn is_mass(mass: u64, tokens: &Range<u32>) -> bool {
    mass < ((tokens.len() as u64) << 31).max(1)
}
