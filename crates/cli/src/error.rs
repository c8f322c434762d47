//! Errors of the command: one line each, with an exit code.

use crate::input::LoadError;
use crate::output::line;
#[cfg(feature = "cuda")]
use flash_sampling::cuda::CudaError;
use flash_sampling::{BuildError, HeadError, SampleError, ShardError};
use flash_sampling_models::ModelError;
use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;

/// Why a command ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// Invalid flags.
    #[error("{0}")]
    Usage(String),
    /// A file that cannot be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A checkpoint of an unsupported model, or an error of its layers.
    #[error("{}: {source}", folder.display())]
    Model {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// The model's error.
        source: ModelError,
    },
    /// A weight, bias or factor that fits no head.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// A sampler that this machine or build lacks.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A backend failed.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Results could not be written.
    #[error("cannot write {what}: {source}")]
    Write {
        /// The output.
        what: String,
        /// The system's error.
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

    /// 2 for bad usage or files, 1 for a failed backend or exchange, 130 for Ctrl-C, and 0 if the reader closed the
    /// output.
    pub fn exit_code(&self) -> u8 {
        match self {
            CommandError::Write { source, .. } if source.kind() == io::ErrorKind::BrokenPipe => 0,
            // A rank is missing in the handshake, or the transport does not start.
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

/// Prints one line for an error on standard error, in one write, since other ranks print there too.
pub(crate) fn print_error(message: &str) {
    // A closed standard error is no reason to fail.
    let _ = io::stderr().write_all(format!("error: {}\n", line::message(message)).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling::distributed::TransportError;

    #[test]
    fn a_missing_rank_has_the_same_exit_code_in_handshake_and_draw() {
        let missing = || ShardError::from(TransportError::Broken);
        let codes = [CommandError::from(BuildError::from(missing())), SampleError::from(missing()).into()];
        assert_eq!(codes.map(|error| error.exit_code()), [1, 1]);
        #[cfg(feature = "cuda")]
        {
            let late = CudaError::LateRanks { ranks: Vec::new(), limit: core::time::Duration::from_secs(60) };
            assert_eq!(CommandError::from(BuildError::from(late)).exit_code(), 1);
        }
        // Ranks with different flags or files are bad usage.
        assert_eq!(CommandError::from(BuildError::from(ShardError::NotPathwise { shard: 1 })).exit_code(), 2);
    }
}
