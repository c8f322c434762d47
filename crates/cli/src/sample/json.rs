//! Rows as JSON, one object per line.

use super::row::{Drawn, KeptTokens, RowOutcome};
use serde::{Serialize, Serializer};
use std::io::{self, Write};

/// A row with draws.
#[derive(Serialize)]
struct Row<'a> {
    row: usize,
    tokens: &'a [u32],
    scores: &'a [f32],
    #[serde(rename = "logprobs", serialize_with = "logprobs")]
    drawn: &'a Drawn,
    log_z: f64,
    top: Vec<Top>,
    #[serde(skip_serializing_if = "<[u32]>::is_empty")]
    ranks: &'a [u32],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    given: Vec<Top>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<&'a KeptTokens>,
}

#[derive(Serialize)]
struct Top {
    token: u32,
    logprob: f64,
}

#[derive(Serialize)]
struct Failed<'a> {
    row: usize,
    error: &'a str,
}

/// Log-probabilities of the drawn tokens, computed during the output.
fn logprobs<S: Serializer>(drawn: &Drawn, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(drawn.logits.iter().map(|&logit| drawn.log_prob(logit)))
}

/// Writes one row as one line:
/// `{"row":0,"tokens":[..],"scores":[..],"logprobs":[..],"log_z":..,"top":[{"token":..,"logprob":..}]}`, with `--kept` also
/// `"kept":{"count":..,"log_mass":..,"tokens":[..]}`, and on request `"ranks":[..]` and `"given":[{"token":..,"logprob":..}]`.
/// A failed row is `{"row":0,"error":"..."}`.
pub(super) fn write_json(out: &mut dyn Write, row: usize, outcome: &RowOutcome) -> io::Result<()> {
    match outcome {
        Ok(drawn) => {
            let (tokens, scores, log_z, kept) = (&drawn.tokens, &drawn.scores, drawn.log_z, drawn.kept.as_ref());
            let with_logprob = |(token, logit)| Top { token, logprob: drawn.log_prob(logit) };
            let top = drawn.top.iter().copied().map(with_logprob).collect();
            let (ranks, given) = (&drawn.ranks, drawn.given.iter().copied().map(with_logprob).collect());
            serde_json::to_writer(&mut *out, &Row { row, tokens, scores, drawn, log_z, top, ranks, given, kept })?;
        }
        Err(error) => serde_json::to_writer(&mut *out, &Failed { row, error })?,
    }
    writeln!(out)
}
