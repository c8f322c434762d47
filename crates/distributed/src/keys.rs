//! The exchange of keys: winners alone, one word a row and a few for the call, in one max all-reduce.
//!
//! ```text
//! word 0      1 = this rank needs the summaries: a row asks for more, is bad, or the whole call failed
//! word 1, 2   a digest of the call (rows, type, parameters) and its complement: their maxima tell whether all agree
//! word 3 + r  ordered bits of the winner of row r; 0 = this shard has none, or there is no such row
//! ```
//!
//! The number of words follows from the plan, not from the call: ranks that are called with different rows still reduce
//! words of equal number, and find out.

use crate::call::{Call, element};
use crate::error::ShardError;
use crate::rows::Checked;
use crate::summary::ShardSummary;
use crate::tiling::Whole;
use flash_sampling_core::digest::of_words;
use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, Domain, RowError, Samples, Winner};

const HEADER: usize = 3;

/// The words of a call; keeps its memory from call to call.
#[derive(Debug, Default)]
pub(crate) struct Keys {
    words: Vec<u64>,
    digest: u64,
}

impl Keys {
    /// Begins the words of a call.
    pub(crate) fn begin(&mut self, whole: &Whole, call: Call) {
        self.words.clear();
        self.words.resize(HEADER + whole.shards_plan.max_rows, 0);
        self.digest = of_words([call.rows as u64, u64::from(element(call.dtype)), call.digest]);
        (self.words[1], self.words[2]) = (self.digest, !self.digest);
    }

    /// This rank needs the summaries.
    pub(crate) fn ask_for_summaries(&mut self) {
        self.words[0] = 1;
    }

    /// Puts the answer for a row, or asks for the summaries where a word does not hold it.
    pub(crate) fn put(&mut self, r: usize, row: &Row<'_>, summary: &ShardSummary<'_>) {
        let is_plain =
            row.draws == 1 && !row.without_replacement && row.logprobs.is_none() && row.raw_logprobs.is_none();
        match summary {
            Ok(sample) if is_plain && sample.draws.len() == 1 => {
                let draw = sample.draws[0];
                self.words[HEADER + r] = Winner::new(draw.score, draw.token).to_ordered_bits();
            }
            Err(RowError::NoFiniteLogit) if is_plain => {}
            _ => self.ask_for_summaries(),
        }
    }

    /// What is reduced.
    pub(crate) fn words(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// After the reduction: the results, or nothing when the summaries must be gathered. Every rank finds the same.
    pub(crate) fn results(
        &self,
        whole: &Whole,
        rows: &[Checked<'_>],
        out: &mut Samples,
    ) -> Result<Option<()>, ShardError> {
        let is_agreed = self.words[1] == self.digest && !self.words[2] == self.digest;
        if self.words[0] != 0 || !is_agreed {
            return Ok(None);
        }
        out.clear();
        for (r, row) in rows.iter().enumerate() {
            let row = match row {
                Ok(row) => row,
                Err(error) => {
                    out.push_error(*error);
                    continue;
                }
            };
            let key = self.words[HEADER + r];
            if key == 0 {
                out.push_error(RowError::NoFiniteLogit);
                continue;
            }
            let winner = Winner::from_ordered_bits(key);
            if winner.token >= whole.shape.vocab_size || !winner.score.is_finite() {
                out.clear();
                return Err(ShardError::Winner { row: r });
            }
            out.push_row([candidate(row, winner)], None, &[]);
        }
        Ok(Some(()))
    }
}

/// The winner with a logit that is made of its score.
fn candidate(row: &Row<'_>, winner: Winner) -> Candidate {
    let noise = if row.greedy { 0.0 } else { row.noise.gumbel(Domain::Token, row.first_draw, winner.token) };
    Candidate { winner, logit: winner.score - noise }
}
