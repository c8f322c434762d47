//! What ends a command early, and the exit code that says so.

use crate::load::LoadError;
#[cfg(feature = "cuda")]
use flash_sampling::cuda::CudaError;
use flash_sampling::{BuildError, HeadError, SampleError, ShardError};
use flash_sampling_models::ModelError;
use std::error::Error;
use std::io;
use std::path::PathBuf;

/// Why a command ended early. Its message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// Flags that make no sense, alone or together.
    #[error("{0}")]
    Usage(String),
    /// A file that cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A checkpoint that makes no model, or a model that cannot go on.
    #[error("{}: {source}", folder.display())]
    Model {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// What is wrong.
        source: ModelError,
    },
    /// A weight, bias or factor that makes no head.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// A sampler that this machine or build does not have.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A backend failed at its work.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Results could not be written.
    #[error("cannot write {what}: {source}")]
    Write {
        /// What was being written.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

impl CommandError {
    /// A [`CommandError::Usage`].
    pub fn usage(message: impl Into<String>) -> Self {
        CommandError::Usage(message.into())
    }

    /// A function that turns an I/O error into a [`CommandError::Write`].
    pub fn write(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| CommandError::Write { what: what.into(), source }
    }

    /// 2 for bad usage or files, 1 for work or an exchange that failed, 130 for Ctrl-C, and 0 when the reader of the output left.
    pub fn exit_code(&self) -> u8 {
        match self {
            CommandError::Write { source, .. } if source.kind() == io::ErrorKind::BrokenPipe => 0,
            // A rank that is gone, when ranks meet as in a draw, or a transport that does not start.
            CommandError::Build(BuildError::Shard(ShardError::Transport(_))) => 1,
            #[cfg(feature = "cuda")]
            CommandError::Build(BuildError::Cuda(CudaError::LateRanks { .. })) => 1,
            CommandError::Usage(_) | CommandError::Load(_) | CommandError::Head(_) | CommandError::Build(_) => 2,
            CommandError::Model { .. } | CommandError::Write { .. } => 2,
            CommandError::Sample(_) => 1,
            CommandError::Interrupted => 130,
        }
    }

    /// The error and its causes, on one line.
    pub fn one_line(&self) -> String {
        let mut line = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let text = error.to_string();
            if !line.ends_with(&text) {
                line = format!("{line}: {text}");
            }
            cause = error.source();
        }
        line.replace('\n', " ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling::distributed::TransportError;

    #[test]
    fn a_rank_that_is_gone_has_one_exit_code_whenever_it_went() {
        let gone = || ShardError::from(TransportError::Broken);
        let codes = [CommandError::from(BuildError::from(gone())), SampleError::from(gone()).into()];
        assert_eq!(codes.map(|error| error.exit_code()), [1, 1]);
        #[cfg(feature = "cuda")]
        {
            let late = CudaError::LateRanks { ranks: Vec::new(), limit: core::time::Duration::from_secs(60) };
            assert_eq!(CommandError::from(BuildError::from(late)).exit_code(), 1);
        }
        // Ranks of other shards were called with other flags or files.
        assert_eq!(CommandError::from(BuildError::from(ShardError::NotPathwise { shard: 1 })).exit_code(), 2);
    }
}
