//! The table of ratios, part by part.

use crate::bench::record::{Fallback, Record, Section};
use crate::output::line;
use std::io::{self, Write};

/// The physical limit.
pub const READ: &str = "read";
/// The tiled variant without noise.
pub const GREEDY: &str = "greedy";
/// The second read of a GPU.
pub const BULK: &str = "read, bulk copies";
/// NVIDIA's matmul alone.
pub const CUBLAS: &str = "cuBLAS";

/// Writes the machine and the time of the figures.
pub fn begin(out: &mut dyn Write, record: &Record) -> io::Result<()> {
    writeln!(out, "{}; {}; flash-sampling {}", record.machine, record.when, record.version)?;
    if record.quick {
        writeln!(out, "--quick: small heads and few rounds show that everything runs; the times mean nothing")?;
    }
    Ok(())
}

/// Writes the meaning of the lines and the columns of a section.
pub fn legend(out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "\nlines: with the fastest instruction set for the types, unless a line or a flag names another\n  \
         read         plain reads of the weight (or of the logits), without a sampler\n  \
         greedy       the tiled variant at temperature 0, which adds no noise\n  \
         gaussian     a draw at temperature 1 from Gaussian logits\n  \
         peaked       a draw at temperature 1 from logits with a few tokens far above a Gaussian bulk\n  \
         shadow       the draw reads an 8-bit copy of the weight, so \"of read\" can be above 1\n\
         columns\n  \
         ms           time of the shortest call\n  \
         GB/s         bytes of the weight, or of the logits, over this time\n  \
         of read      time of a plain read of these bytes over this time; 1 is the limit of the memory\n  \
         / greedy     this time over the greedy time"
    )
}

/// Writes a section.
pub fn section(out: &mut dyn Write, section: &Section) -> io::Result<()> {
    let size = section.hidden.map_or_else(|| format!("{}", section.vocab), |h| format!("{} x {h}", section.vocab));
    writeln!(
        out,
        "\n{}: {}, {size} {}{}, best of {}",
        section.what,
        line::count(section.rows, "row"),
        section.dtypes,
        section.threads.map_or_else(String::new, |threads| format!(", {}", line::count(threads, "thread"))),
        section.rounds
    )?;
    let names = ("ms", "GB/s", "of read", "/ greedy");
    writeln!(out, "  {:<28} {:>10} {:>9} {:>8} {:>10}", "", names.0, names.1, names.2, names.3)?;
    let best = |name: &str| section.entry(name).map(|entry| entry.best);
    let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "-".into(), |r| format!("{r:.3}"));
    for entry in &section.entries {
        let of_read = ratio(section.read().map(|read| read / entry.best));
        let over_greedy = ratio(best(GREEDY).map(|greedy| entry.best / greedy));
        let (ms, gb) = (entry.best * 1e3, section.bytes as f64 / entry.best / 1e9);
        writeln!(out, "  {:<28} {ms:>10.3} {gb:>9.2} {of_read:>8} {over_greedy:>10}", entry.name)?;
    }
    fallbacks(out, &section.fallbacks)
}

/// Writes the rows that fall back as a line.
fn fallbacks(out: &mut dyn Write, counts: &[Fallback]) -> io::Result<()> {
    if counts.is_empty() {
        return Ok(());
    }
    let counts = counts
        .iter()
        .map(|count| format!("{} of {} at temperature {}", count.fallback_rows, count.rows, count.temperature));
    writeln!(out, "  peaked rows that fall back from the shadow: {}", counts.collect::<Vec<_>>().join(", "))
}
