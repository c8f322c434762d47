//! The result of a row with filters, stored until the results of a call are written in the order of the rows.

use crate::error::RowError;
use crate::sampler::samples::Samples;
use crate::summary::mass_histogram::MassHistogram;
use crate::summary::winner::Candidate;

/// The draws of a row, and the other results that it requests.
#[derive(Clone, Debug, Default)]
pub struct RowResult {
    /// `None`: not decided yet.
    pub outcome: Option<Result<(), RowError>>,
    /// The draws, in order.
    pub draws: Vec<Candidate>,
    /// The largest logits of kept tokens, on request.
    pub top: Vec<Candidate>,
    /// The mass of the kept tokens, on request.
    pub mass: Option<MassHistogram>,
    /// The logits of given tokens, on request; -inf for tokens that are not kept.
    pub token_logits: Vec<(u32, f32)>,
    /// The rank of each draw among the kept tokens, on request.
    pub ranks: Vec<u32>,
    /// Whether the row requests log-probabilities.
    pub has_logprobs: bool,
    /// Whether the row requests the kept tokens.
    pub has_kept: bool,
    /// The kept tokens as a bitmap.
    pub kept: Vec<u32>,
}

impl RowResult {
    /// Empties the result for a row.
    pub fn begin(&mut self) {
        self.outcome = None;
        self.draws.clear();
        self.top.clear();
        self.token_logits.clear();
        self.ranks.clear();
        (self.has_logprobs, self.has_kept) = (false, false);
        self.kept.clear();
    }

    /// Sets the mass of the kept tokens from the logits of the draw, and with `kept` their bitmap over `vocab_size`.
    pub fn keep(&mut self, tokens: impl Iterator<Item = (u32, f32)>, vocab_size: u32, kept: bool) {
        let mass = self.mass.get_or_insert_default();
        mass.clear();
        if kept {
            self.kept.resize(vocab_size.div_ceil(32) as usize, 0);
        }
        for (token, logit) in tokens {
            mass.push(logit);
            if kept {
                self.kept[(token >> 5) as usize] |= 1 << (token & 31);
            }
        }
    }

    /// Appends the result and the number of its passes to `out`, for a vocabulary of `vocab_size`.
    ///
    /// # Errors
    /// The error of the row; nothing is then appended.
    pub fn emit(&self, passes: u32, vocab_size: u32, out: &mut Samples) -> Result<(), RowError> {
        self.outcome.unwrap_or(Err(RowError::NoFiniteLogit))?;
        let mass = self.mass.as_ref().filter(|_| self.has_logprobs || self.has_kept);
        out.push_row(self.draws.iter().copied(), mass.filter(|_| self.has_logprobs), &self.top);
        out.set_tokens(out.len() - 1, self.token_logits.iter().copied(), self.ranks.iter().copied());
        if let (true, Some(mass)) = (self.has_kept, mass) {
            let bits =
                |(word, &bits): (u32, &u32)| (0..32).filter(move |i| bits >> i & 1 == 1).map(move |i| word * 32 + i);
            out.set_kept((0..).zip(&self.kept).flat_map(bits), mass.log_z(), vocab_size);
        }
        out.set_passes(passes);
        Ok(())
    }
}
