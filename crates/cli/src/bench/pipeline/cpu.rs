//! What is timed on the processor.

use super::cases::{Case, Lists, Noted, draw};
use super::inputs::Kind;
use crate::args::BenchSize;
use crate::bench::cases::Ours;
use crate::bench::record::{Certified, Passes, Section};
use crate::bench::timing::Contender;
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::load::Tensor;
use crate::synthetic;
use flash_sampling::cpu;
use flash_sampling::{CpuOptions, DType, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples, VariantConfig};
use std::cell::Cell;
use std::io;
use std::rc::Rc;

/// Rows of other logits for which passes are counted, and the draws of each.
pub const ROWS: usize = 64;
const POSITIONS: u64 = 16;

/// A head with hidden states of all kinds.
#[derive(Debug)]
pub struct Fused {
    weight: Tensor,
    states: Vec<(Kind, Tensor)>,
    lists: Lists,
}

impl Fused {
    /// A weight, and `rows` hidden states of each kind.
    ///
    /// # Errors
    /// When there is not that much memory.
    pub fn new(size: &BenchSize, rows: usize, dtype: DType) -> Result<Self, CommandError> {
        let &BenchSize { vocab, hidden, .. } = size;
        let failed =
            |error: io::Error| CommandError::usage(format!("cannot make a head of {vocab} x {hidden}: {error}"));
        let weight = synthetic::weight(vocab, hidden, dtype).map_err(failed)?;
        let states = Kind::ALL
            .into_iter()
            .map(|kind| Ok((kind, kind.states(weight.matrix()?, rows, dtype)?)))
            .collect::<Result<_, CommandError>>()?;
        Ok(Fused { weight, states, lists: Lists::new(vocab, rows) })
    }

    /// Every case on the first rows of a kind, and what each notes.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn contenders<'a>(
        &'a self,
        kind: Kind,
        ours: &Ours,
        rows: usize,
    ) -> Result<(Vec<Contender<'a>>, Noted), CommandError> {
        let head = Head::new(self.weight.matrix()?)?;
        let (mut contenders, mut noted) = (Vec::new(), Vec::new());
        for (_, states) in self.states.iter().filter(|(made, _)| *made == kind) {
            let input = states.matrix()?.row_range(0..rows);
            for case in Case::ALL {
                let mut sampler = ours.build(head, &VariantConfig::Tiled, rows)?;
                let sample = move |params: &[RowParams<'_>], out: &mut Samples| sampler.sample(input, params, out);
                let passes = Rc::new(Cell::default());
                noted.push(passes.clone());
                contenders.push(Contender::new(case.name(), draw(case, &self.lists, rows, sample, passes)));
            }
        }
        Ok((contenders, noted))
    }

    /// The section that these contenders make.
    pub fn section(&self, kind: Kind, ours: &Ours, rows: usize, rounds: usize) -> Section {
        let (what, size) = (format!("fused pipeline, {} rows", kind.name()), [self.weight.rows(), self.weight.cols()]);
        let section = Section::of_head(what, rows, size, self.weight.dtype(), rounds);
        Section { threads: Some(ours.threads()), ..section }
    }
}

/// A row of existing logits, on one thread.
#[derive(Debug)]
pub struct Standalone {
    kind: Kind,
    logits: Vec<f32>,
    lists: Lists,
    options: CpuOptions,
}

impl Standalone {
    /// One row of a kind.
    pub fn new(vocab: usize, kind: Kind, ours: &Ours) -> Self {
        let options = CpuOptions { threads: Some(1), ..ours.options };
        Standalone { kind, logits: kind.logits(vocab, 0), lists: Lists::new(vocab, 1), options }
    }

    /// The logits.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// A sampler for such rows.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn sampler(&self) -> Result<cpu::Standalone, CommandError> {
        let sampler = cpu::Standalone::new(self.logits.len(), Plan::default(), &self.options);
        Ok(sampler.map_err(flash_sampling::BuildError::from)?)
    }

    /// Every case, and what each notes.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn contenders(&self) -> Result<(Vec<Contender<'_>>, Noted), CommandError> {
        let input = Matrix::new(&self.logits, 1, self.logits.len())?;
        let (mut contenders, mut noted) = (Vec::new(), Vec::new());
        for case in Case::ALL {
            let passes = Rc::new(Cell::default());
            noted.push(passes.clone());
            let mut sampler = self.sampler()?;
            let sample = move |params: &[RowParams<'_>], out: &mut Samples| sampler.sample(input, params, out);
            contenders.push(Contender::new(case.name(), draw(case, &self.lists, 1, sample, passes)));
        }
        Ok((contenders, noted))
    }

    /// The section that these contenders make.
    pub fn section(&self, rounds: usize) -> Section {
        let what = format!("pipeline from logits, {} rows", self.kind.name());
        Section::of_logits(what, self.logits.len(), rounds)
    }

    /// How many of `rows` rows of other logits, drawn at several positions each, one pass decides, by case.
    ///
    /// # Errors
    /// What the backend refuses; Ctrl-C.
    pub fn certified(&self, rows: usize, interrupt: &Interrupt) -> Result<Vec<Certified>, CommandError> {
        let filters = Case::ALL.into_iter().filter(|case| !matches!(case, Case::Plain | Case::Penalties | Case::Mask));
        let mut counts: Vec<(Case, Passes)> = filters.map(|case| (case, Passes::default())).collect();
        let (mut sampler, mut out) = (self.sampler()?, Samples::new());
        for r in 0..rows {
            let logits = self.kind.logits(self.logits.len(), r);
            let input = Matrix::new(&logits, 1, logits.len())?;
            for (case, passes) in &mut counts {
                interrupt.check()?;
                for position in 0..POSITIONS {
                    sampler.sample(input, &[case.row(&self.lists, 0, r as u64, position)], &mut out)?;
                    passes.add(out.row(0).map_or(0, |row| row.passes));
                }
            }
        }
        let named = |(case, passes): (Case, Passes)| Certified {
            rows: self.kind.name().into(),
            case: case.name().into(),
            passes,
        };
        Ok(counts.into_iter().map(named).collect())
    }
}
