//! The sampler that the flags of backend and variant choose, and the flags that it does not support.

use crate::args::SamplerArgs;
use crate::args::values::flag;
use crate::error::CommandError;
use flash_sampling::cpu::CpuError;
use flash_sampling::{
    BuildError, Capabilities, Head, Knob, Knobs, PerturbedArgmax, Plan, RowParams, ShardError, VariantConfig,
    build as build_config, capabilities_of,
};

/// A build error with the flag that caused it.
pub(crate) fn named(error: BuildError) -> CommandError {
    match &error {
        BuildError::Shard(ShardError::NotPathwise { .. }) => {
            CommandError::usage(format!("{error}; use --variant tiled"))
        }
        BuildError::Cpu(CpuError::IsaUnavailable { .. } | CpuError::ThreadCount { .. }) => {
            CommandError::usage(format!("--backend: {error}"))
        }
        BuildError::Cpu(CpuError::Unsupported { knob: Knob::Canonical }) => not_canonical(),
        #[cfg(feature = "cuda")]
        BuildError::Cuda(flash_sampling::cuda::CudaError::Unsupported { knob: Knob::Canonical }) => not_canonical(),
        _ => error.into(),
    }
}

/// Only samplers that are exact in distribution refuse a canonical plan.
fn not_canonical() -> CommandError {
    CommandError::usage("--canonical is not supported with this variant; use --variant tiled")
}

/// Builds the sampler.
pub fn build<'w>(
    head: Head<'w>,
    args: &SamplerArgs,
    plan: Plan,
) -> Result<Box<dyn PerturbedArgmax + 'w>, CommandError> {
    build_config(head, &args.config(plan)).map_err(named)
}

/// What the sampler of the flags supports, known before a head is read.
#[derive(Debug)]
pub(crate) struct Support<'a> {
    args: &'a SamplerArgs,
    canonical: bool,
    can: Capabilities,
}

impl<'a> Support<'a> {
    /// # Errors
    /// [`CommandError::Build`] or [`CommandError::Usage`]: a sampler that this machine or build lacks.
    pub(crate) fn new(args: &'a SamplerArgs, canonical: bool) -> Result<Self, CommandError> {
        let plan = Plan { canonical, ..Plan::default() };
        Ok(Support { args, canonical, can: capabilities_of(&args.config(plan)).map_err(named)? })
    }

    /// The knobs of a row that the sampler lacks.
    fn lacked(&self, row: &RowParams<'_>) -> Knobs {
        let lacks_lists = row.without_replacement && !self.can.without_replacement;
        let lists = if lacks_lists { Knobs::of(&[Knob::WithoutReplacement]) } else { Knobs::NONE };
        row.enabled().without(self.can.knobs).union(lists)
    }

    /// Whether the sampler supports all knobs of a row.
    pub(crate) fn has_all(&self, row: &RowParams<'_>) -> bool {
        self.lacked(row).is_empty()
    }

    /// A line with the first unsupported knob of a row, the flags that chose the sampler, and flags to use instead. `name`
    /// maps the knob to the name that the user knows.
    pub(crate) fn message(&self, row: &RowParams<'_>, name: impl Fn(&str) -> String) -> Option<String> {
        let knob = self.lacked(row).iter().next()?;
        let tiled = SamplerArgs { variant: VariantConfig::Tiled, ..self.args.clone() };
        let lacks = |args: &SamplerArgs, canonical| {
            Support::new(args, canonical).is_ok_and(|support| support.lacked(row).contains(knob))
        };
        let (mut causes, mut instead) = (Vec::new(), Vec::new());
        if lacks(self.args, false) {
            causes.push(format!("--variant {}", self.args.variant));
            instead.push("use --variant tiled");
        }
        if lacks(&tiled, self.canonical) {
            causes.push("--canonical".into());
            instead.push("leave out --canonical");
        }
        // The capability is named after XTC's threshold; the probability switches XTC on.
        let knob = if knob == Knob::XtcThreshold { Knob::XtcProbability } else { knob };
        let (name, causes) = (name(knob.name()), causes.join(" and "));
        Some(format!("{name} is not supported with {causes}; {}", instead.join(" and ")))
    }

    /// Refuses flags that the sampler lacks.
    ///
    /// # Errors
    /// [`CommandError::Usage`], which names the flag.
    pub(crate) fn refuse(&self, row: &RowParams<'_>) -> Result<(), CommandError> {
        self.message(row, flag).map_or(Ok(()), |message| Err(CommandError::usage(message)))
    }
}
