//! Times of a step on several GPUs, and their ratios.

use super::{ALONE, CUBLAS, SHARD};
use crate::record::Record;
use flash_sampling_cli::bench::record::Section;
use std::io::{self, Write};

/// Writes two tables per head: microseconds, then ratios.
///
/// # Errors
/// Errors of `out`.
pub fn write(out: &mut dyn Write, record: &Record, world: usize) -> io::Result<()> {
    let mut rest = record.sections.as_slice();
    while let Some(first) = rest.first() {
        let is_alike = |section: &Section| (section.vocab, section.hidden) == (first.vocab, first.hidden);
        let (head, others) = rest.split_at(rest.iter().position(|section| !is_alike(section)).unwrap_or(rest.len()));
        rest = others;
        let names: Vec<_> = first.entries.iter().map(|entry| entry.name.as_str()).collect();
        let hidden = first.hidden.unwrap_or(0);
        writeln!(out, "\n{} x {hidden}, {}, {world} GPUs: microseconds a step", first.vocab, first.dtypes)?;
        write!(out, "  rows")?;
        names.iter().try_for_each(|name| write!(out, "{name:>20}"))?;
        writeln!(out)?;
        for section in head {
            write!(out, "  {:>4}", section.rows)?;
            for name in &names {
                write!(out, "{:>20.1}", section.entry(name).map_or(f64::NAN, |entry| entry.best * 1e6))?;
            }
            writeln!(out)?;
        }
        let ours = names.iter().filter(|name| ![ALONE, SHARD].contains(name) && !CUBLAS.contains(name));
        for name in ours {
            writeln!(
                out,
                "{name}: share of one GPU; microseconds above the shard alone; times as fast as gather and draw"
            )?;
            for section in head {
                let best = |name: &str| section.entry(name).map_or(f64::NAN, |entry| entry.best);
                let (time, alone, shard, rival) = (best(name), best(ALONE), best(SHARD), best(CUBLAS[2]));
                let (share, above, faster) = (time / alone, (time - shard) * 1e6, rival / time);
                writeln!(out, "  {:>4} {share:>8.3} {above:>8.1} {faster:>8.2}", section.rows)?;
            }
        }
    }
    Ok(())
}
