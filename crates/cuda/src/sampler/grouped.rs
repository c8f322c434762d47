//! The parallel-group variant over host memory (paper Alg. I.2).

use crate::device::group_pass::check_group;
use crate::device::{Device, GroupRule, KernelChoice};
use crate::error::CudaError;
use crate::sampler::head_sampler::planned;
use crate::sampler::impl_sampler::impl_sampler;
use crate::sampler::tiled::RAW_TOO;
use crate::sampler::{CudaTiled, HeadSampler};
use flash_sampling_core::{Capabilities, Exactness, GroupDraw, Head, Plan, Variant};
use std::sync::Arc;

/// A sampler that draws from groups of tokens by their log-masses and local samples, on a GPU, for inputs in host
/// memory (paper Alg. I.2). Groups begin at absolute multiples of their size.
///
/// [`GroupDraw::Fresh`] is exact in distribution: [`DeviceGroups`](crate::DeviceGroups) with [`GroupRule::Fresh`]. With
/// [`GroupDraw::Reuse`] the best of the groups' maxima wins. This equals the tiled draw for all groups (paper section
/// D.3), so the fused tiled kernel makes the draw, with its tiles as groups.
///
/// Memory and log-probabilities are as in [`CudaTiled`].
#[derive(Debug)]
pub struct CudaGrouped<'w>(HeadSampler<'w>);

impl<'w> CudaGrouped<'w> {
    /// The capabilities for this plan, without a head or a GPU. [`GroupDraw::Fresh`] supports no canonical plans.
    pub fn capabilities_of(draw: GroupDraw, plan: &Plan) -> Capabilities {
        let can = Capabilities { variant: Variant::Grouped, ..CudaTiled::CAPABILITIES };
        match draw {
            GroupDraw::Reuse => planned(can, plan),
            GroupDraw::Fresh => in_distribution(can),
        }
    }

    /// Plans a sampler with groups of `group` tokens: copies the weight, compiles and loads the kernels.
    ///
    /// # Errors
    /// * [`CudaError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CudaError::Unsupported`]: a canonical plan with [`GroupDraw::Fresh`], which is not pathwise.
    /// * Those of [`CudaTiled::new`].
    pub fn new(
        head: Head<'w>,
        plan: Plan,
        group: u32,
        draw: GroupDraw,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        check_group(group)?;
        let can = CudaGrouped::capabilities_of(draw, &plan);
        let groups = (draw == GroupDraw::Fresh).then_some((group, GroupRule::Fresh));
        Ok(CudaGrouped(HeadSampler::new(head, plan, can, device, KernelChoice::default(), groups)?))
    }
}

/// Removes the capabilities that only pathwise samplers have.
pub(crate) fn in_distribution(can: Capabilities) -> Capabilities {
    let (exactness, knobs) = (Exactness::InDistribution, RAW_TOO);
    Capabilities { exactness, knobs, without_replacement: false, canonical: false, ..can }
}

impl_sampler!(CudaGrouped);
