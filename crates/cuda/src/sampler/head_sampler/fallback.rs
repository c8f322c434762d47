//! The draws that read the whole weight, although the head has a shadow.

use super::HeadSampler;
use super::kernels::HeadKernels;
use crate::abi::RowFilters;
use crate::device::DeviceMatrix;
use crate::sampler::FilterSource;

impl HeadKernels {
    /// Whether draws of small calls read a shadow.
    pub(super) fn has_shadow(&self) -> bool {
        self.fused.has_shadow()
    }

    /// The draws of all complete launches that read the whole weight in spite of a shadow. Wraps around.
    pub(super) fn fallback_draws(&self) -> u32 {
        self.fused.fallback_rows().wrapping_add(self.draws_by_weight as u32)
    }

    /// Counts the draws of the next launch, if they cannot read the shadow. An exchange decides filters by the weight.
    pub(super) fn count_draws(
        &mut self,
        hidden: &DeviceMatrix,
        from: Option<FilterSource>,
        filters: &[RowFilters],
        has_exchange: bool,
    ) {
        let reads_shadow = match from {
            None => self.fused.uses_shadow(hidden),
            Some(FilterSource::Lists) if !has_exchange => {
                self.fused.lists_by_shadow(hidden, filters.iter().map(|filters| filters.top_k).max().unwrap_or(0))
            }
            Some(_) => false,
        };
        if self.has_shadow() && !reads_shadow {
            self.draws_by_weight = self.draws_by_weight.wrapping_add(hidden.rows);
        }
    }
}

impl HeadSampler<'_> {
    /// The draws of [`HeadKernels::fallback_draws`].
    pub(super) fn fallback_draws(&self) -> u32 {
        self.kernels.as_ref().map_or(0, HeadKernels::fallback_draws)
    }

    /// The rows of complete launches that a shadow did not decide: see
    /// [`DeviceTiled::fallback_rows`](crate::DeviceTiled::fallback_rows).
    pub(crate) fn fallback_rows(&self) -> u32 {
        self.kernels.as_ref().map_or(0, |kernels| kernels.fused.fallback_rows())
    }
}
