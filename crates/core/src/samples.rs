//! The results of a call.

use crate::error::RowError;
use crate::mass_histogram::MassHistogram;
use crate::winner::Candidate;

/// One drawn token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Global token id.
    pub token: u32,
    /// Transformed logit plus noise (the logit alone for a greedy row), in nats.
    pub score: f32,
    /// Transformed logit, in nats.
    pub logit: f32,
}

impl From<Candidate> for Draw {
    fn from(c: Candidate) -> Self {
        Draw { token: c.winner.token, score: c.winner.score, logit: c.logit }
    }
}

/// The result of one row, borrowed from [`Samples`].
#[derive(Clone, Copy, Debug)]
pub struct RowSample<'a> {
    /// The draws, in order; without replacement: best score first.
    pub draws: &'a [Draw],
    /// `ln sum e^l` over the transformed logits, when log-probabilities were asked for.
    pub log_z: Option<f64>,
    /// The largest transformed logits, largest first, when asked for.
    pub top: &'a [Candidate],
    /// The masses behind `log_z`, to be merged with those of other shards.
    pub mass: Option<&'a MassHistogram>,
}

impl RowSample<'_> {
    /// The first (usually the only) drawn token.
    pub fn token(&self) -> u32 {
        self.draws[0].token
    }

    /// The log-probability of a transformed logit, in nats; `None` when log Z was not asked for.
    pub fn log_prob(&self, logit: f32) -> Option<f64> {
        self.log_z.map(|z| f64::from(logit) - z)
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    outcome: Result<(), RowError>,
    draws: (usize, usize),
    top: (usize, usize),
    log_z: Option<f64>,
    mass: Option<usize>,
}

/// The results of a call, row by row. Reusing one keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    slots: Vec<Slot>,
    draws: Vec<Draw>,
    top: Vec<Candidate>,
    /// The first `used` are of this call.
    masses: Vec<MassHistogram>,
    used: usize,
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

    /// The result of a row; panics when it is out of range, like a slice.
    ///
    /// # Errors
    /// Why the row has none.
    pub fn row(&self, row: usize) -> Result<RowSample<'_>, RowError> {
        let slot = &self.slots[row];
        slot.outcome?;
        Ok(RowSample {
            draws: &self.draws[slot.draws.0..slot.draws.1],
            log_z: slot.log_z,
            top: &self.top[slot.top.0..slot.top.1],
            mass: slot.mass.map(|i| &self.masses[i]),
        })
    }

    /// The results of all rows.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Result<RowSample<'_>, RowError>> {
        (0..self.len()).map(|row| self.row(row))
    }

    /// For implementers: empties the results; keeps the memory.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.draws.clear();
        self.top.clear();
        self.used = 0;
    }

    /// For implementers: appends a row that failed.
    pub fn push_error(&mut self, error: RowError) {
        self.slots.push(Slot { outcome: Err(error), draws: (0, 0), top: (0, 0), log_z: None, mass: None });
    }

    /// For implementers: appends a row. With a `mass` the row gets log Z and keeps a copy of the mass.
    pub fn push_row(
        &mut self,
        draws: impl IntoIterator<Item = Candidate>,
        mass: Option<&MassHistogram>,
        top: &[Candidate],
    ) {
        let (draws_from, top_from) = (self.draws.len(), self.top.len());
        self.draws.extend(draws.into_iter().map(Draw::from));
        self.top.extend_from_slice(top);
        let kept = mass.map(|mass| {
            match self.masses.get_mut(self.used) {
                Some(slot) => slot.clone_from(mass),
                None => self.masses.push(mass.clone()),
            }
            self.used += 1;
            self.used - 1
        });
        self.slots.push(Slot {
            outcome: Ok(()),
            draws: (draws_from, self.draws.len()),
            top: (top_from, self.top.len()),
            log_z: mass.map(MassHistogram::log_z),
            mass: kept,
        });
    }
}
