//! A head from files, with the transforms that belong to it.

use crate::args::HeadArgs;
use crate::error::CommandError;
use crate::load::checkpoint::Checkpoint;
use crate::load::config::{HeadConfig, Scale};
use crate::load::tensor::Tensor;
use crate::output::line;
use flash_sampling::Head;

/// A head's weight and transforms.
#[derive(Debug)]
pub struct LoadedHead {
    pub(crate) weight: Tensor,
    bias: Option<Vec<f32>>,
    vocab_size: Option<usize>,
    soft_cap: Option<f32>,
    scale: Option<f32>,
}

impl LoadedHead {
    /// A weight without transforms.
    pub(crate) fn plain(weight: Tensor) -> Self {
        LoadedHead { weight, bias: None, vocab_size: None, soft_cap: None, scale: None }
    }

    /// The head of a checkpoint, with what its `config.json` says where the flags do not.
    pub(crate) fn of_checkpoint(checkpoint: Checkpoint, args: &HeadArgs) -> Result<Self, CommandError> {
        let HeadConfig { vocab_size, soft_cap, scale, .. } = checkpoint.config;
        let mut head = LoadedHead::plain(checkpoint.weight);
        let rows = head.weight.rows();
        if let Some(bias) = checkpoint.bias {
            if bias.cols() != rows {
                return Err(CommandError::usage(format!(
                    "the head's bias has {}, but its weight has {}",
                    line::count(bias.cols(), "value"),
                    line::count(rows, "row")
                )));
            }
            let mut values = vec![0.0; bias.cols()];
            bias.matrix()?.row_to_f32(0, &mut values);
            tracing::info!("the head has a bias");
            head.bias = Some(values);
        }
        match vocab_size {
            _ if args.vocab_size.is_some() => {}
            Some(size) if size < rows => {
                tracing::info!(
                    "config.json: vocab_size {size}; the weight has {} of padding",
                    line::count(rows - size, "row")
                );
                head.vocab_size = Some(size);
            }
            Some(size) if size > rows => {
                tracing::warn!("config.json: vocab_size {size}, but the weight has {}", line::count(rows, "row"));
            }
            _ => {}
        }
        if let (Some(cap), None) = (soft_cap, args.soft_cap) {
            tracing::info!("config.json: final_logit_softcapping {cap}");
            head.soft_cap = Some(cap);
        }
        match scale {
            _ if args.scale.is_some() => {}
            Some((key, Scale::Factor(factor))) => {
                tracing::info!("config.json: {key}; the logits are multiplied by {factor}");
                head.scale = Some(factor);
            }
            Some((key, Scale::Unclear)) => {
                let message =
                    format!("config.json scales the logits by {key} in a way that is not clear; give --scale");
                return Err(CommandError::usage(message));
            }
            None => {}
        }
        Ok(head)
    }

    /// What the flags say, over what the files said.
    pub(crate) fn with_flags(mut self, args: &HeadArgs) -> Result<Self, CommandError> {
        let rows = self.weight.rows();
        if let Some(size) = args.vocab_size.filter(|size| !(1..=rows).contains(size)) {
            let message = format!("--vocab-size {size}: it must be 1 to {rows}, the rows of the weight");
            return Err(CommandError::usage(message));
        }
        self.vocab_size = args.vocab_size.or(self.vocab_size);
        self.soft_cap = args.soft_cap.or(self.soft_cap);
        self.scale = args.scale.or(self.scale);
        Ok(self)
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
}
