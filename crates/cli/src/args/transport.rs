//! Flags that spread the vocabulary over processes.

use super::{SamplerArgs, VariantName};
use crate::error::CommandError;
use clap::{Args, ValueEnum};
use flash_sampling::BuildError;
use std::time::Duration;

/// Ranks: one process each, with one shard of the vocabulary.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Ranks")]
pub struct TransportArgs {
    /// How the ranks reach one another: this process is one of those that mpirun started, and draws from its shard of the
    /// vocabulary (feature mpi). Rank 0 alone writes results.
    #[arg(long, value_enum)]
    pub transport: Option<TransportName>,
    /// Seconds that an exchange waits for the other ranks (default 30); for --transport.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub time_limit: Option<Duration>,
    /// Compare the results of all ranks after each call; for --transport.
    #[arg(long)]
    pub check_tokens: bool,
}

/// How ranks reach one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportName {
    /// Processes that mpirun started.
    Mpi,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.001..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "it must be 0.001 to 86400 seconds".into())
}

impl TransportArgs {
    /// Refuses flags that mean nothing together, and a transport that this build does not have.
    ///
    /// # Errors
    /// [`CommandError::Usage`], naming the flag; [`CommandError::Build`], naming the feature.
    pub fn check(&self, sampler: &SamplerArgs) -> Result<(), CommandError> {
        let usage = |what: &str| Err(CommandError::usage(what));
        match self.transport {
            None if self.time_limit.is_some() => usage("--time-limit means nothing without --transport"),
            None if self.check_tokens => usage("--check-tokens means nothing without --transport"),
            None => Ok(()),
            Some(_) if sampler.variant == VariantName::Sharded => {
                usage("--variant sharded has its shards in one process; --transport has one for each rank")
            }
            Some(TransportName::Mpi) if cfg!(not(feature = "mpi")) => {
                Err(BuildError::NotBuilt { feature: "mpi" }.into())
            }
            Some(TransportName::Mpi) => Ok(()),
        }
    }
}
