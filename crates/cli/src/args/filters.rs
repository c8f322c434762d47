//! Flags of filters.

use crate::args::values::{choice, float};
use clap::Args;
use flash_sampling::{Order, RowParams};

/// Filters.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Filters")]
pub struct FilterArgs {
    /// Keep the K largest logits; 0 or -1 = all.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = top_k, allow_negative_numbers = true)]
    pub top_k: u32,
    /// Keep the most probable tokens until their total probability reaches P; 1 = all.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = float, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Keep probabilities of at least P times the largest; 0 = all.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub min_p: f32,
    /// Keep logits within N standard deviations of the largest; 0 = all.
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub top_n_sigma: f32,
    /// Keep probabilities of at least P; 0 = all.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub epsilon_cutoff: f32,
    /// Keep the tokens with surprisal nearest to the entropy until their total probability reaches P; 1 = all.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = float, allow_negative_numbers = true)]
    pub typical_p: f32,
    /// XTC (exclude top choices): drop all tokens with at least this probability except the least probable one.
    #[arg(long, value_name = "P", default_value_t = 0.1, value_parser = float, allow_negative_numbers = true)]
    pub xtc_threshold: f32,
    /// Probability that XTC applies to a row; 0 = off.
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = float, allow_negative_numbers = true)]
    pub xtc_probability: f32,
    /// Order of temperature and filters, as in this engine.
    #[arg(long, value_parser = choice(ORDERS), default_value = "vllm")]
    pub order: Order,
}

const ORDERS: &[(&str, &str, Order)] = &[
    ("vllm", "temperature, top-n-sigma, min-p, top-k, top-p, typical-p, epsilon, XTC", Order::Vllm),
    ("hugging-face", "temperature, top-n-sigma, top-k, top-p, min-p, typical-p, epsilon, XTC", Order::HuggingFace),
    ("llama-cpp", "top-n-sigma, top-k, typical-p, top-p, min-p, epsilon, XTC, temperature", Order::LlamaCpp),
];

fn top_k(text: &str) -> Result<u32, String> {
    match text.parse() {
        Err(_) if text == "-1" => Ok(0),
        number => number.map_err(|_| "it must be -1, or 0 to 4294967295".into()),
    }
}

impl FilterArgs {
    /// The row with these filters.
    pub fn apply<'a>(&self, row: RowParams<'a>) -> RowParams<'a> {
        RowParams {
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            top_n_sigma: self.top_n_sigma,
            epsilon_cutoff: self.epsilon_cutoff,
            typical_p: self.typical_p,
            xtc_threshold: self.xtc_threshold,
            xtc_probability: self.xtc_probability,
            order: self.order,
            ..row
        }
    }
}
