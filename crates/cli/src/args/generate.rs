//! Flags of `generate`.

use super::{Format, ParamArgs, SamplerArgs, flags_of, ineffective_flags, values};
use crate::error::CommandError;
use crate::sampler::Support;
use clap::Args;
use flash_sampling::SamplingParamsBuilder;
use std::path::PathBuf;

/// Maximum of sequences in a batch.
const MAX_SEQUENCES: u32 = 4096;

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Model and text.
    #[command(flatten)]
    pub text: TextArgs,
    /// Draws.
    #[command(flatten)]
    pub draws: DrawArgs,
    /// Parameters of the draws.
    #[command(flatten)]
    pub fields: ParamArgs,
    /// Backend and variant of head and draw; the layers always run on the CPU.
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// Output format: text as it is drawn, or one JSON object per sequence.
    #[arg(long, value_enum, default_value_t = Format::Text, help_heading = "Output")]
    pub format: Format,
    /// Print at the end the speed, the share of head and draw in the time, the number of draws with more than one pass,
    /// and, with --shadow, the number of rows that read the weight instead of the copy.
    #[arg(long, help_heading = "Output")]
    pub report: bool,
}

/// Model and text.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model and text (without any: a built-in model that writes short stories)")]
pub struct TextArgs {
    /// A model: a checkpoint folder of Llama, Qwen3 or Gemma 2 in Hugging Face layout (config.json, tokenizer.json, and
    /// safetensors in one file or in shards), or a GGUF file of Llama or Qwen3.
    #[arg(long, value_name = "DIR|FILE")]
    pub model: Option<PathBuf>,
    /// The beginning of the text, verbatim: no chat template is applied.
    #[arg(long, value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    pub prompt: String,
    /// Maximum of tokens to generate per sequence.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = values::whole(1..=u32::MAX), allow_negative_numbers = true)]
    pub max_tokens: u32,
    /// A text that ends a sequence and is not written; may be given several times. The model's end-of-sequence token always
    /// ends a sequence.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = stop)]
    pub stop: Vec<String>,
    /// Checkpoint folder or GGUF file of a draft model with the same tokenizer, for speculative decoding. The model verifies
    /// several draft tokens in one run of its layers. The text does not change.
    #[arg(long, value_name = "DIR|FILE")]
    pub draft: Option<PathBuf>,
    /// Draft tokens per step (default 4); for --draft.
    #[arg(long, value_name = "N", requires = "draft", value_parser = values::whole(1..=64_u32), allow_negative_numbers = true)]
    pub draft_tokens: Option<u32>,
    /// Number of sequences in the batch. Sequence i has seed SEED + i, and is the same as in a run of its own.
    #[arg(long, short = 'n', alias = "n", value_name = "N", default_value_t = 1, value_parser = values::whole(1..=MAX_SEQUENCES), allow_negative_numbers = true)]
    pub num_sequences: u32,
}

/// Draws.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Draws")]
pub struct DrawArgs {
    /// The seed of the first sequence. It is 0 by default, and also for -1, vLLM's value for no seed.
    #[arg(long, value_name = "SEED", value_parser = values::seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Decide near ties by float64 sums in a fixed order.
    #[arg(long)]
    pub canonical: bool,
    /// Read these parameters from a JSON file: one object for every sequence, or an array with one object per sequence. Fields
    /// and defaults are those of vLLM's SamplingParams (temperature 1). A seed in the file is used as it is.
    #[arg(long, value_name = "FILE", conflicts_with_all = flags_of::<ParamArgs>())]
    pub params: Option<PathBuf>,
}

impl GenerateArgs {
    /// Refuses values out of range, flags without effect and flags that the sampler lacks, before a model is read.
    ///
    /// # Errors
    /// [`CommandError::Usage`], which names the flag.
    pub fn check(&self) -> Result<(), CommandError> {
        let mut fields = self.fields();
        // The model has tokens that end a sequence.
        fields.stop_token_ids.push(0);
        let params = values::build(fields, None)?;
        let history = ineffective_flags::placeholder_history();
        let row = params.row(0, 0, Some(&history));
        let (least, most) = (row.min_tokens, self.text.max_tokens);
        if least > most {
            return Err(CommandError::usage(format!("--min-tokens is {least}, but --max-tokens is {most}")));
        }
        ineffective_flags::refuse(&ineffective_flags::knobs(&row))?;
        Support::new(&self.sampler, self.draws.canonical)?.refuse(&row)
    }

    /// The fields of every sequence.
    pub(crate) fn fields(&self) -> SamplingParamsBuilder {
        self.fields.fields(0.8)
    }
}

fn stop(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("an empty text would end every sequence at once".into()) } else { Ok(text.into()) }
}
