//! What is timed.

use crate::bench::read;
use crate::bench::record::{Memory, Section};
use crate::bench::table::{GREEDY, PRODUCTS, READ};
use crate::bench::timing::Contender;
use crate::error::CommandError;
use crate::load::Tensor;
use crate::sampler::named;
use crate::synthetic::{self, Logits};
use flash_sampling::cpu::{Standalone, products};
use flash_sampling::{
    Backend, BackendConfig, CpuOptions, DType, Head, Isa, Matrix, PerturbedArgmax, Plan, RowParams, Samples,
    VariantConfig, build,
};

/// A head with hidden states of both kinds of logits.
#[derive(Debug)]
pub struct Inputs {
    weight: Tensor,
    gaussian: Tensor,
    peaked: Tensor,
}

/// How our samplers are run.
#[derive(Clone, Debug)]
pub struct Ours {
    /// Instruction set and threads.
    pub options: CpuOptions,
    /// The variants to time, with their names.
    pub variants: Vec<(String, VariantConfig)>,
}

impl Ours {
    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.options.threads.unwrap_or_else(rayon::current_num_threads)
    }

    /// A sampler of a variant.
    ///
    /// # Errors
    /// What the backend refuses.
    pub(super) fn build<'w>(
        &self,
        head: Head<'w>,
        variant: &VariantConfig,
        max_rows: usize,
    ) -> Result<Box<dyn PerturbedArgmax + 'w>, CommandError> {
        let plan = Plan { max_rows, ..Plan::default() };
        let config = BackendConfig { backend: Backend::Cpu(self.options), variant: variant.clone(), plan };
        build(head, &config).map_err(named)
    }
}

/// One draw from the whole softmax.
fn plain() -> RowParams<'static> {
    RowParams::default()
}

/// The argmax.
fn greedy() -> RowParams<'static> {
    RowParams { temperature: 0.0, ..plain() }
}

/// The draws of each row with these parameters, at a position of its own in each call.
fn draw<'a>(
    mut sampler: Box<dyn PerturbedArgmax + 'a>,
    input: Matrix<'a>,
    of_row: RowParams<'a>,
) -> impl FnMut() -> Result<(), CommandError> + 'a {
    let mut position = 0;
    let mut out = Samples::new();
    let mut params = vec![RowParams::default(); input.rows()];
    move || {
        for (seed, params) in (0..).zip(&mut params) {
            *params = RowParams { seed, position, ..of_row };
        }
        position += 1;
        sampler.sample(input, &params, &mut out)?;
        match out.iter().find_map(Result::err) {
            Some(error) => Err(CommandError::usage(format!("a row of the benchmark failed: {error}"))),
            None => Ok(()),
        }
    }
}

/// `count` multiply-adds in all with this many threads, on cached data of one type.
fn multiply(isa: Option<Isa>, dtype: DType, count: u64, threads: usize) -> Result<(), CommandError> {
    let part = count.div_ceil(threads.max(1) as u64);
    let one = || products(isa, dtype, dtype, part);
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(one)).collect();
        let first = one();
        // A thread that panicked has said so itself.
        others.into_iter().filter_map(|other| other.join().ok()).fold(first, Result::and)
    })
    .map_err(|error| CommandError::usage(error.to_string()))
}

impl Inputs {
    /// A weight `[vocab, hidden]` and `rows` hidden states of each kind.
    ///
    /// # Errors
    /// When there is not that much memory.
    pub fn new(vocab: usize, hidden: usize, rows: usize, dtype: DType) -> Result<Self, CommandError> {
        let failed = |error| CommandError::usage(format!("cannot make a head of {vocab} x {hidden}: {error}"));
        let weight = synthetic::weight(vocab, hidden, dtype).map_err(failed)?;
        let states = |logits| synthetic::hidden(weight.matrix()?, rows, dtype, logits).map_err(failed);
        Ok(Inputs { gaussian: states(Logits::Gaussian)?, peaked: states(Logits::Peaked)?, weight })
    }

