//! Flags of ranks: one shard of the vocabulary per process or GPU.

use super::values::whole;
use super::{BackendName, SamplerArgs, VariantName};
use crate::error::CommandError;
use clap::{Args, ValueEnum};
use flash_sampling::{BuildError, ShardMerge};
use std::time::Duration;

/// Ranks: one shard of the vocabulary per process, or per GPU of one process.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Ranks")]
pub struct TransportArgs {
    /// Split the vocabulary over ranks. mpi: each process that mpirun starts is a rank, and rank 0 writes results (feature
    /// mpi). peers, nccl: each rank is a GPU of this process.
    #[arg(long, value_enum)]
    pub transport: Option<TransportName>,
    /// Exchange of draws between the ranks of --transport mpi. host: every rank runs on the processor, or on the first GPU
    /// visible to it. peers, nccl: every rank runs on a GPU of its own, in the order of the ranks on its machine (see
    /// --devices), or on the only GPU visible to it.
    #[arg(long, value_enum)]
    pub exchange: Option<ExchangeName>,
    /// Number of ranks (default: the number of --devices); for --transport peers or nccl.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_GPUS), allow_negative_numbers = true)]
    pub world: Option<usize>,
    /// The GPU of each rank (default 0,1,2,...); for --transport or --exchange peers or nccl. With --exchange the list is for
    /// the ranks of one machine, by the numbers that each process sees: 0 for all ranks if CUDA_VISIBLE_DEVICES shows one GPU
    /// to each. Only ranks with --exchange peers may share a GPU.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',', value_parser = whole(0..=i32::MAX as usize))]
    pub devices: Vec<usize>,
    /// Time limit in seconds of an exchange, after all ranks have started (default 30); for --transport. An error names a rank
    /// that is missing or has different parameters. Ranks on GPUs use half of the limit for the GPU, the rest for this check.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub time_limit: Option<Duration>,
    /// Compare hidden states, parameters and results of all ranks after each call; for --transport.
    #[arg(long)]
    pub check_tokens: bool,
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

/// Maximum of ranks on GPUs of one process.
const MAX_GPUS: usize = 32;

/// The first GPU that the list repeats.
fn duplicate(devices: &[usize]) -> Option<usize> {
    let duplicate = devices.iter().enumerate().find(|(at, device)| devices[..*at].contains(device));
    duplicate.map(|(_, device)| *device)
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

    /// The GPU of a rank of `--transport mpi`: rank `rank` of the `world` ranks on this machine, in a process with `visible`
    /// GPUs.
    ///
    /// # Errors
    /// [`CommandError::Usage`]: a number of --devices other than the number of ranks on this machine.
    pub fn gpu_on_host(&self, rank: usize, world: usize, visible: Option<usize>) -> Result<usize, CommandError> {
        let names = self.devices.len();
        match self.devices.get(rank) {
            None if names == 0 && visible == Some(1) => Ok(0),
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
    /// [`CommandError::Usage`]: --world and --devices that contradict each other, too many GPUs, or no flag.
    pub fn gpus(&self) -> Result<Vec<usize>, CommandError> {
        match (self.world, self.devices.as_slice()) {
            (None, []) => Err(CommandError::usage("--transport peers or nccl needs --world or --devices")),
            (Some(world), []) => Ok((0..world).collect()),
            (Some(world), devices) if devices.len() != world => {
                Err(CommandError::usage(format!("--world {world}, but --devices names {}", devices.len())))
            }
            (_, devices) if devices.len() > MAX_GPUS => Err(CommandError::usage(format!(
                "--devices names {} GPUs, but the maximum is {MAX_GPUS}",
                devices.len()
            ))),
            (_, devices) => {
                // Deadlock: two ranks of one process wait for each other on the GPU, and its memory calls wait for both.
                match duplicate(devices) {
                    Some(device) => Err(CommandError::usage(format!("--devices names GPU {device} twice"))),
                    None => Ok(devices.to_vec()),
                }
            }
        }
    }

    /// Refuses a transport that this build lacks, before other checks.
    ///
    /// # Errors
    /// [`CommandError::Build`], which names all features that the flags need.
    pub fn check_built(&self, backend: BackendName) -> Result<(), CommandError> {
        let [mpi, cuda, nccl] = [cfg!(feature = "mpi"), cfg!(feature = "cuda"), cfg!(feature = "nccl")];
        // Feature `nccl` includes `cuda`.
        let of_gpu = match self.exchange() {
            ExchangeName::Nccl if !nccl => Some("nccl"),
            ExchangeName::Peers if !cuda => Some("cuda"),
            ExchangeName::Host if self.transport.is_some() && backend == BackendName::Cuda && !cuda => Some("cuda"),
            _ => None,
        };
        let feature = match (self.transport, of_gpu) {
            (None, _) => return Ok(()),
            (Some(TransportName::Mpi), Some("nccl")) if !mpi => "mpi,nccl",
            (Some(TransportName::Mpi), Some(_)) if !mpi => "mpi,cuda",
            (Some(TransportName::Mpi), None) if !mpi => "mpi",
            (Some(_), Some(feature)) => feature,
            (Some(_), None) => return Ok(()),
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
        // GPU 0 may differ between processes; NCCL checks that.
        let shared = duplicate(&self.devices).filter(|device| *device > 0 && self.exchange() == ExchangeName::Nccl);
        let is_tiled_on_gpu = (sampler.backend, sampler.variant) == (BackendName::Cuda, VariantName::Tiled);
        let without = |flag: &str| format!("{flag} has no effect without --transport");
        let wrong = [
            (none && self.time_limit.is_some(), without("--time-limit")),
            (none && self.check_tokens, without("--check-tokens")),
            (none && self.exchange.is_some(), without("--exchange") + " mpi"),
            (none && self.world.is_some(), without("--world")),
            (none && !self.devices.is_empty(), without("--devices")),
            (
                !none && sampler.variant == VariantName::Sharded,
                "--variant sharded has its shards in one process; --transport has one for each rank".into(),
            ),
            (mpi && self.world.is_some(), "--world has no effect with --transport mpi".into()),
            (
                mpi && !of_gpus && !self.devices.is_empty(),
                "--devices has no effect with --transport mpi without --exchange peers or nccl".into(),
            ),
            (
                !mpi && self.exchange.is_some(),
                "--exchange is for --transport mpi: --transport peers and nccl are exchanges themselves".into(),
            ),
            (of_gpus && !is_tiled_on_gpu, format!("{flag} peers and nccl need --backend cuda and --variant tiled")),
            (
                of_gpus && sampler.merge == Some(ShardMerge::LogMass),
                format!("--merge log-mass is not supported with {flag} peers and nccl"),
            ),
            (
                mpi && shared.is_some(),
                format!("--devices names GPU {} twice, but NCCL needs one GPU per rank", shared.unwrap_or_default()),
            ),
        ];
        match wrong.into_iter().find(|(is_wrong, _)| *is_wrong) {
            Some((_, message)) => Err(CommandError::usage(message)),
            None if none || mpi => Ok(()),
            None => self.gpus().map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_the_gpus_of_their_machine_in_order_or_the_only_visible_one() {
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
