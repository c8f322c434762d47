//! The filter benchmarks on the CPU.

use super::cases::{Case, CountedPasses, Lists, draw, with_passes};
use super::inputs::{Inputs, Kind};
use super::table;
use crate::args::CpuBench;
use crate::cpu::STANDALONE_ROUNDS;
use crate::record::Record;
use flash_sampling::cpu;
use flash_sampling::{
    Backend, CpuOptions, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples, ShadowBuffer, VariantConfig,
    make_shadow,
};
use flash_sampling_cli::bench::cases::{sampler, threads};
use flash_sampling_cli::bench::record::{Entry, Section};
use flash_sampling_cli::bench::timing::Contender;
use flash_sampling_cli::bench::{add, show, time};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::interrupt::Interrupt;
use std::cell::Cell;
use std::io::Write;
use std::rc::Rc;

/// Times every case on every kind of rows, and counts the rows that one pass decides.
///
/// # Errors
/// Errors of the backend, Ctrl-C.
pub fn run(
    args: &CpuBench,
    record: &mut Record,
    out: &mut dyn Write,
    interrupt: &Interrupt,
) -> Result<(), CommandError> {
    let options = args.cpu.options();
    for size in args.sizes() {
        let (vocab, rounds) = (size.vocab, size.rounds);
        let inputs = Inputs::new(size, args.sizes.dtype)?;
        let head = Head::new(inputs.weight.matrix()?)?;
        let shadow = args.shadow.then(|| make_shadow(&head.weight())).transpose();
        let shadow = shadow.map_err(|error| CommandError::usage(error.to_string()))?;
        for &rows in &inputs.size.rows {
            for (kind, states) in &inputs.states {
                let states = states.matrix()?.row_range(0..rows);
                let (mut contenders, mut passes) = fused(&inputs, head, states, options)?;
                if let Some(shadow) = &shadow {
                    let (from_shadow, counted) = fused(&inputs, with_shadow(head, shadow)?, states, options)?;
                    contenders.extend(from_shadow);
                    passes.extend(counted);
                }
                let section = inputs.section("fused pipeline", *kind, rows, rounds);
                let section = time(Section { threads: Some(threads(&options)), ..section }, contenders, interrupt)?;
                let (section, from_shadow) = split(with_passes(section, &passes));
                add(record, section, out, table::section)?;
                if let Some(section) = from_shadow {
                    add(record, section, out, table::section)?;
                }
            }
        }
        for kind in Kind::ALL {
            let standalone = Standalone::new(vocab, kind, &options);
            let (contenders, passes) = standalone.contenders()?;
            let section = time(standalone.section(rounds), contenders, interrupt)?;
            add(record, with_passes(section, &passes), out, table::section)?;
        }
    }
    show(out, table::end)
}

/// The contenders of every case on these hidden states, and their passes.
fn fused<'a>(
    inputs: &'a Inputs,
    head: Head<'a>,
    states: Matrix<'a>,
    options: CpuOptions,
) -> Result<(Vec<Contender<'a>>, CountedPasses), CommandError> {
    let (mut contenders, mut counted) = (Vec::new(), Vec::new());
    for case in Case::ALL {
        let mut sampler = sampler(head, Backend::Cpu(options), VariantConfig::Tiled, states.rows())?;
        let sample = move |params: &[RowParams<'_>], out: &mut Samples| sampler.sample(states, params, out);
        let passes = Rc::new(Cell::default());
        counted.push(passes.clone());
        contenders.push(Contender::new(case.name(), draw(case, &inputs.lists, states.rows(), sample, passes)));
    }
    Ok((contenders, counted))
}

fn with_shadow<'a>(head: Head<'a>, shadow: &'a ShadowBuffer) -> Result<Head<'a>, CommandError> {
    head.with_shadow(shadow.shadow()).map_err(|error| CommandError::usage(error.to_string()))
}

/// Moves the contenders with a shadow, which follow the others, to a section of their own. Its peers are the contenders
/// without a shadow.
fn split(mut section: Section) -> (Section, Option<Section>) {
    let entries = section.entries.split_off(Case::ALL.len());
    if entries.is_empty() {
        return (section, None);
    }
    let peer = |entry: &Entry| Entry { name: format!("without a shadow: {}", entry.name), ..entry.clone() };
    let peers = section.entries.iter().map(peer).collect();
    let from_shadow =
        Section { what: section.what.replacen(',', " with a shadow,", 1), entries, peers, ..section.clone() };
    (section, Some(from_shadow))
}

/// A row of logits in memory, drawn on one thread.
struct Standalone {
    kind: Kind,
    logits: Vec<f32>,
    lists: Lists,
    options: CpuOptions,
}

impl Standalone {
    /// A row of this kind.
    fn new(vocab: usize, kind: Kind, options: &CpuOptions) -> Self {
        let options = CpuOptions { threads: Some(1), ..*options };
        Standalone { kind, logits: kind.logits(vocab, 0), lists: Lists::new(vocab, 1), options }
    }

    /// A sampler for such rows.
    fn sampler(&self) -> Result<cpu::Standalone, CommandError> {
        let sampler = cpu::Standalone::new(self.logits.len(), Plan::default(), &self.options);
        Ok(sampler.map_err(flash_sampling::BuildError::from)?)
    }

    /// The contenders of every case, and their passes.
    fn contenders(&self) -> Result<(Vec<Contender<'_>>, CountedPasses), CommandError> {
        let input = Matrix::new(&self.logits, 1, self.logits.len())?;
        let (mut contenders, mut counted) = (Vec::new(), Vec::new());
        for case in Case::ALL {
            let passes = Rc::new(Cell::default());
            counted.push(passes.clone());
            let mut sampler = self.sampler()?;
            let sample = move |params: &[RowParams<'_>], out: &mut Samples| sampler.sample(input, params, out);
            contenders.push(Contender::new(case.name(), draw(case, &self.lists, 1, sample, passes)));
        }
        Ok((contenders, counted))
    }

    /// The section for these contenders, without entries.
    fn section(&self, rounds: usize) -> Section {
        let what = format!("pipeline from logits, {} rows", self.kind.name());
        Section::of_logits(what, self.logits.len(), rounds * STANDALONE_ROUNDS)
    }
}
