//! The mass before one token, in its own bin: what the histogram cannot tell.

use crate::mass_histogram::{MassHistogram, edge_of};
use crate::winner::Place;

/// How much of the mass of a token's bin comes before it in the order of falling logits. Sums of integers, so that parts
/// of a row may be added in any order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Before {
    /// The token.
    pub place: Place,
    /// In units of the histogram.
    pub(super) mass: u64,
}

impl Before {
    /// Nothing seen yet.
    pub fn new(place: Place) -> Self {
        Before { place, mass: 0 }
    }

    /// What another part of the row has seen: a mass of [`Before::mass`].
    pub fn with_mass(place: Place, mass: u64) -> Self {
        Before { place, mass }
    }

    /// The mass seen so far, in units of the histogram.
    pub fn mass(&self) -> u64 {
        self.mass
    }

    /// Adds the tokens `first ..` with these logits.
    pub fn extend_from_slice(&mut self, first: u32, logits: &[f32]) {
        let edge = edge_of(self.place.logit);
        for (token, &logit) in (first..).zip(logits) {
            let place = Place { logit, token };
            if logit >= self.place.logit && token != self.place.token && place.reaches(&self.place) {
                let (own, mass) = MassHistogram::mass_of(logit);
                self.mass += if own == edge { mass } else { 0 };
            }
        }
    }

    /// Adds what was seen of other tokens, for the same place.
    pub fn merge(&mut self, other: &Before) {
        self.mass += other.mass;
    }
}
