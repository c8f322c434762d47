//! The Rust sampler behind a Python `Sampler`, and its construction.

use crate::column::integer;
use crate::cuda::OnDevice;
use crate::device_call::DeviceCall;
use crate::error::{failed, invalid, of_ranks};
use crate::fork::ThreadProcess;
use crate::group::Group;
use crate::head::{Head, HeadParts, Owner};
use crate::tensor::{Place, Tensor};
use flash_sampling::distributed::{ShardOptions, ShardSampler};
use flash_sampling::{
    Backend, BackendConfig, BuildError, Description, HeadError, HeadOwner, Isa, PerturbedArgmax, Plan, RowParams,
    SampleError, Samples, ShardMerge, VariantConfig, build_from_logits, build_owned,
};
use pyo3::prelude::*;
use std::sync::Arc;

/// A sampler over tensors in host memory or on a GPU. The sampler may be a rank of a group.
pub(crate) enum Engine {
    Host(Box<dyn PerturbedArgmax>, ThreadProcess),
    Device(Box<OnDevice>),
}

/// The arguments of a sampler.
pub(crate) struct Options<'a> {
    pub(crate) max_rows: i128,
    pub(crate) variant: &'a str,
    pub(crate) max_draws: i128,
    pub(crate) max_logprobs: Option<i128>,
    pub(crate) max_adjusted: Option<i128>,
    pub(crate) threads: Option<i128>,
    pub(crate) backend: Option<&'a str>,
    pub(crate) canonical: bool,
    pub(crate) shadow: bool,
}

impl Options<'_> {
    fn config(&self) -> PyResult<BackendConfig> {
        let text = self.backend.unwrap_or("cpu");
        let mut backend = text.parse::<Backend>().map_err(|error| {
            let isas = format!("; the instruction sets are {}", Isa::ALL.map(Isa::name).join(", "));
            invalid("backend", format!("{error}{}", if text.starts_with("cpu:") { &isas } else { "" }))
        })?;
        if let Some(threads) = self.threads {
            let Backend::Cpu(options) = &mut backend else {
                return Err(invalid("threads", "threads must be None with a backend other than the CPU"));
            };
            options.threads = Some(integer("threads", threads, 1)?);
        }
        let plan = Plan {
            max_rows: integer("max_rows", self.max_rows, 1)?,
            max_draws: integer("max_draws", self.max_draws, 1)?,
            max_logprobs: self.max_logprobs.map(|most| integer("max_logprobs", most, 0)).transpose()?,
            canonical: self.canonical,
        };
        let variant = self.variant.parse::<VariantConfig>().map_err(|error| invalid("variant", error.to_string()))?;
        Ok(BackendConfig { backend, variant, plan, shadow: self.shadow })
    }

    fn max_adjusted(&self) -> PyResult<Option<usize>> {
        self.max_adjusted.map(|most| integer("max_adjusted", most, 0)).transpose()
    }

    /// Refuses options of samplers whose inputs are in memory of a GPU.
    fn check_host(&self) -> PyResult<()> {
        match self.max_adjusted {
            Some(_) => Err(invalid("max_adjusted", "max_adjusted must be None for inputs on the CPU")),
            None => Ok(()),
        }
    }
}

/// Loads NVIDIA's run-time compiler from PyPI packages, unless the dynamic loader finds this compiler.
fn preload(py: Python<'_>) -> PyResult<()> {
    py.import("flash_sampling._nvidia")?.call_method0("preload").map(drop)
}

/// Builds a rank of a group from the rank's shard of the vocabulary. This is a collective call.
fn build_rank(
    parts: Arc<HeadParts>,
    config: &BackendConfig,
    group: Group,
) -> Result<Box<dyn PerturbedArgmax>, BuildError> {
    let owner = Owner(parts);
    let options = ShardOptions::new(ShardMerge::Winners).of_head(&owner.head()?);
    Ok(Box::new(ShardSampler::new(build_owned(owner, config)?, group, options)?))
}

