//! The results of a call.

use crate::error::RowError;
use crate::summary::mass_histogram::MassHistogram;
use crate::summary::winner::Candidate;

/// One drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Draw {
    /// Global token id.
    pub token: u32,
    /// Transformed logit plus noise (the logit alone for a greedy row), in nats.
    pub score: f32,
    /// Transformed logit, in nats.
    pub logit: f32,
}

impl Draw {
    /// A drawn token with its score and logit.
    pub const fn new(token: u32, score: f32, logit: f32) -> Self {
        Draw { token, score, logit }
    }
}

impl From<Candidate> for Draw {
    fn from(c: Candidate) -> Self {
        Draw::new(c.winner.token, c.winner.score, c.logit)
    }
}

/// The tokens that the filters of a row keep.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Kept<'a> {
    /// The number of kept tokens.
    pub count: u32,
    /// `ln sum e^l` over the transformed logits of the kept tokens, in nats.
    pub log_mass: f64,
    /// The kept tokens as a bitmap in the form of [`RowParams::mask`](crate::RowParams::mask). As the mask of a row
    /// without filters, the bitmap gives the same draws.
    pub tokens: &'a [u32],
}

/// The result of one row, borrowed from [`Samples`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RowSample<'a> {
    /// The requested draws, in the order of their numbers; without replacement, best score first.
    pub draws: &'a [Draw],
    /// `ln sum e^l` in nats, if the row requests log-probabilities. [`LogprobsMode`](crate::LogprobsMode) selects the
    /// transformed or the raw logits.
    pub log_z: Option<f64>,
    /// The tokens with the largest logits under `log_z` and these logits, largest first, if the row requests log-probabilities.
    /// [`RowSample::top_log_probs`] converts the logits to log-probabilities. The list is shorter than requested if fewer
    /// logits are finite.
    pub top: &'a [(u32, f32)],
    /// The raw logit of each draw, if the row requests raw log-probabilities; otherwise empty.
    pub raw_logits: &'a [f32],
    /// The rank of each draw in the law of `log_z`, if [requested](crate::RowParams::ranks); otherwise empty.
    ///
    /// The most probable token has rank 1. Of equal logits, the lower token comes first, so all ranks of a law differ.
    /// vLLM counts every equal logit before the drawn token, so its rank is larger for ties.
    pub ranks: &'a [u32],
    /// The tokens of [`RowParams::logprob_token_ids`](crate::RowParams::logprob_token_ids) and their logits, in order.
    /// The logits are raw or transformed as those of `log_z`; a token that cannot be drawn has -inf.
    /// [`RowSample::token_log_probs`] converts the logits to log-probabilities.
    pub token_logits: &'a [(u32, f32)],
    /// The tokens that the filters keep, if [requested](crate::RowParams::kept).
    pub kept: Option<Kept<'a>>,
    /// The number of passes over the row's logits. More than 1 if the summary of the first pass does not decide the
    /// row's filters. For rows with top-p alone, the number can depend on the threads and on earlier calls; the draw
    /// never does.
    pub passes: u32,
}

impl RowSample<'_> {
    /// The first (usually the only) drawn token: a global id.
    ///
    /// # Panics
    /// If the row has no draws. Every sampler makes at least one.
    pub fn token(&self) -> u32 {
        self.draws[0].token
    }

    /// The log-probability of draw number `draw`, in nats, in the law of `log_z`. `None` without `log_z`, or without
    /// such a draw.
    pub fn draw_log_prob(&self, draw: usize) -> Option<f64> {
        let logit = self.raw_logits.get(draw).copied().or(Some(self.draws.get(draw)?.logit))?;
        self.log_prob(logit)
    }

    /// The tokens of `top` with their log-probabilities in nats, most probable first.
    pub fn top_log_probs(&self) -> impl ExactSizeIterator<Item = (u32, f64)> {
        let log_z = self.log_z.unwrap_or(f64::NAN);
        self.top.iter().map(move |&(token, logit)| (token, log_prob(logit, log_z)))
    }

    /// The requested tokens with their log-probabilities in nats, in order; -inf for a token that cannot be drawn.
    pub fn token_log_probs(&self) -> impl ExactSizeIterator<Item = (u32, f64)> {
        let log_z = self.log_z.unwrap_or(f64::NAN);
        self.token_logits.iter().map(move |&(token, logit)| (token, log_prob(logit, log_z)))
    }

    /// The log-probability of a logit under `log_z`, in nats; `None` without `log_z`.
    pub fn log_prob(&self, logit: f32) -> Option<f64> {
        self.log_z.map(|log_z| log_prob(logit, log_z))
    }
}

/// The log-probability of a logit under `log_z`, in nats. The result is at most 0: log Z of a single token can round
/// below its logit.
pub fn log_prob(logit: f32, log_z: f64) -> f64 {
    let log_prob = f64::from(logit) - log_z;
    // A NaN stays NaN.
    if log_prob > 0.0 { 0.0 } else { log_prob }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    outcome: Result<(), RowError>,
    draws: (usize, usize),
    top: (usize, usize),
    raw_logits: (usize, usize),
    ranks: (usize, usize),
    token_logits: (usize, usize),
    log_z: Option<f64>,
    mass: Option<usize>,
    /// Count, log-mass, and range of the bitmap.
    kept: Option<(u32, f64, (usize, usize))>,
    passes: u32,
}

