//! Flags of ranks: one shard of the vocabulary per process or GPU.

use super::SamplerArgs;
use crate::error::CommandError;
use clap::{Args, ValueEnum};
use flash_sampling::{Backend, BuildError, VariantConfig};
use std::time::Duration;

/// Ranks: one shard of the vocabulary per process, or per GPU of one process.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Ranks")]
pub struct TransportArgs {
    /// Split the vocabulary over ranks. mpi: each process that mpirun starts is a rank, and rank 0 writes results (feature
    /// mpi). peers, nccl: each GPU that CUDA_VISIBLE_DEVICES leaves to this process is a rank.
    #[arg(long, value_enum)]
    pub transport: Option<TransportName>,
    /// Exchange of draws between the ranks of --transport mpi. host: every rank runs on the processor, or on the first GPU
    /// visible to it. peers, nccl: every rank runs on a GPU of its own, in the order of the ranks on its machine, or on the
    /// only GPU visible to it.
    #[arg(long, value_enum)]
    pub exchange: Option<ExchangeName>,
    /// Time limit in seconds of an exchange, after all ranks have started (default 30); for --transport. An error names a rank
    /// that is missing or has different parameters. Ranks on GPUs use half of the limit for the GPU, the rest for this check.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub time_limit: Option<Duration>,
}

/// The kind of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportName {
    /// Processes that mpirun started.
    Mpi,
    /// GPUs of this process, which store to each other's memory (feature cuda).
    Peers,
    /// GPUs of this process, by NCCL (feature nccl).
    Nccl,
}

/// The exchange of draws between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ExchangeName {
    /// Summaries over the transport, through the host (the default).
    #[default]
    Host,
    /// GPUs of one machine store to each other's memory (feature cuda).
    Peers,
    /// GPUs by NCCL, also on several machines (feature nccl).
    Nccl,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.001..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "it must be 0.001 to 86400 seconds".into())
}

impl TransportArgs {
    /// The exchange of draws between ranks.
    pub fn exchange(&self) -> ExchangeName {
        match self.transport {
            Some(TransportName::Peers) => ExchangeName::Peers,
            Some(TransportName::Nccl) => ExchangeName::Nccl,
            Some(TransportName::Mpi) | None => self.exchange.unwrap_or_default(),
        }
    }

    /// Refuses a transport that this build lacks, before other checks.
    ///
    /// # Errors
    /// [`CommandError::Build`], which names all features that the flags need.
    pub fn check_built(&self, backend: &Backend) -> Result<(), CommandError> {
        let Some(transport) = self.transport else { return Ok(()) };
        let is_on_gpu = matches!(backend, Backend::Cuda { .. });
        // Feature `nccl` includes `cuda`.
        let of_gpu = match self.exchange() {
            ExchangeName::Nccl if cfg!(not(feature = "nccl")) => Some("nccl"),
            ExchangeName::Peers if cfg!(not(feature = "cuda")) => Some("cuda"),
            ExchangeName::Host if is_on_gpu && cfg!(not(feature = "cuda")) => Some("cuda"),
            _ => None,
        };
        let lacks_mpi = transport == TransportName::Mpi && cfg!(not(feature = "mpi"));
        let feature = match (lacks_mpi, of_gpu) {
            (true, Some("nccl")) => "mpi,nccl",
            (true, Some(_)) => "mpi,cuda",
            (true, None) => "mpi",
            (false, Some(feature)) => feature,
            (false, None) => return Ok(()),
        };
        Err(BuildError::NotBuilt { feature }.into())
    }

    /// Refuses flags that contradict each other or have no effect.
    ///
    /// # Errors
    /// [`CommandError::Usage`], which names the flag.
    pub fn check(&self, sampler: &SamplerArgs) -> Result<(), CommandError> {
        let (none, mpi) = (self.transport.is_none(), self.transport == Some(TransportName::Mpi));
        let (of_gpus, flag) = (self.exchange() != ExchangeName::Host, if mpi { "--exchange" } else { "--transport" });
        let is_tiled_on_gpu =
            (&sampler.backend, &sampler.variant) == (&Backend::Cuda { device: 0 }, &VariantConfig::Tiled);
        let without = |flag: &str| format!("{flag} has no effect without --transport");
        let wrong = [
            (none && self.time_limit.is_some(), without("--time-limit")),
            (none && self.exchange.is_some(), without("--exchange") + " mpi"),
            (
                !none && matches!(sampler.variant, VariantConfig::Sharded { .. }),
                "--variant sharded has its shards in one process; --transport has one for each rank".into(),
            ),
            (
                !mpi && self.exchange.is_some(),
                "--exchange is for --transport mpi: --transport peers and nccl are exchanges themselves".into(),
            ),
            (of_gpus && sampler.shadow.is_some(), format!("--shadow has no effect with {flag} peers and nccl")),
            (of_gpus && !is_tiled_on_gpu, format!("{flag} peers and nccl need --backend cuda and --variant tiled")),
        ];
        let wrong = wrong.into_iter().find(|(is_wrong, _)| *is_wrong);
        wrong.map_or(Ok(()), |(_, message)| Err(CommandError::usage(message)))
    }
}
