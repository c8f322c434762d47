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
    /// How the ranks of --transport mpi exchange draws. By the host every rank is on the first GPU that it sees, or on the
    /// processor; by peers or nccl each is on a GPU of its own, the first rank of a machine on the first (see --devices), or
    /// on the only one that its process sees.
    #[arg(long, value_enum)]
    pub exchange: Option<ExchangeName>,
    /// Number of ranks (default: as many as --devices); for --transport peers or nccl.
    #[arg(long, value_name = "N", value_parser = whole(1..=MOST_GPUS), allow_negative_numbers = true)]
    pub world: Option<usize>,
    /// The GPU of each rank, another for each (default 0,1,2,...); for --transport or --exchange peers or nccl. With --exchange
    /// these are of the ranks on one machine, by their processes' own numbers: where each sees one GPU (CUDA_VISIBLE_DEVICES),
    /// that is 0 for all. By peers two may share a GPU.
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

/// How draws cross between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ExchangeName {
    /// As summaries over the transport, by way of the host (the default).
    #[default]
    Host,
    /// GPUs of one machine store to one another's memory (feature cuda).
    Peers,
    /// GPUs by NCCL, also of several machines (feature nccl).
    Nccl,
}

/// The most ranks of GPUs.
const MOST_GPUS: usize = 32;

/// The flag by which ranks on GPUs were asked for.
fn of_gpus(transport: TransportName) -> &'static str {
    if transport == TransportName::Mpi { "--exchange" } else { "--transport" }
}

/// The first GPU that was named before.
fn twice(devices: &[usize]) -> Option<usize> {
    let again = devices.iter().enumerate().find(|(at, device)| devices[..*at].contains(device));
    again.map(|(_, device)| *device)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.001..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "it must be 0.001 to 86400 seconds".into())
}

impl TransportArgs {
    /// How draws cross between ranks.
    pub fn exchange(&self) -> ExchangeName {
        match self.transport {
            Some(TransportName::Peers) => ExchangeName::Peers,
            Some(TransportName::Nccl) => ExchangeName::Nccl,
            Some(TransportName::Mpi) | None => self.exchange.unwrap_or_default(),
        }
    }

    /// The GPU of a rank of `--transport mpi`, the `rank`th of `world` on its machine, whose process sees so many GPUs. Of a
    /// single one the launcher, or the machine, has left no choice.
    ///
    /// # Errors
    /// [`CommandError::Usage`]: --devices that are not as many as the ranks on this machine.
    pub fn gpu_on_host(&self, rank: usize, world: usize, sees: Option<usize>) -> Result<usize, CommandError> {
        let names = self.devices.len();
        match self.devices.get(rank) {
            None if names == 0 && sees == Some(1) => Ok(0),
            None if names == 0 => Ok(rank),
            Some(&device) if names == world => Ok(device),
            _ => {
                let ranks = if world == 1 { "rank is" } else { "ranks are" };
                Err(CommandError::usage(format!("--devices names {names}, but {world} {ranks} on this machine")))
            }
        }
    }

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
                match twice(devices) {
                    Some(device) => Err(CommandError::usage(format!("--devices names GPU {device} twice"))),
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
        let [mpi, cuda, nccl] = [cfg!(feature = "mpi"), cfg!(feature = "cuda"), cfg!(feature = "nccl")];
        // The feature of NCCL has cuda in it.
        let of_gpus = match self.exchange() {
            ExchangeName::Nccl if !nccl => Some("nccl"),
            ExchangeName::Peers if !cuda => Some("cuda"),
            ExchangeName::Host if self.transport.is_some() && backend == BackendName::Cuda && !cuda => Some("cuda"),
            _ => None,
        };
        let feature = match (self.transport, of_gpus) {
            (None, _) => return Ok(()),
            (Some(TransportName::Mpi), Some("nccl")) if !mpi => "mpi,nccl",
            (Some(TransportName::Mpi), Some(_)) if !mpi => "mpi,cuda",
            (Some(TransportName::Mpi), None) if !mpi => "mpi",
            (Some(_), Some(feature)) => feature,
            (Some(_), None) => return Ok(()),
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
            None if self.exchange.is_some() => usage("--exchange means nothing without --transport mpi"),
            None if self.world.is_some() => usage("--world means nothing without --transport"),
            None if !self.devices.is_empty() => usage("--devices means nothing without --transport"),
            None => Ok(()),
            Some(_) if sampler.variant == VariantName::Sharded => {
                usage("--variant sharded has its shards in one process; --transport has one for each rank")
            }
            Some(TransportName::Mpi) if self.world.is_some() => usage("--world means nothing to --transport mpi"),
            Some(TransportName::Mpi) if self.exchange() == ExchangeName::Host => match self.devices.is_empty() {
                true => Ok(()),
                false => usage("--devices means nothing to --transport mpi without --exchange peers or nccl"),
            },
            Some(TransportName::Peers | TransportName::Nccl) if self.exchange.is_some() => {
                usage("--exchange is for --transport mpi: --transport peers and nccl are exchanges themselves")
            }
            Some(transport) if (sampler.backend, sampler.variant) != (BackendName::Cuda, VariantName::Tiled) => {
                usage(&format!("{} peers and nccl need --backend cuda and --variant tiled", of_gpus(transport)))
            }
            Some(transport) if sampler.merge == Some(Merge::LogMass) => {
                usage(&format!("--merge log-mass is not what {} peers and nccl exchange", of_gpus(transport)))
            }
            Some(TransportName::Mpi) => match twice(&self.devices) {
                // GPU 0 may be another one in each process; whether it is, NCCL sees.
                Some(device) if device > 0 && self.exchange() == ExchangeName::Nccl => {
                    usage(&format!("--devices names GPU {device} twice, but NCCL has one rank on a GPU"))
                }
                _ => Ok(()),
            },
            Some(TransportName::Peers | TransportName::Nccl) => self.gpus().map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_the_gpus_of_their_machine_in_order_or_the_one_that_they_see() {
        let gpu = |devices: &[usize], rank, sees| {
            let args = TransportArgs { devices: devices.to_vec(), ..TransportArgs::default() };
            args.gpu_on_host(rank, 2, sees).map_err(|error| error.to_string())
        };
        for (sees, takes) in [(None, [0, 1]), (Some(4), [0, 1]), (Some(1), [0, 0])] {
            assert_eq!([0, 1].map(|rank| gpu(&[], rank, sees)), takes.map(Ok));
            assert_eq!([0, 1].map(|rank| gpu(&[3, 2], rank, sees)), [Ok(3), Ok(2)]);
        }
        let refused = Err("--devices names 3, but 2 ranks are on this machine".to_owned());
        assert_eq!([gpu(&[0, 1, 2], 0, Some(4)), gpu(&[0, 1, 2], 1, None)], [refused.clone(), refused]);
    }
}
