//! Flags that choose the head and the hidden states.

use crate::args::values::{float, whole};
use crate::input::TensorPath;
use clap::Args;
use std::convert::Infallible;
use std::path::PathBuf;

/// The head and the hidden states.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Head and hidden states (without any: a built-in head)")]
pub struct HeadArgs {
    /// A model: a Hugging Face checkpoint folder (lm_head.weight or the tied embedding, in one file or in shards), or a GGUF
    /// file.
    #[arg(long, value_name = "DIR|FILE", conflicts_with = "weight", requires = "hidden")]
    pub model: Option<PathBuf>,
    /// The head's weight, vocab x hidden: in bf16 (not .npy), f16 or f32 in a safetensors, GGUF or .npy file, in fp8
    /// (e4m3) or int8 with scales in a safetensors file, or in blocks in a GGUF file. Without :TENSOR, the weight in a
    /// GGUF file is output.weight or token_embd.weight.
    #[arg(long, value_name = "FILE[:TENSOR]", value_parser = tensor_path, requires = "hidden")]
    pub weight: Option<TensorPath>,
    /// Hidden states, rows x hidden or a single row: in bf16 (not .npy), f16 or f32 in a safetensors, GGUF or .npy file.
    #[arg(long, value_name = "FILE[:TENSOR]", value_parser = tensor_path)]
    pub hidden: Option<TensorPath>,
    /// Transforms of the logits.
    #[command(flatten)]
    pub overrides: HeadOverrides,
}

/// Parameters of a head that override those of the model.
#[derive(Clone, Copy, Debug, Default, Args)]
#[command(next_help_heading = "Head and hidden states (without any: a built-in head)")]
pub struct HeadOverrides {
    /// Use only the first N rows of the weight as tokens; the other rows are padding. Overrides the model's size.
    #[arg(long, value_name = "N", value_parser = whole(0..=u32::MAX as usize), allow_negative_numbers = true)]
    pub vocab_size: Option<usize>,
    /// Cap the logits: cap * tanh(logit / cap). Overrides the model's cap.
    #[arg(long, value_name = "CAP", value_parser = factor, allow_negative_numbers = true)]
    pub soft_cap: Option<f32>,
    /// Multiply the logits, after the cap. Overrides the model's factor.
    #[arg(long, value_name = "FACTOR", value_parser = factor, allow_negative_numbers = true)]
    pub scale: Option<f32>,
}

fn factor(text: &str) -> Result<f32, String> {
    match float(text)? {
        factor if factor > 0.0 && factor.is_finite() => Ok(factor),
        _ => Err("it must be finite and above 0".into()),
    }
}

pub(super) fn tensor_path(text: &str) -> Result<TensorPath, Infallible> {
    Ok(TensorPath::parse(text))
}
