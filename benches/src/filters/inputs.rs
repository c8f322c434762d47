//! The kinds of logits (LLM-like, all equal, largest logits in one tile), and a head with hidden states of each kind.

use super::cases::Lists;
use flash_sampling::{DType, Matrix};
use flash_sampling_cli::args::BenchSize;
use flash_sampling_cli::bench::cases::state_type;
use flash_sampling_cli::bench::record::Section;
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::input::Tensor;
use flash_sampling_cli::input::synthetic::{self, Logits, mix};
use std::io;

/// A head with hidden states and lists of all kinds of rows.
#[derive(Debug)]
pub struct Inputs {
    /// `[vocab, hidden]`.
    pub weight: Tensor,
    /// `[rows, hidden]` of each kind, for the largest batch.
    pub states: Vec<(Kind, Tensor)>,
    /// The lists of each row.
    pub lists: Lists,
    /// Sizes of the head and the batches.
    pub size: BenchSize,
}

impl Inputs {
    /// Makes a weight, and hidden states of each kind for the largest batch.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(size: BenchSize, dtype: DType) -> Result<Self, CommandError> {
        let BenchSize { vocab, hidden, .. } = size;
        let failed = |error| CommandError::usage(format!("cannot make a head of {vocab} x {hidden}: {error}"));
        let weight = synthetic::weight(vocab, hidden, dtype).map_err(failed)?;
        let most = size.rows.iter().copied().max().unwrap_or(1);
        let states = |kind: Kind| Ok((kind, kind.states(weight.matrix()?, most, state_type(dtype))?));
        let states = Kind::ALL.into_iter().map(states).collect::<Result<_, CommandError>>()?;
        Ok(Inputs { weight, states, lists: Lists::new(vocab, most), size })
    }

    /// A section without entries.
    pub fn section(&self, what: &str, kind: Kind, rows: usize, rounds: usize) -> Section {
        let (what, size) = (format!("{what}, {} rows", kind.name()), [self.size.vocab, self.size.hidden]);
        Section::of_head(what, rows, size, self.weight.dtype(), rounds)
    }
}

/// The distribution of a row's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A few tokens far above a Gaussian bulk, which has 6 to 80 percent of the mass of the row.
    LlmLike,
    /// All logits are equal, so no token can be skipped.
    Flat,
    /// The 128 largest logits belong to consecutive tokens, which have 99 percent of the mass.
    OneTile,
}

/// The number of consecutive tokens with large logits.
const CONSECUTIVE: usize = 128;

/// The largest of these logits, and the step to the next.
const TOP_LOGIT: (f32, f32) = (14.0, 0.01);

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 3] = [Kind::LlmLike, Kind::Flat, Kind::OneTile];

    /// The name that tables and records show.
    pub fn name(self) -> &'static str {
        match self {
            Kind::LlmLike => "LLM-like",
            Kind::Flat => "flat",
            Kind::OneTile => "best in one tile",
        }
    }

    /// Hidden states `[rows, hidden]` for a weight made by [`synthetic::weight`].
    ///
    /// # Errors
    /// Too little memory.
    pub fn states(self, weight: Matrix<'_>, rows: usize, dtype: DType) -> Result<Tensor, CommandError> {
        let failed = |error: io::Error| CommandError::usage(format!("cannot make hidden states: {error}"));
        match self {
            Kind::LlmLike => synthetic::hidden(weight, rows, dtype, Logits::Peaked).map_err(failed),
            Kind::Flat => synthetic::states(weight.cols(), rows, dtype, |_, out| out.fill(0.0)).map_err(failed),
            Kind::OneTile => {
                let mut token = vec![0.0; weight.cols()];
                let lift = |r: usize, out: &mut [f32]| {
                    synthetic::bulk(r, out);
                    for i in 0..CONSECUTIVE.min(weight.rows()) {
                        weight.row_to_f32(first(weight.rows()) + i, &mut token);
                        let height = TOP_LOGIT.0 - TOP_LOGIT.1 * i as f32;
                        out.iter_mut().zip(&token).for_each(|(h, w)| *h += height * w);
                    }
                };
                synthetic::states(weight.cols(), rows, dtype, lift).map_err(failed)
            }
        }
    }

    /// Logits `[vocab]` of row `r`, without a head.
    pub fn logits(self, vocab: usize, r: usize) -> Vec<f32> {
        if self == Kind::Flat {
            return vec![0.0; vocab];
        }
        let mut logits: Vec<f32> = (0..vocab).map(|i| normal(mix(r as u64) ^ i as u64) * 2.0).collect();
        if self == Kind::OneTile {
            let first = first(vocab);
            for (i, logit) in logits[first..].iter_mut().take(CONSECUTIVE).enumerate() {
                *logit = TOP_LOGIT.0 - TOP_LOGIT.1 * i as f32;
            }
        } else {
            for (i, height) in (0u64..).zip(synthetic::heights(r)) {
                logits[(mix(mix(r as u64) ^ mix(i)) % vocab as u64) as usize] = height;
            }
        }
        logits
    }
}

/// The first of the consecutive tokens, at the start of a tile of any size up to 256.
fn first(vocab: usize) -> usize {
    (vocab / 2 / 256 * 256).min(vocab.saturating_sub(CONSECUTIVE))
}

/// A normal variate of a key (Box and Muller 1958).
fn normal(key: u64) -> f32 {
    let u01_open = |x: u64| ((x >> 12) as f64 + 0.5) / 2f64.powi(52);
    let (u, v) = (u01_open(mix(key)), u01_open(mix(mix(key) ^ 1)));
    ((-2.0 * u.ln()).sqrt() * (core::f64::consts::TAU * v).cos()) as f32
}
