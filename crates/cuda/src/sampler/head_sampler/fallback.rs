//! The draws that read the whole weight, although the head has a shadow.

use super::HeadSampler;
use super::kernels::HeadKernels;

impl HeadKernels {
    /// Whether draws of small calls read a shadow.
    pub(super) fn has_shadow(&self) -> bool {
        self.fused.has_shadow()
    }

    /// The draws of all complete launches that read the whole weight in spite of a shadow. Wraps around.
    pub(super) fn fallback_draws(&self) -> u32 {
        self.fused.fallback_rows().wrapping_add(self.draws_by_weight)
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
