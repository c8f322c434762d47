//! `flash-sampling bench --pipeline`: filters, penalties and masks against the plain draw on the same rows.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`cases`] | what a row asks for |
//! | [`inputs`] | the kinds of logits |
//! | [`cpu`] | what is timed on the processor, and how many rows one pass decides |
//! | `cuda` | what is timed on a GPU (feature `cuda`) |
//! | `ranks` | the same over shards on several GPUs, with `--transport` (feature `cuda`) |
//! | [`table`] | times, ratios and passes as text |

pub mod cases;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod inputs;
#[cfg(feature = "cuda")]
pub mod ranks;
pub mod table;

use crate::args::{BackendName, BenchArgs};
use crate::bench::record::Record;
use crate::bench::{STANDALONE_ROUNDS, cases::Ours, save, time};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use cpu::{Fused, Standalone, noted};
use inputs::Kind;
use std::io::Write;

/// Times every case on every kind of rows, counts passes, prints the table, writes the record.
///
/// # Errors
/// What the backend refuses, files that cannot be written, Ctrl-C.
pub fn run(args: &BenchArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    if args.backend == BackendName::Cuda {
        return on_gpu(args, out, interrupt);
    }
    let ours = Ours { options: args.options(), variants: Vec::new() };
    let (mut sections, mut certified) = (Vec::new(), Vec::new());
    for size in args.sizes() {
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let fused = Fused::new(&size, most, args.dtype.into())?;
        for &rows in &size.rows {
            for kind in Kind::ALL {
                let (contenders, passes) = fused.contenders(kind, &ours, rows)?;
                let section = time(fused.section(kind, &ours, rows, size.rounds), contenders, interrupt)?;
                sections.push(noted(section, &passes));
            }
        }
        for kind in Kind::ALL {
            let standalone = Standalone::new(size.vocab, kind, &ours);
            let (contenders, passes) = standalone.contenders()?;
            let section = time(standalone.section(size.rounds * STANDALONE_ROUNDS), contenders, interrupt)?;
            sections.push(noted(section, &passes));
            certified.extend(standalone.certified(if args.quick { 4 } else { cpu::ROWS }, interrupt)?);
        }
    }
    let record = Record { certified, ..Record::now(sections, Vec::new()) };
    table::write(out, &record, None).map_err(CommandError::write("to standard output"))?;
    save(&record, args)?;
    Ok(0)
}

#[cfg(feature = "cuda")]
fn on_gpu(args: &BenchArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let record = if args.transport.is_empty() { cuda::run(args, interrupt)? } else { ranks::run(args, interrupt)? };
    table::write(out, &record, None).map_err(CommandError::write("to standard output"))?;
    save(&record, args)?;
    Ok(0)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &BenchArgs, _: &mut dyn Write, _: &Interrupt) -> Result<u8, CommandError> {
    Err(flash_sampling::BuildError::NotBuilt { feature: "cuda" }.into())
}