    /// The weight.
    ///
    /// # Errors
    /// A shape that cannot be used.
    pub fn weight(&self) -> Result<Matrix<'_>, CommandError> {
        Ok(self.weight.matrix()?)
    }

    /// The first rows of the hidden states.
    ///
    /// # Errors
    /// A shape that cannot be used.
    pub fn states(&self, logits: Logits, rows: usize) -> Result<Matrix<'_>, CommandError> {
        let states = match logits {
            Logits::Gaussian => &self.gaussian,
            Logits::Peaked => &self.peaked,
        };
        Ok(states.matrix()?.row_range(0..rows))
    }

    /// The two limits (the read, the products), the tiled kernel without noise, and the draws, for the first rows.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn contenders<'a>(&'a self, ours: &Ours, rows: usize) -> Result<Vec<Contender<'a>>, CommandError> {
        let weight = self.weight()?;
        let head = Head::new(weight)?;
        let (gaussian, peaked) = (self.states(Logits::Gaussian, rows)?, self.states(Logits::Peaked, rows)?);
        let threads = ours.threads();
        let tiled = || ours.build(head, &VariantConfig::Tiled, rows);
        let mut contenders = vec![
            Contender::new(READ, move || {
                read::stream(weight.bytes(), threads);
                Ok(())
            }),
            Contender::new(PRODUCTS, {
                let (isa, count) = (ours.options.isa, (rows * weight.rows() * weight.cols()) as u64);
                move || multiply(isa, weight.dtype(), count, threads)
            }),
            Contender::new(GREEDY, draw(tiled()?, peaked, greedy())),
        ];
        for (name, variant) in &ours.variants {
            let sampler = || ours.build(head, variant, rows);
            if *variant == VariantConfig::Tiled {
                contenders.push(Contender::new(format!("{name}, gaussian"), draw(sampler()?, gaussian, plain())));
            }
            contenders.push(Contender::new(format!("{name}, peaked"), draw(sampler()?, peaked, plain())));
        }
        Ok(contenders)
    }

    /// The section that these contenders make.
    pub fn section(&self, ours: &Ours, rows: usize, rounds: usize) -> Section {
        let size = [self.weight.rows(), self.weight.cols()];
        let section = Section::of_head("matmul and draw", rows, size, self.weight.dtype(), rounds);
        Section { threads: Some(ours.threads()), ..section }
    }

    /// Peak memory of planning the tiled variant and drawing once.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn memory(&self, ours: &Ours, rows: usize) -> Result<Memory, CommandError> {
        let head = Head::new(self.weight()?)?;
        let states = self.states(Logits::Peaked, rows)?;
        let peak =
            super::memory::peak_rise(|| draw(ours.build(head, &VariantConfig::Tiled, rows)?, states, plain())())?;
        let logits = (rows * self.weight.rows() * size_of::<f32>()) as u64;
        Ok(Memory { what: "tiled".into(), rows, peak, logits })
    }
}

/// Peaked logits `[1, vocab]`, for the standalone sampler.
#[derive(Debug)]
pub struct Rows {
    logits: Vec<f32>,
}

impl Rows {
    /// The logits of a small synthetic head.
    ///
    /// # Errors
    /// When there is not that much memory.
    pub fn new(vocab: usize) -> Result<Self, CommandError> {
        const HIDDEN: usize = 64;
        let inputs = Inputs::new(vocab, HIDDEN, 1, DType::F32)?;
        let (weight, states) = (inputs.weight()?, inputs.states(Logits::Peaked, 1)?);
        let (mut w, mut h) = ([0f32; HIDDEN], [0f32; HIDDEN]);
        states.row_to_f32(0, &mut h);
        let dot = |token| {
            weight.row_to_f32(token, &mut w);
            w.iter().zip(&h).map(|(w, h)| w * h).sum()
        };
        Ok(Rows { logits: (0..vocab).map(dot).collect() })
    }

    /// The logits.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// The read, the argmax, the draw, and what filters, a temperature and many draws take, on one thread.
    ///
    /// # Errors
    /// What the backend refuses.
    pub fn contenders(&self, ours: &Ours) -> Result<Vec<Contender<'_>>, CommandError> {
        let options = CpuOptions { threads: Some(1), ..ours.options };
        let input = Matrix::new(&self.logits, 1, self.logits.len())?;
        let bytes = input.bytes();
        let mut contenders = vec![Contender::new(READ, move || {
            std::hint::black_box(read::fold(bytes));
            Ok(())
        })];
        for (name, of_row) in [
            (GREEDY, greedy()),
            ("standalone, peaked", plain()),
            ("temperature 0.8", RowParams { temperature: 0.8, ..plain() }),
            ("min-p 0.05", RowParams { min_p: 0.05, ..plain() }),
            ("top-k 20", RowParams { top_k: 20, ..plain() }),
            ("top-p 0.95", RowParams { top_p: 0.95, ..plain() }),
            ("1000 draws", RowParams { draws: 1000, ..plain() }),
        ] {
            let plan = Plan { max_draws: of_row.draws, ..Plan::default() };
            let sampler =
                Standalone::new(self.logits.len(), plan, &options).map_err(flash_sampling::BuildError::from)?;
            contenders.push(Contender::new(name, draw(Box::new(sampler), input, of_row)));
        }
        Ok(contenders)
    }

    /// The section that these contenders make.
    pub fn section(&self, rounds: usize) -> Section {
        Section::of_logits("draw from logits", self.logits.len(), rounds)
    }
}
