//! Flags that spread the vocabulary over processes or GPUs.

use super::values::whole;
use super::{BackendName, Merge, SamplerArgs, VariantName};
use crate::error::CommandError;
use clap::{Args, ValueEnum};
use flash_sampling::BuildError;
use std::time::Duration;

/// Ranks, with one shard of the vocabulary each: processes, or GPUs of one process.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Ranks")]
pub struct TransportArgs {
    /// How the ranks reach one another. With mpi this process is one of those that mpirun started, and draws from its shard of
    /// the vocabulary (feature mpi); rank 0 alone writes results. With peers or nccl it draws on several GPUs.
    #[arg(long, value_enum)]
    pub transport: Option<TransportName>,
    /// Number of ranks (default: as many as --devices); for --transport peers or nccl.
    #[arg(long, value_name = "N", value_parser = whole(1..=MOST_GPUS), allow_negative_numbers = true)]
    pub world: Option<usize>,
    /// The GPU of each rank, another for each (default 0,1,2,...); for --transport peers or nccl.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = whole(0..=i32::MAX as usize))]
    pub devices: Vec<usize>,
    /// Seconds within which a rank that does not come to an exchange, or was called otherwise, is named on the others, once all
    /// have started (default 30); for --transport. Ranks on GPUs wait half of them there, and ask one another in the rest.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub time_limit: Option<Duration>,
    /// Compare hidden states, parameters and results of all ranks after each call; for --transport.
    #[arg(long)]
    pub check_tokens: bool,
}

/// How ranks reach one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportName {
    /// Processes that mpirun started.
    Mpi,
    /// GPUs of this process, which store to one another's memory (feature cuda).
    Peers,
    /// GPUs of this process, by NCCL (feature nccl).
    Nccl,
}

impl TransportName {
    /// Whether ranks are GPUs of this process.
    pub fn is_of_gpus(self) -> bool {
        self != TransportName::Mpi
    }
}

/// The most ranks of GPUs.
const MOST_GPUS: usize = 32;

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.001..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "it must be 0.001 to 86400 seconds".into())
}

impl TransportArgs {
    /// The GPU of each rank.
    ///
    /// # Errors
    /// [`CommandError::Usage`]: --world and --devices that do not fit together, too many, or neither.
    pub fn gpus(&self) -> Result<Vec<usize>, CommandError> {
        match (self.world, self.devices.as_slice()) {
            (None, []) => Err(CommandError::usage("--transport peers or nccl needs --world or --devices")),
            (Some(world), []) => Ok((0..world).collect()),
            (Some(world), devices) if devices.len() != world => {
                Err(CommandError::usage(format!("--world {world}, but --devices names {}", devices.len())))
            }
            (_, devices) if devices.len() > MOST_GPUS => Err(CommandError::usage(format!(
                "--devices names {}, and there are {MOST_GPUS} at most",
                devices.len()
            ))),
            (_, devices) => {
                // Two ranks of one process wait for each other on the GPU while its memory calls wait for both.
                let twice = devices.iter().enumerate().find(|(at, device)| devices[..*at].contains(device));
                match twice {
                    Some((_, device)) => Err(CommandError::usage(format!("--devices names GPU {device} twice"))),
                    None => Ok(devices.to_vec()),
                }
            }
        }
    }

    /// Refuses a transport that this build does not have, before anything else is said of the flags.
    ///
    /// # Errors
    /// [`CommandError::Build`], naming the features that the whole command needs.
    pub fn check_built(&self, backend: BackendName) -> Result<(), CommandError> {
        let cuda = cfg!(feature = "cuda");
        let feature = match self.transport {
            Some(TransportName::Mpi) if cfg!(not(feature = "mpi")) && backend == BackendName::Cuda && !cuda => {
                "mpi,cuda"
            }
            Some(TransportName::Mpi) if cfg!(not(feature = "mpi")) => "mpi",
            Some(TransportName::Peers) if !cuda => "cuda",
            // It has cuda in it.
            Some(TransportName::Nccl) if cfg!(not(feature = "nccl")) => "nccl",
            _ => return Ok(()),
        };
        Err(BuildError::NotBuilt { feature }.into())
    }

    /// Refuses flags that mean nothing together.
    ///
    /// # Errors
    /// [`CommandError::Usage`], naming the flag.
    pub fn check(&self, sampler: &SamplerArgs) -> Result<(), CommandError> {
        let usage = |what: &str| Err(CommandError::usage(what));
        match self.transport {
            None if self.time_limit.is_some() => usage("--time-limit means nothing without --transport"),
            None if self.check_tokens => usage("--check-tokens means nothing without --transport"),
            None if self.world.is_some() => usage("--world means nothing without --transport"),
            None if !self.devices.is_empty() => usage("--devices means nothing without --transport"),
            None => Ok(()),
            Some(_) if sampler.variant == VariantName::Sharded => {
                usage("--variant sharded has its shards in one process; --transport has one for each rank")
            }
            Some(TransportName::Mpi) if self.world.is_some() => usage("--world means nothing to --transport mpi"),
            Some(TransportName::Mpi) if !self.devices.is_empty() => usage("--devices means nothing to --transport mpi"),
            Some(TransportName::Mpi) => Ok(()),
            Some(_) if (sampler.backend, sampler.variant) != (BackendName::Cuda, VariantName::Tiled) => {
                usage("--transport peers and nccl need --backend cuda and --variant tiled")
            }
            Some(_) if sampler.merge == Some(Merge::LogMass) => {
                usage("--merge log-mass is not what --transport peers and nccl exchange")
            }
            Some(TransportName::Peers | TransportName::Nccl) => self.gpus().map(drop),
        }
    }
}
