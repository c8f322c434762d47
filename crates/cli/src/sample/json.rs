//! Rows as JSON, one object per line.

use super::row::{Drawn, RowOutcome};
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use std::io::{self, Write};

/// A row with draws.
struct Row<'a> {
    row: usize,
    drawn: &'a Drawn,
}

/// Log-probabilities of the drawn tokens, computed during the output.
struct LogProbs<'a>(&'a Drawn);

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

impl Serialize for LogProbs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.0.logits.len()))?;
        for &logit in &self.0.logits {
            seq.serialize_element(&self.0.log_prob(logit))?;
        }
        seq.end()
    }
}

impl Serialize for Row<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let drawn = self.drawn;
        let top = drawn.top.iter().map(|c| Top { token: c.winner.token, logprob: drawn.log_prob(c.logit) });
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("row", &self.row)?;
        map.serialize_entry("tokens", &drawn.tokens)?;
        map.serialize_entry("scores", &drawn.scores)?;
        map.serialize_entry("logprobs", &LogProbs(drawn))?;
        map.serialize_entry("log_z", &drawn.log_z)?;
        map.serialize_entry("top", &top.collect::<Vec<_>>())?;
        if let Some(kept) = &drawn.kept {
            map.serialize_entry("kept", kept)?;
        }
        map.end()
    }
}

/// Writes one row as one line:
/// `{"row":0,"tokens":[..],"scores":[..],"logprobs":[..],"log_z":..,"top":[{"token":..,"logprob":..}]}`, with `--kept` also
/// `"kept":{"count":..,"log_mass":..,"tokens":[..]}`. A failed row is `{"row":0,"error":"..."}`.
///
/// # Errors
/// Errors of `out`.
pub(super) fn write_json(out: &mut dyn Write, row: usize, outcome: &RowOutcome) -> io::Result<()> {
    match outcome {
        Ok(drawn) => serde_json::to_writer(&mut *out, &Row { row, drawn })?,
        Err(error) => serde_json::to_writer(&mut *out, &Failed { row, error: &error.to_string() })?,
    }
    writeln!(out)
}
