//! The head and the hidden states that the flags choose.

use crate::args::HeadArgs;
use crate::error::CommandError;
use crate::load::checkpoint::Checkpoint;
use crate::load::tensor::{Role, Tensor};
use crate::loaded_head::LoadedHead;
use crate::output::line;
use crate::synthetic::{self, Logits};
use flash_sampling::{DType, Head, Matrix};

/// Tokens and hidden size of the built-in head.
const BUILT_IN: (usize, usize) = (151_936, 1024);
/// Rows of hidden states that come with it.
const BUILT_IN_ROWS: usize = 4;

/// A head, its transforms, and hidden states.
#[derive(Debug)]
pub struct Source {
    head: LoadedHead,
    hidden: Tensor,
}

impl Source {
    /// Opens what the flags name, or makes the built-in head.
    ///
    /// # Errors
    /// Flags that contradict one another, and files that cannot be used.
    pub fn open(args: &HeadArgs) -> Result<Self, CommandError> {
        let (head, hidden) = match (&args.model, &args.weight, &args.hidden) {
            (Some(folder), _, Some(hidden)) => {
                let checkpoint = Checkpoint::open(folder)?;
                tracing::info!("the head is {} of {}", checkpoint.name, folder.display());
                let hidden = Tensor::open(hidden, Role::Hidden)?;
                (LoadedHead::of_checkpoint(checkpoint, args)?, hidden)
            }
            (None, Some(weight), Some(hidden)) => {
                (LoadedHead::plain(Tensor::open(weight, Role::Weight)?), Tensor::open(hidden, Role::Hidden)?)
            }
            (None, None, None) => built_in()?,
            _ => return Err(CommandError::usage("--hidden and one of --model and --weight are needed together")),
        };
        let head = head.with_flags(args)?;
        if hidden.cols() != head.weight.cols() {
            return Err(CommandError::usage(format!(
                "{}the hidden states have {}, but the head has hidden size {}",
                args.hidden.as_ref().map(|path| format!("{}: ", path.file.display())).unwrap_or_default(),
                line::count(hidden.cols(), "column"),
                head.weight.cols()
            )));
        }
        Ok(Source { head, hidden })
    }

    /// The head.
    ///
    /// # Errors
    /// A size, bias or factor that makes no head.
    pub fn head(&self) -> Result<Head<'_>, CommandError> {
        self.head.head()
    }

    /// The hidden states, `[rows, hidden]`.
    ///
    /// # Errors
    /// A shape that cannot be used.
    pub fn hidden(&self) -> Result<Matrix<'_>, CommandError> {
        Ok(self.hidden.matrix()?)
    }
}

fn built_in() -> Result<(LoadedHead, Tensor), CommandError> {
    let (vocab, hidden) = BUILT_IN;
    tracing::info!("no --model or --weight: a built-in head of {vocab} tokens, hidden size {hidden}, bf16");
    let failed = |error| CommandError::usage(format!("cannot make the built-in head: {error}"));
    let weight = synthetic::weight(vocab, hidden, DType::BF16).map_err(failed)?;
    let states = synthetic::hidden(weight.matrix()?, BUILT_IN_ROWS, DType::BF16, Logits::Peaked).map_err(failed)?;
    Ok((LoadedHead::plain(weight), states))
}
