//! The summary of a row, as the selector reads it.

use super::TailMass;
use crate::summary::mass_histogram::MassHistogram;
use crate::summary::moments::Moments;
use crate::summary::winner::Candidate;

/// The summary of a row, as the selector reads it.
#[derive(Clone, Copy, Debug)]
pub struct RowView<'a> {
    /// The first tokens in the order of descending logits; not empty.
    pub list: &'a [Candidate],
    /// The list holds every token with a logit of at least `floor`; -inf if the list holds the whole row.
    pub floor: f32,
    /// The masses of the whole row, if the filters [need them](crate::backend::Filters::need_mass_beyond).
    pub mass: &'a MassHistogram,
    /// The mass that is in no bin, if the pass has a mass cutoff.
    pub tail: TailMass,
    /// The moments of the whole row, if the filters [need them](crate::backend::Filters::need_moments).
    pub moments: &'a Moments,
}

impl<'a> RowView<'a> {
    /// The view of a list of a row's first `limit` tokens. A shorter list holds the whole row.
    pub fn first(list: &'a [Candidate], limit: usize, mass: &'a MassHistogram, moments: &'a Moments) -> Self {
        let floor = match list.last() {
            Some(last) if list.len() >= limit => last.logit.next_up(),
            _ => f32::NEG_INFINITY,
        };
        RowView { list, floor, mass, tail: TailMass::default(), moments }
    }
}