impl Engine {
    /// Builds the sampler of a head. With a group, the head is the shard of a rank, and this is a collective call.
    pub(crate) fn of_head(
        py: Python<'_>,
        head: &Head,
        options: &Options<'_>,
        group: Option<Group>,
    ) -> PyResult<Engine> {
        let config = options.config()?;
        let (place, parts) = (head.parts.weight.place, head.parts.clone());
        let dtype = parts.layout.dtype;
        if options.shadow && !dtype.is_float() {
            return Err(invalid("shadow", HeadError::ShadowType { dtype }.to_string()));
        }
        if place == Place::Host {
            options.check_host()?;
            return match group {
                None => Engine::host(py, &config, || build_owned(Owner(parts), &config)),
                Some(group) => Engine::host(py, &config, || build_rank(parts, &config, group)),
            };
        }
        for (knob, is_set) in [("backend", options.backend.is_some()), ("threads", options.threads.is_some())] {
            if is_set {
                return Err(invalid(knob, format!("{knob} must be None for a head on {place}")));
            }
        }
        if config.variant != VariantConfig::Tiled {
            return Err(invalid(
                "variant",
                format!("variant is {}, but a head on {place} needs tiled", config.variant),
            ));
        }
        preload(py)?;
        let limits = (config.plan, options.max_adjusted()?);
        py.detach(|| OnDevice::of_head(parts, limits, config.shadow, group))
            .map(|sampler| Engine::Device(Box::new(sampler)))
    }

    /// Builds a sampler of existing logits, on the CPU or on the GPU of the backend.
    pub(crate) fn of_logits(py: Python<'_>, vocab_size: usize, options: &Options<'_>) -> PyResult<Engine> {
        let config = options.config()?;
        if let Backend::Cuda { device } = config.backend {
            preload(py)?;
            let limits = (config.plan, options.max_adjusted()?);
            let sampler = py.detach(|| OnDevice::for_logits(vocab_size, limits, device))?;
            return Ok(Engine::Device(Box::new(sampler)));
        }
        options.check_host()?;
        Engine::host(py, &config, || build_from_logits(vocab_size, &config))
    }

    fn host<E: core::error::Error + Send>(
        py: Python<'_>,
        config: &BackendConfig,
        build: impl FnOnce() -> Result<Box<dyn PerturbedArgmax>, E> + Send,
    ) -> PyResult<Engine> {
        if matches!(config.backend, Backend::Cuda { .. }) {
            preload(py)?;
        }
        let process = ThreadProcess::of_sampler(config)?;
        py.detach(build).map(|sampler| Engine::Host(sampler, process)).map_err(|error| failed(&error))
    }

    /// The process whose threads the sampler uses.
    pub(crate) fn process(&self) -> ThreadProcess {
        match self {
            Engine::Host(_, process) => *process,
            Engine::Device(_) => ThreadProcess::NONE,
        }
    }

    pub(crate) fn description(&self) -> Description {
        match self {
            Engine::Host(sampler, _) => sampler.description(),
            Engine::Device(sampler) => sampler.description(),
        }
    }

    /// The memory that holds the inputs.
    pub(crate) fn place(&self) -> Place {
        match self {
            Engine::Host(..) => Place::Host,
            Engine::Device(sampler) => sampler.place(),
        }
    }

    /// Enqueues draws for the rows of a tensor on a GPU; `what` is the name of the argument.
    pub(crate) fn enqueue(&mut self, input: &Tensor, what: &'static str, call: &DeviceCall) -> PyResult<()> {
        match self {
            Engine::Device(sampler) => sampler.enqueue(input, what, call),
            Engine::Host(..) => Err(invalid(what, format!("{what} must be on a GPU, and the sampler on the same GPU"))),
        }
    }

    /// Draws for the rows of a tensor; `what` is the name of the argument.
    pub(crate) fn sample(
        &mut self,
        input: &Tensor,
        what: &'static str,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> PyResult<()> {
        let sampled = match self {
            Engine::Host(sampler, _) => sampler.sample(input.matrix(what)?, rows, out),
            Engine::Device(sampler) => sampler.sample(input, what, rows, out)?,
        };
        sampled.map_err(|error| match error {
            SampleError::Hidden { found, expected } if what == "logits" => {
                invalid(what, format!("logits has {found} columns, but the sampler has vocab_size={expected}"))
            }
            SampleError::Hidden { .. } => invalid(what, error.to_string()),
            SampleError::TooManyRows { rows, max_rows } => {
                invalid("max_rows", format!("{what} has {rows} rows, but the sampler has max_rows={max_rows}"))
            }
            error => of_ranks(&error).unwrap_or_else(|| failed(&error)),
        })
    }
}
