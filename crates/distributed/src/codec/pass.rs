//! The bytes of a further pass.
//!
//! ```text
//! row        number u32 | masses: count u32 | u64 ...          by request: masses before points,
//!            number u32 | list                                 tokens down to a logit,
//!            number u32 | logits of own tokens, as a list      logits,
//!            number u32 | count u32 ...                        or tokens before ranks
//! ```
//!
//! An overview in a further pass has the bytes of [`summary`](crate::codec::summary).

use crate::codec::summary::{LISTED, Layout, decode_row, encode_row, is_mass, put_list, put_tokens, read_list};
use crate::codec::wire::{Reader, WireError};
use core::ops::Range;
use flash_sampling_core::backend::selection::PrefixMass;
use flash_sampling_core::backend::{Request, RowSummary};

/// Appends the summary of row `r` from a further pass.
pub(crate) fn encode_row_of_pass(
    bytes: &mut Vec<u8>,
    r: usize,
    layout: Layout<'_, '_>,
    request: &Request<'_>,
    summary: &RowSummary,
) {
    bytes.extend_from_slice(&(r as u32).to_le_bytes());
    match request {
        Request::Skip => {}
        Request::Overview | Request::Decide => encode_row(bytes, Some(layout), summary),
        Request::PrefixMass { .. } => {
            bytes.extend_from_slice(&(summary.prefix_masses.len() as u32).to_le_bytes());
            summary.prefix_masses.iter().for_each(|before| bytes.extend_from_slice(&before.mass().to_le_bytes()));
        }
        Request::Logits { .. } => put_tokens(bytes, summary.logits.iter().copied()),
        Request::PrefixCount { .. } => {
            bytes.extend_from_slice(&(summary.prefix_counts.len() as u32).to_le_bytes());
            summary.prefix_counts.iter().for_each(|count| bytes.extend_from_slice(&count.to_le_bytes()));
        }
        Request::List { .. } => put_list(bytes, &summary.list),
    }
}

