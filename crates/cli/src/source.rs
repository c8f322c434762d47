//! The head and the hidden states that the flags choose.

use crate::args::HeadArgs;
use crate::error::CommandError;
use crate::load::checkpoint::Checkpoint;
use crate::load::config::{HeadConfig, Scale};
use crate::load::tensor::{Role, Tensor};
use crate::synthetic::{self, Logits};
use flash_sampling::{DType, Head, Matrix};

/// Tokens and hidden size of the built-in head.
const BUILT_IN: (usize, usize) = (151_936, 1024);
/// Rows of hidden states that come with it.
const BUILT_IN_ROWS: usize = 4;

/// A head, its transforms, and hidden states.
#[derive(Debug)]
pub struct Source {
    weight: Tensor,
    bias: Option<Vec<f32>>,
    vocab_size: Option<usize>,
    soft_cap: Option<f32>,
    scale: Option<f32>,
    hidden: Tensor,
}

impl Source {
    /// Opens what the flags name, or makes the built-in head.
    ///
    /// # Errors
    /// Flags that contradict one another, and files that cannot be used.
    pub fn open(args: &HeadArgs) -> Result<Self, CommandError> {
        let mut source = match (&args.model, &args.weight, &args.hidden) {
            (Some(folder), _, Some(hidden)) => {
                let checkpoint = Checkpoint::open(folder)?;
                tracing::info!("the head is {} of {}", checkpoint.name, folder.display());
                Source::of_checkpoint(checkpoint, Tensor::open(hidden, Role::Hidden)?, args)?
            }
            (None, Some(weight), Some(hidden)) => {
                Source::plain(Tensor::open(weight, Role::Weight)?, Tensor::open(hidden, Role::Hidden)?)
            }
            (None, None, None) => Source::built_in()?,
            _ => return Err(CommandError::usage("--hidden and one of --model and --weight are needed together")),
        };
        if let Some(size) = args.vocab_size.filter(|size| !(1..=source.weight.rows()).contains(size)) {
            let rows = source.weight.rows();
            return Err(CommandError::usage(format!(
                "--vocab-size {size}: the weight has {rows} rows, so 1 to {rows}"
            )));
        }
        source.vocab_size = args.vocab_size.or(source.vocab_size);
        source.soft_cap = args.soft_cap.or(source.soft_cap);
        source.scale = args.scale.or(source.scale);
        if source.hidden.cols() != source.weight.cols() {
            return Err(CommandError::usage(format!(
                "{}the hidden states have {} columns, but the head has hidden size {}",
                args.hidden.as_ref().map(|path| format!("{}: ", path.file.display())).unwrap_or_default(),
                source.hidden.cols(),
                source.weight.cols()
            )));
        }
        Ok(source)
    }

    fn plain(weight: Tensor, hidden: Tensor) -> Self {
        Source { weight, bias: None, vocab_size: None, soft_cap: None, scale: None, hidden }
    }

    fn built_in() -> Result<Self, CommandError> {
        let (vocab, hidden) = BUILT_IN;
        tracing::info!("no --model or --weight: a built-in head of {vocab} tokens, hidden size {hidden}, bf16");
        let failed = |error| CommandError::usage(format!("cannot make the built-in head: {error}"));
        let weight = synthetic::weight(vocab, hidden, DType::BF16).map_err(failed)?;
        let states = synthetic::hidden(weight.matrix()?, BUILT_IN_ROWS, DType::BF16, Logits::Peaked).map_err(failed)?;
        Ok(Source::plain(weight, states))
    }

    fn of_checkpoint(checkpoint: Checkpoint, hidden: Tensor, args: &HeadArgs) -> Result<Self, CommandError> {
        let HeadConfig { vocab_size, soft_cap, scale, .. } = checkpoint.config;
        let mut source = Source::plain(checkpoint.weight, hidden);
        if let Some(bias) = checkpoint.bias {
            if bias.cols() != source.weight.rows() {
                return Err(CommandError::usage(format!(
                    "the head's bias has {} entries, but its weight has {} rows",
                    bias.cols(),
                    source.weight.rows()
                )));
            }
            let mut values = vec![0.0; bias.cols()];
            bias.matrix()?.row_to_f32(0, &mut values);
            tracing::info!("the head has a bias");
            source.bias = Some(values);
        }
        match vocab_size {
            _ if args.vocab_size.is_some() => {}
            Some(size) if size < source.weight.rows() => {
                tracing::info!(
                    "config.json: vocab_size {size}; the other {} rows are padding",
                    source.weight.rows() - size
                );
                source.vocab_size = Some(size);
            }
            Some(size) if size > source.weight.rows() => {
                tracing::warn!("config.json: vocab_size {size}, but the weight has {} rows", source.weight.rows());
            }
            _ => {}
        }
        if let (Some(cap), None) = (soft_cap, args.soft_cap) {
            tracing::info!("config.json: final_logit_softcapping {cap}");
            source.soft_cap = Some(cap);
        }
        match scale {
            _ if args.scale.is_some() => {}
            Some((key, Scale::Factor(factor))) => {
                tracing::info!("config.json: {key}; the logits are multiplied by {factor}");
                source.scale = Some(factor);
            }
            Some((key, Scale::Unclear)) => {
                let message =
                    format!("config.json scales the logits by {key} in a way that is not clear; give --scale");
                return Err(CommandError::usage(message));
            }
            None => {}
        }
        Ok(source)
    }

    /// The head.
    ///
    /// # Errors
    /// A size, bias or factor that makes no head.
    pub fn head(&self) -> Result<Head<'_>, CommandError> {
        let mut head = Head::new(self.weight.matrix()?)?;
        if let Some(bias) = &self.bias {
            head = head.with_bias(bias)?;
        }
        if let Some(cap) = self.soft_cap {
            head = head.with_soft_cap(cap)?;
        }
        if let Some(scale) = self.scale {
            head = head.with_scale(scale)?;
        }
        if let Some(size) = self.vocab_size {
            head = head.with_vocab_size(size)?;
        }
        Ok(head)
    }

    /// The hidden states, `[rows, hidden]`.
    ///
    /// # Errors
    /// A shape that cannot be used.
    pub fn hidden(&self) -> Result<Matrix<'_>, CommandError> {
        Ok(self.hidden.matrix()?)
    }
}
