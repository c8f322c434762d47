//! Builds samplers from configurations.

use crate::config::{Backend, BackendConfig, VariantConfig};
use crate::owned::build_with_shadow;
use flash_sampling_core::reference::{Reference, ReferenceVariant};
use flash_sampling_core::{Capabilities, Head, Matrix, PerturbedArgmax, Plan, bf16};
#[cfg(feature = "cpu")]
use flash_sampling_cpu::{Grouped, Online, Standalone, Tiled};
#[cfg(feature = "cuda")]
use flash_sampling_cuda::{CudaGrouped, CudaOnline, CudaStandalone, CudaTiled, Device, DeviceShadow};
#[cfg(feature = "distributed")]
use {
    core::ops::Range,
    flash_sampling_distributed::{ShardMerge, ShardOptions, ShardSampler, Sharded, Transport},
};

/// The largest number of shards that [`build`] cuts a head into.
pub const MAX_SHARDS: usize = 4096;

/// Shards begin at multiples of this number of tokens, so no tile is cut.
#[cfg(feature = "distributed")]
const SHARD_ALIGNMENT: u32 = 64;

/// The reason why a configuration has no sampler.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The backend does not have the variant.
    #[error("the {backend} backend cannot do the {variant} variant")]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// The variant.
        variant: &'static str,
    },
    /// The sampler would not use a shadow.
    #[error(
        "{variant} on {backend} uses no shadow: it must be tiled or sharded:SHARDS, and a GPU needs a head in bf16 \
         or f16 without a soft-cap"
    )]
    Shadow {
        /// The configured backend.
        backend: String,
        /// The configured variant.
        variant: String,
    },
    /// The weight does not fit the head.
    #[error(transparent)]
    Head(#[from] flash_sampling_core::HeadError),
    /// Only the tiled variant samples existing logits.
    #[error("existing logits cannot be sampled by {variant}: the variant must be tiled")]
    VariantOfLogits {
        /// The configured variant.
        variant: VariantConfig,
    },
    /// The library is built without a feature.
    #[error("this build has no feature '{feature}': build with --features {feature}")]
    NotBuilt {
        /// The feature.
        feature: &'static str,
    },
    /// The group size is 0.
    #[error("a group must have at least one token")]
    GroupSize,
    /// The number of shards is 0 or too large.
    #[error("{shards} shards cannot be made: it must be 1 to {MAX_SHARDS}")]
    Shards {
        /// The requested number.
        shards: usize,
    },
    /// The CPU backend refuses the head or the plan.
    #[cfg(feature = "cpu")]
    #[error(transparent)]
    Cpu(#[from] flash_sampling_cpu::CpuError),
    /// The CUDA backend refuses the head or the plan, or fails.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] flash_sampling_cuda::CudaError),
    /// The shards do not match.
    #[cfg(feature = "distributed")]
    #[error(transparent)]
    Shard(#[from] flash_sampling_distributed::ShardError),
}

/// Builds the sampler of a configuration, for a head with weight `[vocab, hidden]`.
///
/// # Errors
/// [`BuildError`] if the backend is missing, does not support the variant, or refuses the plan.
pub fn build<'w>(head: Head<'w>, config: &BackendConfig) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
    let plan = config.plan;
    if config.shadow {
        check_shadow(&head, config)?;
        if head.shadow().is_none() {
            return build_with_shadow(head, config);
        }
    }
    Ok(match (&config.backend, &config.variant) {
        #[cfg(feature = "distributed")]
        (_, VariantConfig::Sharded { shards, merge }) => sharded(head, config, *shards, *merge)?,
        (Backend::Reference, VariantConfig::Tiled) => Box::new(Reference::new(head, plan, ReferenceVariant::Tiled)),
        (Backend::Reference, VariantConfig::Online { size }) => {
            Box::new(Reference::new(head, plan, ReferenceVariant::Online(positive(*size)?)))
        }
        (Backend::Reference, VariantConfig::Grouped { size }) => {
            Box::new(Reference::new(head, plan, ReferenceVariant::Grouped(positive(*size)?)))
        }
        #[cfg(feature = "cpu")]
        (Backend::Cpu(options), VariantConfig::Tiled) => Box::new(Tiled::new(head, plan, options)?),
        #[cfg(feature = "cpu")]
        (Backend::Cpu(options), VariantConfig::Grouped { size }) => Box::new(Grouped::new(head, plan, *size, options)?),
        #[cfg(feature = "cpu")]
        (Backend::Cpu(options), VariantConfig::Online { size }) => Box::new(Online::new(head, plan, *size, options)?),
        #[cfg(feature = "cuda")]
        (Backend::Cuda { device }, VariantConfig::Tiled) => {
            Box::new(CudaTiled::new(head, plan, &Device::new(*device)?)?)
        }
        #[cfg(feature = "cuda")]
        (Backend::Cuda { device }, VariantConfig::Grouped { size }) => {
            Box::new(CudaGrouped::new(head, plan, *size, &Device::new(*device)?)?)
        }
        #[cfg(feature = "cuda")]
        (Backend::Cuda { device }, VariantConfig::Online { size }) => {
            Box::new(CudaOnline::new(head, plan, *size, &Device::new(*device)?)?)
        }
        #[cfg(not(feature = "cuda"))]
        (Backend::Cuda { .. }, _) => return Err(BuildError::NotBuilt { feature: "cuda" }),
    })
}

