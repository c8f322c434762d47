//! Flags of `verify`.

use crate::args::SamplerArgs;
use clap::{Args, ValueEnum};
use flash_sampling_conformance::{Law, laws};
use std::path::PathBuf;

/// Flags of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Backend and variant.
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// How many draws the statistical laws take.
    #[arg(long, value_enum, default_value_t = Effort::Quick)]
    pub effort: Effort,
    /// Only these laws (default: all).
    #[arg(long = "law", value_name = "NAME", value_parser = law)]
    pub laws: Vec<Named>,
    /// Print every check, not only each law's closest.
    #[arg(long)]
    pub checks: bool,
    /// Write the report with its plots as a page of HTML.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// How many draws the statistical laws take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Effort {
    /// As many as the tests take.
    Quick,
    /// Sixteen times as many.
    Full,
}

/// A law by its name.
#[derive(Clone, Copy, Debug)]
pub struct Named(pub &'static Law);

fn law(name: &str) -> Result<Named, String> {
    laws::named(name).map(Named).ok_or_else(|| {
        let names: Vec<_> = laws::ALL.iter().map(|law| law.name).collect();
        format!("known are {}", names.join(", "))
    })
}
