//! Processes that mpirun started, of which each does the whole work.

use crate::args::{Command, TransportName};
use std::env;

/// The variables of launchers that tell a process how many there are and which it is: Open MPI's, and those of MPICH and its
/// kin.
const LAUNCHERS: [(&str, &str); 2] = [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")];

/// Warns, in the first of several processes that a launcher of ranks started, that each does what one would do alone.
pub(crate) fn tell(command: &Command) {
    let by_ranks = match command {
        Command::Sample(args) => args.transport.transport == Some(TransportName::Mpi),
        Command::Kernels(_) | Command::Info { .. } => true,
        Command::Generate(_) | Command::Verify(_) | Command::Bench(_) => false,
    };
    let number = |name: &str| env::var(name).ok()?.parse::<usize>().ok();
    let started = LAUNCHERS.iter().find_map(|(size, rank)| Some((number(size)?, number(rank)?)));
    if let Some((world @ 2.., 0)) = started.filter(|_| !by_ranks) {
        tracing::warn!(
            "{world} processes were started together, and each of them does the whole work; with sample --transport mpi \
             each has a shard of the vocabulary"
        );
    }
}
