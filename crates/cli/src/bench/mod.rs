//! `flash-sampling bench`: times the variants against the physical limit and the same kernel without noise.
//!
//! All figures that are compared come from one run, timed in turn, best of several. The comparison with candle is
//! `cargo bench -p flash-sampling-candle --bench rival`, on the same parts.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`cases`] | what is timed |
//! | [`timing`] | contenders in turn |
//! | [`read`] | the plain streaming read |
//! | `cuda` | the same on a GPU, against cuBLAS (feature `cuda`) |
//! | [`pipeline`] | filters, penalties and masks against the plain draw |
//! | [`memory`] | peak memory of a piece of work |
//! | [`record`], [`table`], [`plots`] | the results as JSON, text and SVG |

pub mod cases;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod memory;
pub mod pipeline;
pub mod plots;
pub mod read;
pub mod record;
pub mod table;
pub mod timing;

use crate::args::{BackendName, BenchArgs};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::line;
use crate::{output, progress};
use cases::{Inputs, Ours, Rows};
use record::{Record, Section};
use std::io::{self, Write};
use timing::{Contender, in_turn};

/// Rounds of the standalone sampler for each round of the matmul: it takes a thousandth of the time.
pub const STANDALONE_ROUNDS: usize = 20;

/// Times contenders and fills their section.
///
/// # Errors
/// Those of [`in_turn`].
pub fn time(
    mut section: Section,
    mut contenders: Vec<Contender<'_>>,
    interrupt: &Interrupt,
) -> Result<Section, CommandError> {
    let bar = progress::bar("timing", ((section.rounds + 1) * contenders.len()) as u64);
    bar.set_message(line::count(section.rows, "row"));
    let timings = in_turn(&mut contenders, section.rounds, &bar, interrupt)?;
    bar.finish_and_clear();
    section.fill(contenders.iter().map(|contender| contender.name.as_str()), &timings);
    Ok(section)
}

/// Writes a part of the table, to be seen at once: the next may take minutes.
///
/// # Errors
/// [`CommandError::Write`].
pub fn show(out: &mut dyn Write, part: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), CommandError> {
    part(out).and_then(|()| out.flush()).map_err(CommandError::write("to standard output"))
}

/// Adds a section that is done to the record, and writes it as `table` does; before the first, whose figures follow.
///
/// # Errors
/// [`CommandError::Write`].
pub fn tell(
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

/// Writes the record and the picture where the flags say.
///
/// # Errors
/// [`CommandError::Write`].
pub fn save(record: &Record, args: &BenchArgs) -> Result<(), CommandError> {
    if let Some(path) = &args.json {
        let mut text = serde_json::to_string_pretty(record).map_err(|error| CommandError::usage(error.to_string()))?;
        text.push('\n');
        std::fs::write(path, text).map_err(CommandError::write(path.display().to_string()))?;
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, plots::picture(record)).map_err(CommandError::write(path.display().to_string()))?;
    }
    Ok(())
}

/// Times everything asked for, prints each part of the table as it is done, writes the record and the picture.
///
/// # Errors
/// Bad flags, what the backend refuses, files that cannot be written, Ctrl-C.
pub fn run(args: &BenchArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    args.check()?;
    // A path that cannot be written is found now, not when all is measured.
    args.json.iter().chain(&args.svg).try_for_each(|path| output::try_path(path))?;
    if args.pipeline {
        return pipeline::run(args, out, interrupt);
    }
    if args.backend == BackendName::Cuda {
        return cuda(args, out, interrupt);
    }
    let ours = Ours { options: args.options(), variants: args.variants() };
    let mut record = Record { quick: args.quick, ..Record::begin() };
    for size in args.sizes() {
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let inputs = Inputs::new(size.vocab, size.hidden, most, args.dtype.into())?;
        if !size.rows.is_empty() {
            record.memory.push(inputs.memory(&ours, most)?);
        }
        for &rows in &size.rows {
            let section = inputs.section(&ours, rows, size.rounds);
            let section = time(section, inputs.contenders(&ours, rows)?, interrupt)?;
            tell(&mut record, section, out, table::section)?;
        }
        let logits = Rows::new(size.vocab)?;
        let section = logits.section(size.rounds * STANDALONE_ROUNDS);
        let section = time(section, logits.contenders(&ours)?, interrupt)?;
        tell(&mut record, section, out, table::section)?;
    }
    show(out, table::columns)?;
    show(out, |out| record.memory.iter().try_for_each(|memory| table::memory(out, memory)))?;
    save(&record, args)?;
    Ok(0)
}

#[cfg(feature = "cuda")]
fn cuda(args: &BenchArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    cuda::run(args, out, interrupt)
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: &BenchArgs, _: &mut dyn Write, _: &Interrupt) -> Result<u8, CommandError> {
    Err(flash_sampling::BuildError::NotBuilt { feature: "cuda" }.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was written up to each flush.
    #[derive(Default)]
    struct Shown {
        text: Vec<u8>,
        parts: Vec<String>,
    }

    impl Write for Shown {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.text.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            self.parts.push(String::from_utf8_lossy(&std::mem::take(&mut self.text)).into());
            Ok(())
        }
    }

    #[test]
    fn each_section_is_seen_when_it_is_done() {
        let (mut out, mut record) = (Shown::default(), Record::begin());
        let logits = Rows::new(64).unwrap();
        for rounds in [3, 4] {
            tell(&mut record, logits.section(rounds), &mut out, table::section).unwrap();
        }
        let [begin, first, second] = &out.parts[..] else { panic!("{:?}", out.parts) };
        assert!(begin.contains(&record.when) && first.contains("best of 3") && second.contains("best of 4"));
        assert_eq!((record.sections.len(), out.text.len()), (2, 0));
    }
}