/// Refuses a shadow for samplers that would not use it.
fn check_shadow(head: &Head<'_>, config: &BackendConfig) -> Result<(), BuildError> {
    let is_pathwise = match &config.variant {
        VariantConfig::Tiled => true,
        VariantConfig::Grouped { .. } | VariantConfig::Online { .. } => false,
        #[cfg(feature = "distributed")]
        VariantConfig::Sharded { merge, .. } => *merge == ShardMerge::Winners,
    };
    let serves = match config.backend {
        Backend::Reference => true,
        #[cfg(feature = "cpu")]
        Backend::Cpu(_) => true,
        #[cfg(feature = "cuda")]
        Backend::Cuda { device } => DeviceShadow::serves(head, &*Device::new(device)?),
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda { .. } => true, // refused as a missing feature
    };
    let _ = head; // unused without CUDA
    if is_pathwise && serves {
        return Ok(());
    }
    Err(BuildError::Shadow { backend: config.backend.to_string(), variant: config.variant.to_string() })
}

/// The capabilities of a configuration's sampler, without a head.
///
/// An engine can use them to refuse a request early, or to choose another variant. [`Capabilities::backend`] names the
/// instruction set for a bf16 weight. [`Capabilities::shadow`] is that of a head whose weight can have a shadow.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use flash_sampling::{BackendConfig, Knob, VariantConfig, capabilities_of};
///
/// let online = BackendConfig { variant: VariantConfig::Online { size: 512 }, ..BackendConfig::default() };
/// assert!(capabilities_of(&BackendConfig::default())?.knobs.contains(Knob::TopP));
/// assert!(!capabilities_of(&online)?.knobs.contains(Knob::TopP));
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The errors of [`build`] that do not depend on the head.
pub fn capabilities_of(config: &BackendConfig) -> Result<Capabilities, BuildError> {
    match (&config.backend, &config.variant) {
        #[cfg(feature = "cuda")]
        (Backend::Cuda { .. }, VariantConfig::Tiled) => {
            let can = CudaTiled::capabilities_of(&config.plan);
            Ok(Capabilities { shadow: config.shadow && !config.plan.canonical, ..can })
        }
        #[cfg(feature = "cuda")]
        (Backend::Cuda { .. }, VariantConfig::Grouped { .. }) => Ok(CudaGrouped::capabilities_of()),
        #[cfg(feature = "cuda")]
        (Backend::Cuda { .. }, VariantConfig::Online { .. }) => Ok(CudaOnline::capabilities_of()),
        #[cfg(all(feature = "cuda", feature = "distributed"))]
        (Backend::Cuda { .. }, VariantConfig::Sharded { merge, .. }) => {
            let backend = Backend::Reference;
            let of_reference = capabilities_of(&BackendConfig { backend, ..config.clone() })?;
            let of_shard = CudaTiled::capabilities_of(&shard_plan(*merge, config.plan));
            let knobs = of_reference.knobs.intersection(of_shard.knobs);
            let shadow = of_reference.shadow && !config.plan.canonical;
            Ok(Capabilities { backend: of_shard.backend, knobs, shadow, ..of_reference })
        }
        _ => {
            let (weight, plan) = ([bf16::ZERO; 64], Plan { max_rows: config.plan.max_rows.min(1), ..config.plan });
            let head = Head::new(Matrix::new(&weight, 64, 1)?)?;
            if config.shadow {
                check_shadow(&head, config)?;
            }
            // The threads that make a shadow would be those of rayon's global pool.
            let can = build(head, &BackendConfig { plan, shadow: false, ..config.clone() })?.capabilities();
            Ok(Capabilities { shadow: config.shadow, ..can })
        }
    }
}

/// Builds a sampler for existing logits.
///
/// The input of its calls is `[rows, vocab_size]` in bf16, f16 or f32. The variant must be [`VariantConfig::Tiled`].
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use flash_sampling::{BackendConfig, Matrix, RowParams, Samples, build_from_logits};
///
/// let mut sampler = build_from_logits(1000, &BackendConfig::default())?;
/// let logits: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.7).sin()).collect();
/// let mut samples = Samples::new();
/// sampler.sample(Matrix::new(&logits, 1, 1000)?, &[RowParams { seed: 42, ..RowParams::default() }], &mut samples)?;
/// assert!(samples.row(0)?.token() < 1000);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`BuildError`] if the backend is missing, cannot sample existing logits, or refuses the plan.
pub fn build_from_logits(vocab_size: usize, config: &BackendConfig) -> Result<Box<dyn PerturbedArgmax>, BuildError> {
    // Unused without a backend.
    let _ = vocab_size;
    if config.variant != VariantConfig::Tiled {
        return Err(BuildError::VariantOfLogits { variant: config.variant.clone() });
    }
    match &config.backend {
        Backend::Reference => Err(BuildError::Unsupported { backend: "reference", variant: "existing-logits" }),
        #[cfg(feature = "cpu")]
        Backend::Cpu(options) => Ok(Box::new(Standalone::new(vocab_size, config.plan, options)?)),
        #[cfg(feature = "cuda")]
        Backend::Cuda { device } => Ok(Box::new(CudaStandalone::new(vocab_size, config.plan, &Device::new(*device)?)?)),
        #[cfg(not(feature = "cuda"))]
        Backend::Cuda { .. } => Err(BuildError::NotBuilt { feature: "cuda" }),
    }
}

