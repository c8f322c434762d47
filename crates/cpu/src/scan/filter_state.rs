//! What a pass keeps of rows with filters.
//!
//! The first pass leaves the largest logits, the masses and, per draw, a [`Frontier`]; [`FilterResolver`] decides from these. A
//! row that they do not decide takes another pass: one that sums the mass before the few points of the frontier that are in
//! doubt, one that lists the row down to a floor, or the first one again, without a mass cutoff.
//!
//! [`FilterResolver`]: flash_sampling_core::backend::selection::FilterResolver

use crate::scan::logit_cache::CachedRow;
use crate::scan::mass_cutoff::MassCutoff;
use crate::scan::prefetch::prefetch;
use crate::scan::top_k_buffer::TopKBuffer;
use crate::simd::SPAN;
use flash_sampling_core::backend::selection::{FollowUp, PrefixMass, RowResult, SummarySpec};
use flash_sampling_core::params::Row;
use flash_sampling_core::{Filters, Frontier, Moments};

/// What a row takes part in a pass for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PassKind {
    /// Everything that it asks for.
    Summary,
    /// The mass before the points in doubt, and that of all logits below `below`.
    PrefixMass { below: f32 },
    /// Every token with a logit of at least `floor`, in this list of the worker.
    List { floor: f32, slot: usize },
}

/// What the first pass of rows with top-p alone may spare, as a rule that decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ListBudget {
    /// How long the list of a worker is.
    pub(crate) list: usize,
    /// Whether the logits above the floor are kept.
    pub(crate) above: bool,
}

/// What a row with filters keeps of a pass, beside its masses.
#[derive(Clone, Debug, Default)]
pub(crate) struct FilterState {
    pub(crate) moments: Moments,
    pub(crate) largest: TopKBuffer,
    /// The largest logit so far.
    pub(crate) largest_logit: f32,
    /// The mass that is in no bin.
    pub(crate) floor: MassCutoff,
    /// The logits that are in bins.
    pub(crate) run: CachedRow,
    /// Whether what other workers have seen may spare this one work: their logits say that tokens are dropped here, or the
    /// row has a floor.
    pub(crate) follows: bool,
    /// One a draw; none where the row is drawn from a list.
    pub(crate) frontiers: Vec<Frontier>,
    pub(crate) used: usize,
    /// The mass before the points in doubt.
    pub(crate) doubts: Vec<PrefixMass>,
    pub(crate) result: RowResult,
    /// What it takes to answer it, where that is not decided.
    pub(crate) follow_up: Option<FollowUp>,
    /// Whether its floor was too high, so that the first pass is done again without one.
    pub(crate) missed: bool,
}

impl FilterState {
    /// Empties it for a row's first pass; whether the row needs its masses. `short`: its list may be shorter, and masses have a
    /// floor, in rows where that decides as a rule.
    pub(crate) fn begin(&mut self, row: &Row<'_>, filters: &Filters, short: Option<ListBudget>) -> bool {
        let spec = SummarySpec::of(row, filters);
        self.moments = filters.moments();
        self.largest_logit = f32::NEG_INFINITY;
        self.used = spec.frontiers;
        self.frontiers.resize_with(self.used.max(self.frontiers.len()), Frontier::default);
        self.frontiers.iter_mut().for_each(Frontier::clear);
        let prefix = short.filter(|_| spec.prefix);
        self.largest.begin(spec.list, prefix.map_or(spec.list, |short| short.list));
        self.floor.begin(prefix.and_then(|_| filters.lone_top_p()));
        self.run.begin(prefix.is_some_and(|short| short.above));
        self.follows = short.is_some() && (self.floor.may_rise() || filters.hopeless(0.0) > f32::NEG_INFINITY);
        self.doubts.clear();
        self.missed = false;
        self.result.begin();
        spec.mass
    }

    /// Fetches the frontiers, before [`FilterState::prefetch_points`] looks into them.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        prefetch(&self.frontiers[..self.used]);
    }

    /// Fetches the first points of the frontiers, before a tile is added.
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

    fn frontiers(&self) -> &[Frontier] {
        &self.frontiers[..self.used]
    }

    /// Adds what another worker has seen in the first pass.
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
    pub(crate) fn add_before(&mut self, first: u32, spans: &[[f32; SPAN]], top: f32) {
        PrefixMass::extend_all(&mut self.doubts, first, spans.as_flattened(), top);
    }

    /// Adds the mass that another worker has seen before the points in doubt.
    pub(crate) fn merge_before(&mut self, other: &FilterState) {
        self.doubts.iter_mut().zip(&other.doubts).for_each(|(a, b)| a.merge(b));
    }
}
