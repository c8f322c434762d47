//! The state of rows with filters during a pass.
//!
//! The first pass collects the largest logits, the masses and, per draw, a [`Frontier`]; [`FilterResolver`] decides
//! from these. An open row takes another pass: it sums the mass before the few frontier points in doubt, lists the row
//! down to a floor, or repeats the first pass without a mass cutoff.
//!
//! [`FilterResolver`]: flash_sampling_core::backend::selection::FilterResolver

use crate::scan::logit_cache::CachedRow;
use crate::scan::mass_cutoff::MassCutoff;
use crate::scan::prefetch::prefetch;
use crate::scan::top_k_buffer::TopKBuffer;
use crate::simd::SPAN;
use flash_sampling_core::backend::selection::{FollowUp, PrefixMass, RowResult, SummarySpec};
use flash_sampling_core::backend::{Filters, Frontier, Moments, Row};

/// The purpose of a pass for one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PassKind {
    /// The summary of the row.
    Summary,
    /// The mass before the points in doubt, and the mass of all logits below `below`.
    PrefixMass { below: f32 },
    /// The numbers of tokens before ranks.
    PrefixCount,
    /// Every token with a logit of at least `floor`, in this list of the worker.
    List { floor: f32, slot: usize },
}

/// The reduced state of rows with top-p alone, which decides most of these rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListBudget {
    /// The length of a worker's list.
    pub(crate) list: usize,
    /// Whether rows have a mass cutoff.
    pub(crate) cutoff: bool,
    /// Whether the logits above the mass cutoff are cached.
    pub(crate) above: bool,
}

/// The state of a row with filters, except its masses.
#[derive(Clone, Debug, Default)]
pub(crate) struct FilterState {
    pub(crate) moments: Moments,
    pub(crate) largest: TopKBuffer,
    /// The largest logit so far.
    pub(crate) largest_logit: f32,
    /// The mass cutoff, and the mass below it.
    pub(crate) floor: MassCutoff,
    /// The row's cached logits.
    pub(crate) run: CachedRow,
    /// Whether bounds from other workers may prune tokens here. True if a filter drops tokens by the largest logit, or
    /// if the row may have a mass cutoff.
    pub(crate) follows: bool,
    /// One frontier per draw; none if the row is drawn from a list.
    pub(crate) frontiers: Vec<Frontier>,
    pub(crate) used: usize,
    /// The mass before the points in doubt.
    pub(crate) doubts: Vec<PrefixMass>,
    pub(crate) result: RowResult,
    /// The pass that the row needs; `None` if it is decided.
    pub(crate) follow_up: Option<FollowUp>,
    /// Whether the mass cutoff was too high, so that the row repeats the first pass without one.
    pub(crate) missed: bool,
}

impl FilterState {
    /// Resets the state for a row's first pass, and returns whether the row needs its masses.
    ///
    /// `short` allows a shorter list and a mass cutoff, for rows that usually need no more.
    pub(crate) fn begin(&mut self, row: &Row<'_>, filters: &Filters, short: Option<ListBudget>) -> bool {
        let spec = SummarySpec::of(row, filters);
        self.moments = filters.moments();
        self.largest_logit = f32::NEG_INFINITY;
        self.used = spec.frontiers;
        self.frontiers.resize_with(self.used.max(self.frontiers.len()), Frontier::default);
        self.frontiers.iter_mut().for_each(Frontier::clear);
        let prefix = short.filter(|_| spec.prefix);
        self.largest.begin(spec.list, prefix.map_or(spec.list, |short| short.list));
        self.floor.begin(prefix.filter(|short| short.cutoff).and_then(|_| filters.only_top_p()));
        self.run.begin(prefix.is_some_and(|short| short.above));
        self.follows = short.is_some() && (self.floor.may_rise() || filters.drop_threshold(0.0) > f32::NEG_INFINITY);
        self.doubts.clear();
        self.missed = false;
        self.result.begin();
        spec.mass
    }

    /// Prefetches the frontiers, before [`FilterState::prefetch_points`] reads them.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        prefetch(&self.frontiers[..self.used]);
    }

    /// Prefetches the first points of the frontiers, before a tile is added.
    #[inline(always)]
    pub(crate) fn prefetch_points(&self) {
        for frontier in &self.frontiers[..self.used] {
            let points = frontier.as_slice();
            prefetch(&points[..points.len().min(16)]);
        }
    }

    pub(crate) fn frontiers_mut(&mut self) -> &mut [Frontier] {
        &mut self.frontiers[..self.used]
    }

    pub(crate) fn frontiers(&self) -> &[Frontier] {
        &self.frontiers[..self.used]
    }

    /// Adds another worker's state of the first pass.
    pub(crate) fn merge(&mut self, other: &FilterState) {
        self.moments.merge(&other.moments);
        self.largest.merge(&other.largest);
        self.largest_logit = self.largest_logit.max(other.largest_logit);
        self.floor.tail.merge(&other.floor.tail);
        self.floor.holds(other.floor.lowest);
        self.frontiers_mut().iter_mut().zip(other.frontiers()).for_each(|(a, b)| a.merge(b));
    }

    /// Adds a tile, `top` its largest logit, to the mass before the points in doubt.
    #[inline(always)]
    pub(crate) fn add_prefix_mass(&mut self, first: u32, spans: &[[f32; SPAN]], top: f32) {
        PrefixMass::extend_all(&mut self.doubts, first, spans.as_flattened(), top);
    }

    /// Adds another worker's mass before the points in doubt.
    pub(crate) fn merge_prefix_mass(&mut self, other: &FilterState) {
        self.doubts.iter_mut().zip(&other.doubts).for_each(|(a, b)| a.merge(b));
    }
}
