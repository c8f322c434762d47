//! The parallel-group variant over host memory (paper Alg. I.2).

use crate::device::group_pass::check_group;
use crate::device::{Device, GroupRule, KernelChoice};
use crate::error::CudaError;
use crate::sampler::impl_sampler::impl_sampler;
use crate::sampler::tiled::RAW_TOO;
use crate::sampler::{CudaTiled, HeadSampler};
use flash_sampling_core::{Capabilities, Exactness, Head, Plan, Variant};
use std::sync::Arc;

/// A sampler that draws from groups of tokens by their log-masses and local samples, on a GPU, for inputs in host
/// memory (paper Alg. I.2). It is exact in distribution. Groups begin at absolute multiples of their size.
///
/// Memory and log-probabilities are as in [`CudaTiled`].
#[derive(Debug)]
pub struct CudaGrouped<'w>(HeadSampler<'w>);

impl<'w> CudaGrouped<'w> {
    /// The capabilities of a sampler, without a head or a GPU. Canonical plans are unsupported.
    pub fn capabilities_of() -> Capabilities {
        in_distribution(Capabilities { variant: Variant::Grouped, ..CudaTiled::CAPABILITIES })
    }

    /// Plans a sampler with groups of `group` tokens: copies the weight, compiles and loads the kernels.
    ///
    /// # Errors
    /// * [`CudaError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CudaError::Unsupported`]: a canonical plan, since this variant is not pathwise.
    /// * Those of [`CudaTiled::new`].
    pub fn new(head: Head<'w>, plan: Plan, group: u32, device: &Arc<Device>) -> Result<Self, CudaError> {
        check_group(group)?;
        let (can, groups) = (CudaGrouped::capabilities_of(), Some((group, GroupRule::Fresh)));
        Ok(CudaGrouped(HeadSampler::new(head, plan, can, device, KernelChoice::default(), groups)?))
    }
}

/// Removes the capabilities that only pathwise samplers have.
pub(crate) fn in_distribution(can: Capabilities) -> Capabilities {
    let (exactness, knobs) = (Exactness::InDistribution, RAW_TOO);
    Capabilities { exactness, knobs, without_replacement: false, canonical: false, ..can }
}

impl_sampler!(CudaGrouped);
