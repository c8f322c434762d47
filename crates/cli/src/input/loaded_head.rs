//! A head from files, with its transforms.

use crate::args::{HeadOverrides, SamplerArgs};
use crate::error::CommandError;
use crate::input::checkpoint::Checkpoint;
use crate::input::config::{HeadConfig, Scale};
use crate::input::shadow::LoadedShadow;
use crate::input::tensor::Tensor;
use crate::output::line;
use flash_sampling::{Head, HeadError};

/// A head's weight and transforms.
#[derive(Debug)]
pub struct LoadedHead {
    pub(crate) weight: Tensor,
    bias: Option<Vec<f32>>,
    transforms: HeadOverrides,
    shadow: Option<LoadedShadow>,
    /// Lines for the log: the content of the files about the head.
    notes: Vec<String>,
}

impl LoadedHead {
    /// A weight with the transforms of the flags.
    pub(crate) fn new(weight: Tensor, transforms: HeadOverrides) -> Result<Self, String> {
        let rows = weight.rows();
        match transforms.vocab_size.filter(|size| !(1..=rows).contains(size)) {
            Some(size) => Err(format!("--vocab-size {size}: it must be 1 to {rows}, the rows of the weight")),
            None => Ok(LoadedHead { weight, bias: None, transforms, shadow: None, notes: Vec::new() }),
        }
    }

    /// The head of a checkpoint, with its own transforms where `overrides` has none.
    pub(crate) fn of_checkpoint(checkpoint: Checkpoint, overrides: HeadOverrides) -> Result<Self, String> {
        let HeadConfig { vocab_size, soft_cap, scale, .. } = checkpoint.config;
        let origin = checkpoint.origin;
        let mut head = LoadedHead::new(checkpoint.weight, overrides)?;
        let rows = head.weight.rows();
        if let Some(bias) = checkpoint.bias {
            if bias.cols() != rows {
                let (values, rows) = (line::count(bias.cols(), "value"), line::count(rows, "row"));
                return Err(format!("the head's bias has {values}, but its weight has {rows}"));
            }
            let mut values = vec![0.0; bias.cols()];
            bias.matrix().map_err(|error| error.to_string())?.row_to_f32(0, &mut values);
            head.notes.push("the head has a bias".into());
            head.bias = Some(values);
        }
        if let (Some(size), None) = (vocab_size, overrides.vocab_size) {
            if size < rows {
                let padding = line::count(rows - size, "row");
                head.notes.push(format!("{origin}: vocab_size {size}; the weight has {padding} of padding"));
                head.transforms.vocab_size = Some(size);
            } else if size > rows {
                let rows = line::count(rows, "row");
                tracing::warn!("{origin}: vocab_size {size}, but the weight has {rows}");
            }
        }
        if let (Some(cap), None) = (soft_cap, overrides.soft_cap) {
            head.notes.push(format!("{origin}: final_logit_softcapping {cap}"));
            head.transforms.soft_cap = Some(cap);
        }
        match scale.filter(|_| overrides.scale.is_none()) {
            Some((key, Scale::Factor(factor))) => {
                head.notes.push(format!("{origin}: {key}; the logits are multiplied by {factor}"));
                head.transforms.scale = Some(factor);
            }
            Some((key, Scale::Unclear)) => {
                return Err(format!("the value of {key} in {origin} is not a number or is ambiguous; give --scale"));
            }
            None => {}
        }
        Ok(head)
    }

    /// Makes or maps the shadow that the flags request.
    ///
    /// # Errors
    /// As for [`LoadedShadow::new`].
    pub(crate) fn load_shadow(&mut self, args: &SamplerArgs) -> Result<(), CommandError> {
        if args.shadow.is_some() {
            self.shadow = Some(LoadedShadow::new(args.shadow_file(), &self.weight.matrix()?)?);
        }
        Ok(())
    }

    /// Puts a line about the origin of the head before the other lines for the log.
    pub(crate) fn noted(mut self, origin: String) -> Self {
        self.notes.insert(0, origin);
        self
    }

    /// Logs what the files say about the head. Callers do so after all checks.
    pub(crate) fn log(&self) {
        self.notes.iter().for_each(|note| tracing::info!("{note}"));
    }

    /// The head.
    pub fn head(&self) -> Result<Head<'_>, HeadError> {
        let HeadOverrides { vocab_size, soft_cap, scale } = self.transforms;
        let mut head = Head::new(self.weight.matrix()?)?;
        if let Some(shadow) = &self.shadow {
            head = head.with_shadow(shadow.shadow())?;
        }
        if let Some(bias) = &self.bias {
            head = head.with_bias(bias)?;
        }
        if let Some(cap) = soft_cap {
            head = head.with_soft_cap(cap)?;
        }
        if let Some(scale) = scale {
            head = head.with_scale(scale)?;
        }
        if let Some(size) = vocab_size {
            head = head.with_vocab_size(size)?;
        }
        Ok(head)
    }
}
