//! Flags of `verify`.

use crate::args::SamplerArgs;
use crate::args::values::choice;
use crate::input::similar::similar;
use clap::Args;
use flash_sampling_conformance::{Effort, Law, laws};
use std::path::PathBuf;

/// Flags of `verify`.
#[derive(Debug, Args)]
// `verify` makes its own heads, so `--shadow` takes no file.
#[command(mut_arg("shadow", |flag| flag.num_args(0).help("Make a shadow, an 8-bit copy of the weight, for each head")))]
pub struct VerifyArgs {
    /// Backend and variant.
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// Number of draws of the statistical laws.
    #[arg(long, value_parser = choice(EFFORTS), default_value = "quick", help_heading = "Laws")]
    pub effort: Effort,
    /// Check only this law; may be given several times (default: all laws).
    #[arg(long = "law", value_name = "NAME", value_parser = law, help_heading = "Laws")]
    pub laws: Vec<&'static Law>,
    /// Print every check, not only the one of each law that is closest to failure.
    #[arg(long, help_heading = "Output")]
    pub checks: bool,
    /// Write the report with plots as an HTML page.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub report: Option<PathBuf>,
}

const EFFORTS: &[(&str, &str, Effort)] =
    &[("quick", "four times the draws of the tests", Effort::Quick), ("full", "sixteen times as many", Effort::Full)];

/// All laws for the help, each with its promise.
pub(super) fn list() -> String {
    let laws = laws::ALL.iter().map(|law| format!("\n  {}\n      {}", law.name, law.promise));
    format!("All laws:{}", laws.collect::<String>())
}

fn law(name: &str) -> Result<&'static Law, String> {
    laws::named(name).ok_or_else(|| match similar(name, laws::ALL.iter().map(|law| law.name)) {
        Some(near) => format!("no such law; did you mean '{near}'? `verify --help` lists all"),
        None => format!("no such law; `verify --help` lists all {}", laws::ALL.len()),
    })
}