/// The results of a call, row by row. A reused value keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    slots: Vec<Slot>,
    draws: Vec<Draw>,
    top: Vec<(u32, f32)>,
    raw_logits: Vec<f32>,
    ranks: Vec<u32>,
    token_logits: Vec<(u32, f32)>,
    /// The first `used` masses belong to the current call.
    masses: Vec<MassHistogram>,
    used: usize,
    /// Bitmaps of kept tokens.
    kept: Vec<u32>,
    fallback_rows: usize,
}

impl Samples {
    /// No rows.
    pub fn new() -> Self {
        Samples::default()
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The result of a row. After a failed call, there are no rows.
    ///
    /// # Errors
    /// The reason why the row has no draw.
    ///
    /// # Panics
    /// If `row` is out of range.
    #[track_caller]
    pub fn row(&self, row: usize) -> Result<RowSample<'_>, RowError> {
        let Some(slot) = self.slots.get(row) else {
            panic!("row {row} is out of range: the last call has {} rows (0 if the call failed)", self.len())
        };
        slot.outcome?;
        Ok(RowSample {
            draws: &self.draws[slot.draws.0..slot.draws.1],
            log_z: slot.log_z,
            top: &self.top[slot.top.0..slot.top.1],
            raw_logits: &self.raw_logits[slot.raw_logits.0..slot.raw_logits.1],
            ranks: &self.ranks[slot.ranks.0..slot.ranks.1],
            token_logits: &self.token_logits[slot.token_logits.0..slot.token_logits.1],
            kept: slot.kept.map(|(count, log_mass, (from, to))| Kept { count, log_mass, tokens: &self.kept[from..to] }),
            passes: slot.passes,
        })
    }

    /// The number of rows whose draw read the whole weight, although the sampler has a shadow of the weight
    /// ([`Capabilities::shadow`](crate::Capabilities::shadow)). 0 without a shadow.
    ///
    /// * If a call cannot read the shadow, because of its size or because a row needs all logits, all its rows count. On a
    ///   GPU, rows with log-probabilities or with filters that need all logits may read the weight apart from the others.
    /// * On a CPU, all rows of a call count if more than half of its tiles of tokens needed all logits.
    /// * On a GPU, a row counts if the shadow did not decide its draw. If rows without filters have several draws, each
    ///   such draw counts as a row, up to the number of rows. If earlier calls that do not wait are still running on the
    ///   same sampler, their rows may count, too.
    ///
    /// In a group of ranks, each rank counts the rows of its own shard.
    pub fn fallback_rows(&self) -> usize {
        self.fallback_rows
    }

