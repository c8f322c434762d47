//! `flash-sampling bench --pipeline`: filters, penalties and masks against the plain draw on the same rows.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`cases`] | what a row asks for, and draws of such rows |
//! | [`inputs`] | the kinds of logits |
//! | [`cpu`] | what is timed on the processor, and how many rows one pass decides |
//! | `cuda` | what is timed on a GPU (feature `cuda`) |
//! | `whole_calls` | whole calls there, second passes among them (feature `cuda`) |
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
#[cfg(feature = "cuda")]
pub mod whole_calls;

use crate::args::{BackendName, BenchArgs};
use crate::bench::record::Record;
use crate::bench::{STANDALONE_ROUNDS, cases::Ours, save, show, tell, time};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use cases::noted;
use cpu::{Fused, Standalone};
use inputs::Kind;
use std::io::Write;

/// Times every case on every kind of rows, counts passes, prints each part of the table as it is done, writes the record.
///
/// # Errors
/// What the backend refuses, files that cannot be written, Ctrl-C.
pub fn run(args: &BenchArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let mut record = Record { quick: args.quick, ..Record::begin() };
    match args.backend {
        BackendName::Cuda => on_gpu(args, &mut record, out, interrupt)?,
        BackendName::Cpu => on_cpu(args, &mut record, out, interrupt)?,
    }
    show(out, |out| table::end(out, &record.certified))?;
    save(&record, args)?;
    Ok(0)
}

fn on_cpu(
    args: &BenchArgs,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let ours = Ours { options: args.options(), variants: Vec::new() };
    for size in args.sizes() {
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let fused = Fused::new(&size, most, args.dtype.into())?;
        for &rows in &size.rows {
            for kind in Kind::ALL {
                let (contenders, passes) = fused.contenders(kind, &ours, rows)?;
                let section = time(fused.section(kind, &ours, rows, size.rounds), contenders, interrupt)?;
                tell(record, noted(section, &passes), out, table::section)?;
            }
        }
        for kind in Kind::ALL {
            let standalone = Standalone::new(size.vocab, kind, &ours);
            let (contenders, passes) = standalone.contenders()?;
            let section = time(standalone.section(size.rounds * STANDALONE_ROUNDS), contenders, interrupt)?;
            tell(record, noted(section, &passes), out, table::section)?;
            record.certified.extend(standalone.certified(if args.quick { 4 } else { cpu::ROWS }, interrupt)?);
        }
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn on_gpu(
    args: &BenchArgs,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    if args.transport.is_empty() {
        cuda::run(args, record, out, interrupt)
    } else {
        ranks::run(args, record, out, interrupt)
    }
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &BenchArgs, _: &mut Record, _: &mut dyn Write, _: &Interrupt) -> Result<(), CommandError> {
    Err(flash_sampling::BuildError::NotBuilt { feature: "cuda" }.into())
}
