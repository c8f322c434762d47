//! The contenders of a benchmark.

use crate::bench::read;
use crate::bench::record::Section;
use crate::bench::table::{GREEDY, READ};
use crate::bench::timing::Contender;
use crate::error::CommandError;
use crate::input::Tensor;
use crate::input::shadow::make;
use crate::input::synthetic::{self, Logits};
use crate::sampler::named;
use flash_sampling::{
    Backend, BackendConfig, CpuOptions, DType, Head, Isa, Matrix, PerturbedArgmax, Plan, RowParams, Samples,
    ShadowBuffer, VariantConfig, build,
};

/// A head with hidden states of both kinds of logits.
#[derive(Debug)]
pub struct Inputs {
    weight: Tensor,
    gaussian: Tensor,
    peaked: Tensor,
    shadow: Option<ShadowBuffer>,
}

/// The samplers to time.
#[derive(Clone, Debug)]
pub struct Ours {
    /// The backend that runs them.
    pub backend: Backend,
    /// The variants.
    pub variants: Vec<VariantConfig>,
    /// Further instruction sets, for the tiled variant.
    pub isas: Vec<Isa>,
    /// Whether the tiled variant also runs with a shadow of the weight.
    pub shadow: bool,
}

/// The number of threads of samplers with these options.
pub fn threads(options: &CpuOptions) -> usize {
    options.threads.unwrap_or_else(rayon::current_num_threads)
}

/// A sampler of a variant, planned for `max_rows` rows.
pub fn sampler<'w>(
    head: Head<'w>,
    backend: Backend,
    variant: VariantConfig,
    max_rows: usize,
) -> Result<Box<dyn PerturbedArgmax + 'w>, CommandError> {
    let plan = Plan { max_rows, ..Plan::default() };
    build(head, &BackendConfig { backend, variant, plan, shadow: false }).map_err(named)
}

/// Parameters of the argmax.
pub fn argmax() -> RowParams<'static> {
    RowParams { temperature: 0.0, ..RowParams::default() }
}

/// Draws each row with these parameters; every call has its own position.
pub fn draw<'a>(
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

/// The type of hidden states for a weight's type.
pub fn state_type(weight: DType) -> DType {
    if weight.is_float() { weight } else { DType::BF16 }
}

impl Inputs {
    /// A weight `[vocab, hidden]` and `rows` hidden states of each kind.
    pub fn new(vocab: usize, hidden: usize, rows: usize, dtype: DType) -> Result<Self, CommandError> {
        let failed = |error| CommandError::usage(format!("cannot make a head of {vocab} x {hidden}: {error}"));
        let weight = synthetic::weight(vocab, hidden, dtype).map_err(failed)?;
        let states = |logits| synthetic::hidden(weight.matrix()?, rows, state_type(dtype), logits).map_err(failed);
        Ok(Inputs { gaussian: states(Logits::Gaussian)?, peaked: states(Logits::Peaked)?, weight, shadow: None })
    }

    /// Makes a shadow of the weight, so that the contenders include the tiled variant with it.
    pub fn make_shadow(&mut self) -> Result<(), CommandError> {
        self.shadow = Some(make(&self.weight()?)?);
        Ok(())
    }

    /// The weight.
    pub fn weight(&self) -> Result<Matrix<'_>, CommandError> {
        Ok(self.weight.matrix()?)
    }

    /// The head with its shadow, if [made](Inputs::make_shadow).
    pub fn head_with_shadow(&self) -> Result<Option<Head<'_>>, CommandError> {
        let head = Head::new(self.weight()?)?;
        let Some(shadow) = &self.shadow else { return Ok(None) };
        head.with_shadow(shadow.shadow()).map(Some).map_err(|error| CommandError::usage(error.to_string()))
    }

    /// The number of rows of the hidden states.
    pub fn rows(&self) -> usize {
        self.peaked.rows()
    }

    /// The first rows of the hidden states.
    pub fn states(&self, logits: Logits, rows: usize) -> Result<Matrix<'_>, CommandError> {
        self.states_from(logits, 0, rows)
    }

    /// Some rows of the hidden states.
    pub fn states_from(&self, logits: Logits, first: usize, rows: usize) -> Result<Matrix<'_>, CommandError> {
        let states = match logits {
            Logits::Gaussian => &self.gaussian,
            Logits::Peaked => &self.peaked,
        };
        Ok(states.matrix()?.row_range(first..first + rows))
    }

    /// The contenders for the first rows: the tiled variant without noise, and the draws. On a CPU, a read of the
    /// weight precedes them.
    pub fn contenders<'a>(&'a self, ours: &Ours, rows: usize) -> Result<Vec<Contender<'a>>, CommandError> {
        let weight = self.weight()?;
        let head = Head::new(weight)?;
        let (gaussian, peaked) = (self.states(Logits::Gaussian, rows)?, self.states(Logits::Peaked, rows)?);
        let sampler = |variant: &VariantConfig| sampler(head, ours.backend.clone(), variant.clone(), rows);
        let mut contenders = match &ours.backend {
            Backend::Cpu(options) => {
                let threads = threads(options);
                let read = move || {
                    read::stream(weight.bytes(), threads);
                    Ok(())
                };
                vec![Contender::new(READ, read)]
            }
            _ => Vec::new(),
        };
        contenders.push(Contender::new(GREEDY, draw(sampler(&VariantConfig::Tiled)?, peaked, argmax())));
        for variant in &ours.variants {
            if *variant == VariantConfig::Tiled {
                let drawn = draw(sampler(variant)?, gaussian, RowParams::default());
                contenders.push(Contender::new(format!("{variant}, gaussian"), drawn));
            }
            let drawn = draw(sampler(variant)?, peaked, RowParams::default());
            contenders.push(Contender::new(format!("{variant}, peaked"), drawn));
        }
        if let Some(head) = self.head_with_shadow()? {
            for (input, row, what) in [
                (peaked, argmax(), "greedy"),
                (gaussian, RowParams::default(), "gaussian"),
                (peaked, RowParams::default(), "peaked"),
            ] {
                let sampler = self::sampler(head, ours.backend.clone(), VariantConfig::Tiled, rows)?;
                contenders.push(Contender::new(format!("tiled with a shadow, {what}"), draw(sampler, input, row)));
            }
        }
        if let Backend::Cpu(options) = &ours.backend {
            for &isa in &ours.isas {
                let backend = Backend::Cpu(CpuOptions { isa: Some(isa), ..*options });
                let sampler = self::sampler(head, backend, VariantConfig::Tiled, rows)?;
                let drawn = draw(sampler, peaked, RowParams::default());
                contenders.push(Contender::new(format!("tiled, {isa}, peaked"), drawn));
            }
        }
        Ok(contenders)
    }

    /// The section for these contenders, without entries.
    pub fn section(&self, ours: &Ours, rows: usize, rounds: usize) -> Section {
        let size = [self.weight.rows(), self.weight.cols()];
        let (what, threads) = match &ours.backend {
            Backend::Cpu(options) => ("matmul and draw".to_owned(), Some(threads(options))),
            backend => (format!("matmul and draw, whole calls on {}", name(backend)), None),
        };
        Section { threads, ..Section::of_head(what, rows, size, self.weight.dtype(), rounds) }
    }
}

/// The name of a GPU, or of another backend.
fn name(backend: &Backend) -> String {
    match backend {
        #[cfg(feature = "cuda")]
        Backend::Cuda { device } => {
            let name = flash_sampling::cuda::Device::new(*device).and_then(|device| device.name());
            name.unwrap_or_else(|_| backend.to_string())
        }
        _ => backend.to_string(),
    }
}