    /// The results of all rows.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Result<RowSample<'_>, RowError>> {
        (0..self.len()).map(|row| self.row(row))
    }

    /// For implementers: the masses of a row's log Z, which merge with the masses of other shards. `None` if the row has no
    /// log Z, or if its sampler is never a shard and returns log Z alone.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn mass(&self, row: usize) -> Option<&MassHistogram> {
        self.slots[row].mass.map(|at| &self.masses[at])
    }

    /// For implementers: removes all rows, and keeps the memory.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.draws.clear();
        self.top.clear();
        self.raw_logits.clear();
        self.ranks.clear();
        self.token_logits.clear();
        self.kept.clear();
        self.used = 0;
        self.fallback_rows = 0;
    }

    /// For implementers: sets the number of rows whose draw read the whole weight in spite of a shadow.
    pub fn set_fallback_rows(&mut self, rows: usize) {
        self.fallback_rows = rows;
    }

    /// For implementers: appends a row with an error.
    pub fn push_error(&mut self, error: RowError) {
        let none = (0, 0);
        self.slots.push(Slot {
            outcome: Err(error),
            draws: none,
            top: none,
            raw_logits: none,
            ranks: none,
            token_logits: none,
            log_z: None,
            mass: None,
            kept: None,
            passes: 0,
        });
    }

    /// For implementers: sets the number of passes of the row appended last.
    pub fn set_passes(&mut self, passes: u32) {
        if let Some(slot) = self.slots.last_mut() {
            slot.passes = passes;
        }
    }

    /// For implementers: sets log Z of the row appended last, if that row has no masses.
    pub fn set_log_z(&mut self, log_z: f64) {
        if let Some(slot) = self.slots.last_mut() {
            slot.log_z = Some(log_z);
        }
    }

    /// For implementers: sets the raw logit of each draw of the row appended last, if that row has no masses.
    pub fn set_raw_logits(&mut self, logits: impl IntoIterator<Item = f32>) {
        let Some(slot) = self.slots.last_mut() else { return };
        let from = self.raw_logits.len();
        self.raw_logits.extend(logits);
        slot.raw_logits = (from, self.raw_logits.len());
    }

    /// For implementers: sets the kept tokens of the row appended last, in a vocabulary of `vocab_size`.
    pub fn set_kept(&mut self, tokens: impl Iterator<Item = u32>, log_mass: f64, vocab_size: u32) {
        let Some(slot) = self.slots.last_mut() else { return };
        let from = self.kept.len();
        self.kept.resize(from + vocab_size.div_ceil(32) as usize, 0);
        let bitmap = &mut self.kept[from..];
        tokens.for_each(|token| bitmap[(token >> 5) as usize] |= 1 << (token & 31));
        let count = bitmap.iter().map(|word| word.count_ones()).sum();
        slot.kept = Some((count, log_mass, (from, self.kept.len())));
    }

    /// For implementers: sets the raw log-probabilities of a row, which must have no log-probabilities yet. Takes the
    /// masses of the raw logits, the largest raw logits, and the raw logit of each draw.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn set_raw(
        &mut self,
        row: usize,
        mass: &MassHistogram,
        top: &[Candidate],
        draws: impl IntoIterator<Item = f32>,
    ) {
        let (top_from, raw_from) = (self.top.len(), self.raw_logits.len());
        self.top.extend(top.iter().map(|c| (c.winner.token, c.logit)));
        self.raw_logits.extend(draws);
        let (top_to, raw_to, mass_at) = (self.top.len(), self.raw_logits.len(), self.keep(mass));
        let slot = &mut self.slots[row];
        (slot.top, slot.raw_logits) = ((top_from, top_to), (raw_from, raw_to));
        (slot.log_z, slot.mass) = (Some(mass.log_z()), Some(mass_at));
    }

    /// For implementers: sets the logits of a row's requested tokens, and the ranks of its draws.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn set_tokens(
        &mut self,
        row: usize,
        logits: impl IntoIterator<Item = (u32, f32)>,
        ranks: impl IntoIterator<Item = u32>,
    ) {
        let (logits_from, ranks_from) = (self.token_logits.len(), self.ranks.len());
        self.token_logits.extend(logits);
        self.ranks.extend(ranks);
        let slot = &mut self.slots[row];
        (slot.token_logits, slot.ranks) = ((logits_from, self.token_logits.len()), (ranks_from, self.ranks.len()));
    }

    /// Copies a mass, and returns the index of the copy.
    fn keep(&mut self, mass: &MassHistogram) -> usize {
        match self.masses.get_mut(self.used) {
            Some(slot) => slot.clone_from(mass),
            None => self.masses.push(mass.clone()),
        }
        self.used += 1;
        self.used - 1
    }

    /// For implementers: appends a row. With a `mass`, the row gets log Z and a copy of the mass.
    pub fn push_row(
        &mut self,
        draws: impl IntoIterator<Item = Candidate>,
        mass: Option<&MassHistogram>,
        top: &[Candidate],
    ) {
        let (draws_from, top_from) = (self.draws.len(), self.top.len());
        self.draws.extend(draws.into_iter().map(Draw::from));
        self.top.extend(top.iter().map(|c| (c.winner.token, c.logit)));
        let kept = mass.map(|mass| self.keep(mass));
        self.slots.push(Slot {
            outcome: Ok(()),
            draws: (draws_from, self.draws.len()),
            top: (top_from, self.top.len()),
            raw_logits: (0, 0),
            ranks: (0, 0),
            token_logits: (0, 0),
            log_z: mass.map(MassHistogram::log_z),
            mass: kept,
            kept: None,
            passes: 1,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{Reference, ReferenceVariant};
    use crate::{Head, Matrix, PerturbedArgmax, Plan, RowParams};

    #[test]
    #[should_panic(expected = "row 1 is out of range: the last call has 1 rows (0 if the call failed)")]
    fn a_row_out_of_range_is_named() {
        let mut samples = Samples::new();
        samples.push_error(RowError::NoFiniteLogit);
        let _ = samples.row(1);
    }

    #[test]
    fn the_only_token_of_a_row_has_log_probability_0() {
        let mut positive = 0;
        for i in 0..200 {
            let weight = [0.1 * i as f32 - 7.0, 1.0];
            let head = Head::new(Matrix::new(&weight, 2, 1).unwrap()).unwrap();
            let plan = Plan { max_logprobs: Some(1), ..Plan::default() };
            let mut samples = Samples::new();
            let row = RowParams { mask: Some(&[1]), logprobs: Some(1), ..RowParams::default() };
            let mut reference = Reference::new(head, plan, ReferenceVariant::Tiled);
            reference.sample(Matrix::new(&[1f32], 1, 1).unwrap(), &[row], &mut samples).unwrap();
            let row = samples.row(0).unwrap();
            let log_probs = [row.draw_log_prob(0).unwrap(), row.log_prob(row.top[0].1).unwrap()];
            assert!(log_probs.iter().all(|log_prob| (-1e-8..=0.0).contains(log_prob)), "{i}: {log_probs:?}");
            positive += usize::from(f64::from(row.draws[0].logit) > row.log_z.unwrap());
        }
        // The negative control: without the limit, some log-probabilities are positive.
        assert!(positive > 0);
        assert!(log_prob(0.0, f64::NAN).is_nan());
    }
}
