//! A warning to users of mpirun without `--transport mpi`: every process does the whole work.

use crate::args::{Command, TransportName};
use std::env;

/// Environment variables with the number of processes and the rank: of Open MPI, and of MPICH and its relatives.
const LAUNCHERS: [(&str, &str); 2] = [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")];

/// Warns once, in rank 0, if a launcher started several processes that share no work.
pub(crate) fn warn(command: &Command) {
    let expects_ranks = match command {
        Command::Sample(args) => args.transport.transport == Some(TransportName::Mpi),
        Command::Kernels(_) | Command::Info { .. } => true,
        Command::Generate(_) | Command::Verify(_) | Command::Bench(_) => false,
    };
    let number = |name: &str| env::var(name).ok()?.parse::<usize>().ok();
    let started = LAUNCHERS.iter().find_map(|(size, rank)| Some((number(size)?, number(rank)?)));
    if let Some((world @ 2.., 0)) = started.filter(|_| !expects_ranks) {
        tracing::warn!(
            "mpirun started {world} processes, and each does the whole work; `sample --transport mpi` gives each a shard \
             of the vocabulary"
        );
    }
}
