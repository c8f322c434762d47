//! The head and the hidden states that the flags choose.

use crate::args::{HeadArgs, HeadOverrides};
use crate::error::CommandError;
use crate::input::checkpoint::Checkpoint;
use crate::input::loaded_head::LoadedHead;
use crate::input::synthetic::{self, Logits};
use crate::input::tensor::{Role, Tensor};
use crate::output::line;
use flash_sampling::DType;

/// Tokens and hidden size of the built-in head.
const BUILT_IN: (usize, usize) = (151_936, 1024);
/// Rows of its hidden states.
const BUILT_IN_ROWS: usize = 4;

/// A head, its transforms, and hidden states.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) head: LoadedHead,
    /// `[rows, hidden]`.
    pub(super) hidden: Tensor,
}

impl Source {
    /// Opens the files of the flags. Without any, makes the built-in head.
    pub(super) fn open(args: &HeadArgs) -> Result<Self, CommandError> {
        let (flags, usage) = (args.overrides, CommandError::Usage);
        let source = match (&args.model, &args.weight, &args.hidden) {
            (Some(folder), _, Some(hidden)) => {
                let checkpoint = Checkpoint::open(folder)?;
                let origin = format!("the head is {} of {}", checkpoint.name, folder.display());
                let hidden = Tensor::open(hidden, Role::Hidden)?;
                Source { head: LoadedHead::of_checkpoint(checkpoint, flags).map_err(usage)?.noted(origin), hidden }
            }
            (None, Some(weight), Some(hidden)) => {
                let head = LoadedHead::new(Tensor::open(weight, Role::Weight)?, flags).map_err(usage)?;
                Source { head, hidden: Tensor::open(hidden, Role::Hidden)? }
            }
            (None, None, None) => built_in(flags)?,
            _ => return Err(CommandError::usage("--hidden needs --model or --weight")),
        };
        if source.hidden.cols() != source.head.weight.cols() {
            return Err(CommandError::usage(format!(
                "{}the hidden states have {}, but the head has hidden size {}; its weight [vocab, hidden] is [{}, {2}]",
                args.hidden.as_ref().map(|path| format!("{}: ", path.file.display())).unwrap_or_default(),
                line::count(source.hidden.cols(), "column"),
                source.head.weight.cols(),
                source.head.weight.rows()
            )));
        }
        Ok(source)
    }
}

fn built_in(flags: HeadOverrides) -> Result<Source, CommandError> {
    let (vocab, hidden) = BUILT_IN;
    let origin = format!("no --model or --weight: a built-in head of {vocab} tokens, hidden size {hidden}, bf16");
    let failed = |error| CommandError::usage(format!("cannot make the built-in head: {error}"));
    let weight = synthetic::weight(vocab, hidden, DType::BF16).map_err(failed)?;
    let states = synthetic::hidden(weight.matrix()?, BUILT_IN_ROWS, DType::BF16, Logits::Peaked).map_err(failed)?;
    let head = LoadedHead::new(weight, flags).map_err(CommandError::Usage)?.noted(origin);
    Ok(Source { head, hidden: states })
}
