//! What a pass leaves of a row.

use super::TailMass;
use crate::summary::mass_histogram::MassHistogram;
use crate::summary::moments::Moments;
use crate::summary::winner::Candidate;

/// What is known of a row.
#[derive(Clone, Copy, Debug)]
pub struct RowView<'a> {
    /// The first tokens in the order of falling logits; not empty.
    pub list: &'a [Candidate],
    /// Every token with a logit of at least this is in the list; -inf when the list holds the whole row.
    pub floor: f32,
    /// The masses of the whole row, where [`need_mass`](crate::Filters::need_mass).
    pub mass: &'a MassHistogram,
    /// What of the mass is in no bin, where a pass kept the sum alone.
    pub tail: TailMass,
    /// The moments of the whole row, where [`need_moments`](crate::Filters::need_moments).
    pub moments: &'a Moments,
}

impl<'a> RowView<'a> {
    /// The list of a row's first `limit` tokens: it holds the whole row when it is shorter than that.
    pub fn first(list: &'a [Candidate], limit: usize, mass: &'a MassHistogram, moments: &'a Moments) -> Self {
        let floor = match list.last() {
            Some(last) if list.len() >= limit => last.logit.next_up(),
            _ => f32::NEG_INFINITY,
        };
        RowView { list, floor, mass, tail: TailMass::default(), moments }
    }
}
