//! `flash-sampling bench`: which variant and instruction set is fastest on this machine.
//!
//! Contenders run in turn in one process, and the best of several rounds counts. The crate `benches` compares with
//! other programs, and times filters and ranks, with the same modules.
//!
//! | module | content |
//! | --- | --- |
//! | [`cases`] | the contenders |
//! | [`fallback`] | the rows that fall back from a shadow |
//! | [`timing`] | timing in turn |
//! | [`read`] | the plain streaming read |
//! | [`record`], [`table`] | the results as JSON and text |

pub mod cases;
pub mod fallback;
pub mod read;
pub mod record;
pub mod table;
pub mod timing;

pub use timing::time;

use crate::args::{BenchArgs, BenchSize};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output;
use cases::{Inputs, Ours};
use flash_sampling::DType;
use record::{Record, Section};
use serde::Serialize;
use std::io::{self, Write};
use std::path::Path;

/// Writes a part of the table and flushes it, since the next part may take minutes.
pub fn show(out: &mut dyn Write, part: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), CommandError> {
    part(out).and_then(|()| out.flush()).map_err(CommandError::write("to standard output"))
}

/// Adds a section to the record, and writes it by `table`. The machine precedes the first section.
pub fn add(
    record: &mut Record,
    section: Section,
    out: &mut dyn Write,
    table: impl FnOnce(&mut dyn Write, &Section) -> io::Result<()>,
) -> Result<(), CommandError> {
    if record.sections.is_empty() {
        show(out, |out| table::begin(out, record))?;
    }
    show(out, |out| table(out, &section))?;
    record.sections.push(section);
    Ok(())
}

/// Writes a record to a file, if a flag names one.
pub fn save(record: &impl Serialize, path: Option<&Path>) -> Result<(), CommandError> {
    let Some(path) = path else { return Ok(()) };
    let mut text = serde_json::to_string_pretty(record).map_err(|error| CommandError::usage(error.to_string()))?;
    text.push('\n');
    std::fs::write(path, text).map_err(CommandError::write(path.display().to_string()))
}

/// Times the variants and the instruction sets, prints each part of the table when it is done, and writes the record.
///
/// # Errors
/// Bad flags, errors of the backend, files that cannot be written, Ctrl-C.
pub fn run(args: &BenchArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    // Checked before minutes of work.
    args.sizes.json.iter().try_for_each(|path| output::try_path(path))?;
    let ours = args.ours();
    let mut record = Record { quick: args.sizes.quick, ..Record::begin() };
    for size in args.sizes() {
        variants(&ours, &size, args.sizes.dtype, &mut record, out, interrupt)?;
    }
    end(&record, args.sizes.json.as_deref(), out)?;
    Ok(0)
}

/// Times samplers over one head.
pub fn variants(
    ours: &Ours,
    size: &BenchSize,
    dtype: DType,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let most = size.rows.iter().copied().max().unwrap_or(1);
    let mut inputs = Inputs::new(size.vocab, size.hidden, most, dtype)?;
    if ours.shadow {
        inputs.make_shadow()?;
    }
    for &rows in &size.rows {
        let section = inputs.section(ours, rows, size.rounds);
        let mut section = time(section, inputs.contenders(ours, rows)?, interrupt)?;
        section.fallbacks = fallback::count(&inputs, ours, (rows, size.rounds), interrupt)?;
        add(record, section, out, table::section)?;
    }
    Ok(())
}

/// Writes the legend, then the record.
pub fn end(record: &Record, json: Option<&Path>, out: &mut dyn Write) -> Result<(), CommandError> {
    show(out, table::legend)?;
    save(record, json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufWriter;

    #[test]
    fn each_section_is_seen_when_it_is_done() {
        let (mut out, mut record) = (BufWriter::with_capacity(1 << 16, Vec::new()), Record::begin());
        for rounds in [3, 4] {
            add(&mut record, Section::of_logits("a section", 64, rounds), &mut out, table::section).unwrap();
            let seen = String::from_utf8_lossy(out.get_ref());
            assert!(seen.contains(&record.when) && seen.contains(&format!("best of {rounds}")), "{seen}");
        }
        assert_eq!(record.sections.len(), 2);
    }
}