/// Reads the summary of row `r` from a pass over the shard with `tokens`, and merges it into `out`. The row has filters
/// or log-probabilities. The inner error is the reason why the shard's summary cannot be used.
pub(crate) fn decode_row_of_pass(
    reader: &mut Reader<'_>,
    tokens: &Range<u32>,
    r: usize,
    layout: Layout<'_, '_>,
    request: &Request<'_>,
    out: &mut RowSummary,
) -> Result<Result<(), String>, WireError> {
    if reader.u32()? as usize != r {
        return Err(reader.invalid("another row than requested"));
    }
    match request {
        Request::Skip => {}
        Request::Overview | Request::Decide => return decode_row(reader, tokens, Some(layout), out),
        Request::PrefixMass { points: doubts, .. } => {
            if reader.u32()? as usize != doubts.len() {
                return Err(reader.invalid("another number of points than requested"));
            }
            out.prefix_masses.extend(doubts[out.prefix_masses.len()..].iter().map(|doubt| PrefixMass::new(doubt.rank)));
            for (doubt, before) in doubts.iter().zip(&mut out.prefix_masses) {
                let mass = reader.u64()?;
                if !is_mass(mass, tokens.len()) {
                    return Err(reader.invalid("a mass beyond that of the shard's tokens"));
                }
                before.merge(&PrefixMass::with_mass(doubt.rank, mass));
            }
        }
        Request::List { floor } => {
            out.add_list(read_list(reader, tokens, *floor, tokens.len())?)?;
        }
        Request::Logits { tokens: requested, .. } => {
            let count = reader.count(LISTED)?;
            let own = requested.iter().filter(|token| tokens.contains(token));
            if count != own.clone().count() {
                return Err(reader.invalid("another number of logits than requested"));
            }
            for &token in own {
                let (found, logit) = (reader.u32()?, reader.f32()?);
                if found != token || logit.is_nan() || logit == f32::INFINITY {
                    return Err(reader.invalid("another logit than requested"));
                }
                out.logits.push((token, logit));
            }
        }
        Request::PrefixCount { ranks, .. } => {
            if reader.u32()? as usize != ranks.len() {
                return Err(reader.invalid("another number of ranks than requested"));
            }
            out.prefix_counts.resize(ranks.len(), 0);
            for total in &mut out.prefix_counts {
                let count = reader.u32()?;
                if count as usize > tokens.len() {
                    return Err(reader.invalid("more tokens than the shard has"));
                }
                *total += count;
            }
        }
    }
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::call::{begin_pass, encode_failure, pass_header};
    use crate::error::ShardError;
    use flash_sampling_core::params::Row;
    use flash_sampling_core::reference::{Reference, ReferenceVariant};
    use flash_sampling_core::{Head, LogitRank, Matrix, PerturbedArgmax, Plan, RowParams, Stage};

    const TOKENS: Range<u32> = 100..400;
    const DRAWN: [u32; 3] = [250, 7, 399];

    fn row() -> Row<'static> {
        let (weight, plan) = ([0.0f32; 400], Plan { max_draws: 2, ..Plan::default() });
        let head = Head::new(Matrix::new(&weight, 400, 1).unwrap()).unwrap();
        let can = Reference::new(head, plan, ReferenceVariant::Tiled).capabilities();
        let params = RowParams { seed: 3, draws: 2, top_p: 0.8, temperature: 0.7, ..RowParams::default() };
        params.check(&[], &can, &plan, 400).unwrap()
    }

    fn points() -> [PrefixMass; 2] {
        [(6.0, 398), (2.5, 399)].map(|(logit, token)| PrefixMass::new(LogitRank { logit, token }))
    }

    const RANKS: [LogitRank; 2] = [LogitRank { logit: 6.0, token: 250 }, LogitRank { logit: 2.5, token: 399 }];

    fn requests(points: &[PrefixMass]) -> [(usize, Request<'_>); 4] {
        [
            (1, Request::PrefixMass { points, below: f32::NEG_INFINITY }),
            (4, Request::List { floor: 9.0 }),
            (5, Request::Logits { tokens: &DRAWN, stage: Stage::Raw }),
            (7, Request::PrefixCount { ranks: &RANKS, stage: Stage::Transformed }),
        ]
    }

    fn summary(request: Request<'_>) -> RowSummary {
        let logits: Vec<f32> = TOKENS.map(|t| (t * 7919 % 97) as f32 / 8.0).collect();
        let mut summary = RowSummary::default();
        summary.of(&row(), request, TOKENS.start, &logits);
        summary.of_raw(&row(), request, TOKENS.start, &logits);
        summary
    }

    fn message(points: &[PrefixMass]) -> Vec<u8> {
        let (mut bytes, row) = (Vec::new(), row());
        begin_pass(&mut bytes, 3);
        for (r, request) in requests(points) {
            encode_row_of_pass(&mut bytes, r, Layout { row: &row, by_mass: false }, &request, &summary(request));
        }
        bytes
    }

    fn decode(bytes: &[u8], points: &[PrefixMass]) -> Result<Vec<RowSummary>, ShardError> {
        let (mut reader, row) = (Reader::new(bytes), row());
        pass_header(&mut reader, 1, 3)?;
        let mut all = Vec::new();
        for (r, request) in requests(points) {
            let (mut out, layout) = (RowSummary::default(), Layout { row: &row, by_mass: false });
            decode_row_of_pass(&mut reader, &TOKENS, r, layout, &request, &mut out)
                .map_err(|source| ShardError::Message { shard: 1, source })?
                .unwrap();
            out.merge_lists(usize::MAX);
            all.push(out);
        }
        reader.finish().map(|()| all).map_err(|source| ShardError::Message { shard: 1, source })
    }

    #[test]
    fn bytes_carry_what_a_pass_left() {
        let points = points();
        let bytes = message(&points);
        let (got, want) = (decode(&bytes, &points).unwrap(), requests(&points).map(|(_, request)| summary(request)));
        assert!(
            got[0].prefix_masses == want[0].prefix_masses
                && got[0].prefix_masses.iter().all(|before| before.mass() > 0)
        );
        assert!(got[1].list == want[1].list && !got[1].list.is_empty());
        assert!(got[2].logits == want[2].logits && got[2].logits.len() == 2);
        assert!(got[3].prefix_counts == want[3].prefix_counts && got[3].prefix_counts.iter().all(|&count| count > 0));
        // Another number of points than requested.
        assert!(decode(&bytes, &points[..1]).is_err());
        for end in 0..bytes.len() {
            assert!(decode(&bytes[..end], &points).is_err(), "{end} bytes");
        }
    }

    #[test]
    fn a_failure_keeps_its_words() {
        let mut bytes = Vec::new();
        encode_failure(&mut bytes, "out of memory");
        let error = decode(&bytes, &points()).unwrap_err();
        assert!(matches!(&error, ShardError::Failed { shard: 1, reason } if reason == "out of memory"));
    }
}
