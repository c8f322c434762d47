//! Flags of `shadow`.

use super::head::tensor_path;
use crate::input::TensorPath;
use clap::Args;
use std::path::PathBuf;

/// Flags of `shadow`.
#[derive(Debug, Args)]
pub struct ShadowArgs {
    /// The weight.
    #[command(flatten)]
    pub source: WeightArgs,
    /// The file to write (default: the name of the weight's file and `.shadow`, or `head.shadow` in a model's folder).
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Replace an existing file whose name ends in `.shadow`.
    #[arg(long)]
    pub force: bool,
}

/// The weight of a head.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct WeightArgs {
    /// The model whose head has the weight: a folder with a Hugging Face checkpoint, or a GGUF file.
    #[arg(long, value_name = "DIR|FILE")]
    pub model: Option<PathBuf>,
    /// The file of the head's weight, vocab x hidden, as for `sample`.
    #[arg(long, value_name = "FILE[:TENSOR]", value_parser = tensor_path)]
    pub weight: Option<TensorPath>,
}

impl ShadowArgs {
    /// The file to write.
    pub fn out(&self) -> PathBuf {
        let source = match (&self.out, &self.source.model, &self.source.weight) {
            (Some(out), ..) => return out.clone(),
            (None, Some(model), _) if !model.is_file() => return model.join("head.shadow"),
            (None, model, weight) => model.as_ref().or(weight.as_ref().map(|weight| &weight.file)),
        };
        let mut name = source.cloned().unwrap_or_default().into_os_string();
        name.push(".shadow");
        name.into()
    }
}
