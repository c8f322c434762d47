//! The online variant over host memory (paper Alg. I.3): groups through the binary merge.

use crate::device::group_pass::check_group;
use crate::device::{Device, GroupRule, KernelChoice};
use crate::error::CudaError;
use crate::sampler::grouped::in_distribution;
use crate::sampler::impl_sampler::impl_sampler;
use crate::sampler::{CudaTiled, HeadSampler};
use flash_sampling_core::{Capabilities, Head, Plan, Variant};
use std::sync::Arc;

/// A sampler that merges groups of tokens in ascending order by coin flips, on a GPU, for inputs in host memory (paper
/// Alg. I.3). It is exact in distribution. Groups begin at absolute multiples of their size.
///
/// The GPU computes the groups' log-masses and samples in parallel, 24 bytes each. A prefix sum then yields the group
/// that replaces the sample last. [`CudaStreamed`](crate::CudaStreamed) instead keeps only the running summary between
/// blocks of a weight. Memory and log-probabilities are as in [`CudaTiled`].
#[derive(Debug)]
pub struct CudaOnline<'w>(HeadSampler<'w>);

impl<'w> CudaOnline<'w> {
    /// The capabilities of a sampler, without a head or a GPU. Canonical plans are unsupported.
    pub fn capabilities_of() -> Capabilities {
        in_distribution(Capabilities { variant: Variant::Online, ..CudaTiled::CAPABILITIES })
    }

    /// Plans a sampler with groups of `group` tokens: copies the weight, compiles and loads the kernels.
    ///
    /// # Errors
    /// * [`CudaError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CudaError::Unsupported`]: a canonical plan, since this variant is not pathwise.
    /// * Those of [`CudaTiled::new`].
    pub fn new(head: Head<'w>, plan: Plan, group: u32, device: &Arc<Device>) -> Result<Self, CudaError> {
        let can = CudaOnline::capabilities_of();
        let groups = Some((group, GroupRule::Online));
        check_group(group)?;
        Ok(CudaOnline(HeadSampler::new(head, plan, can, device, KernelChoice::default(), groups)?))
    }
}

impl_sampler!(CudaOnline);