/// Checks a group size for the reference, which supports every size except 0.
fn positive(size: u32) -> Result<u32, BuildError> {
    if size > 0 { Ok(size) } else { Err(BuildError::GroupSize) }
}

/// Builds shards of the head in this process, each with the tiled variant of the same backend.
#[cfg(feature = "distributed")]
fn sharded<'w>(
    head: Head<'w>,
    config: &BackendConfig,
    shards: usize,
    merge: ShardMerge,
) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
    if !(1..=MAX_SHARDS).contains(&shards) {
        return Err(BuildError::Shards { shards });
    }
    let plan = shard_plan(merge, config.plan);
    let of_shard =
        BackendConfig { backend: config.backend.clone(), variant: VariantConfig::Tiled, plan, shadow: false };
    let parts = head.split(&shard_starts(head.tokens(), shards)).into_iter().map(|part| build(part, &of_shard));
    Ok(Box::new(Sharded::new(parts.collect::<Result<_, _>>()?, merge)?.with_plan(config.plan)?))
}

/// Builds one rank of a sharded sampler.
///
/// The head is cut into near-equal shards, one per rank of the transport. This rank draws from its shard by the
/// configured variant. This is a collective call: every rank passes the whole head, and reads only its shard.
///
/// # Errors
/// The errors of [`build`]; [`BuildError::Unsupported`] for the sharded variant, whose shards are in one process;
/// [`BuildError::Shard`] if ranks disagree or an exchange fails.
#[cfg(feature = "distributed")]
pub fn build_rank<'w, T: Transport + 'w>(
    head: Head<'w>,
    config: &BackendConfig,
    transport: T,
    options: ShardOptions,
) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
    let (rank, shards) = (transport.rank(), transport.world());
    if !(1..=MAX_SHARDS).contains(&shards) {
        return Err(BuildError::Shards { shards });
    }
    if matches!(config.variant, VariantConfig::Sharded { .. }) {
        return Err(BuildError::Unsupported { backend: "distributed", variant: "sharded (in one process)" });
    }
    let plan = shard_plan(options.merge, config.plan);
    let of_shard = BackendConfig { plan, ..config.clone() };
    let part = head.split(&shard_starts(head.tokens(), shards)).swap_remove(rank);
    let options = options.of_head(&head);
    Ok(Box::new(ShardSampler::new(build(part, &of_shard)?, transport, options)?.with_plan(config.plan)?))
}

/// The plan of a shard. The merge by log-mass needs each shard's log-mass, even if no row requests log-probabilities.
#[cfg(feature = "distributed")]
fn shard_plan(merge: ShardMerge, plan: Plan) -> Plan {
    match merge {
        ShardMerge::Winners => plan,
        ShardMerge::LogMass => Plan { max_logprobs: plan.max_logprobs.or(Some(0)), ..plan },
    }
}

/// The first tokens of near-equal shards, at multiples of [`SHARD_ALIGNMENT`]. A small vocabulary has empty shards.
#[cfg(feature = "distributed")]
pub(crate) fn shard_starts(tokens: Range<u32>, shards: usize) -> Vec<u32> {
    let start = |shard: u64| {
        let cut = u64::from(tokens.start) + tokens.len() as u64 * shard / shards as u64;
        (cut as u32 / SHARD_ALIGNMENT * SHARD_ALIGNMENT).max(tokens.start)
    };
    (0..shards as u64).map(start).collect()
}

#[cfg(all(test, feature = "distributed"))]
mod tests {
    use super::*;

    #[test]
    fn shards_are_near_equal_and_aligned() {
        assert_eq!(shard_starts(0..151_936, 4), [0, 37_952, 75_968, 113_920]);
        assert_eq!(shard_starts(0..100, 4), [0, 0, 0, 64]);
        assert_eq!(shard_starts(70..300, 2), [70, 128]);
        assert_eq!(shard_starts(0..0, 3), [0, 0, 0]);
        for shards in [1, 3, 7, 100] {
            let starts = shard_starts(0..256_000, shards);
            let sizes = starts.windows(2).map(|w| w[1] - w[0]);
            assert!(sizes.into_iter().all(|s| s.abs_diff(256_000 / shards as u32) <= 2 * SHARD_ALIGNMENT));
        }
    }
}
