//! Runs of the order of falling logits.

use crate::winner::Place;

/// A run of the order of falling logits, both ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    /// The first place.
    pub first: Place,
    /// The last place.
    pub last: Place,
}

impl Band {
    /// Every token with a finite logit.
    pub const ALL: Band =
        Band { first: Place { logit: f32::INFINITY, token: 0 }, last: Place { logit: f32::MIN, token: u32::MAX } };

    /// Whether a token is in the band.
    #[inline(always)]
    pub fn contains(&self, place: Place) -> bool {
        self.first.reaches(&place) && place.reaches(&self.last)
    }
}
