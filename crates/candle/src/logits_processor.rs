//! A drop-in for candle-transformers' `LogitsProcessor`.

use crate::{with_matrix, wrap};
use candle_core::{DType, Device, Result, Tensor, bail};
use flash_sampling::cpu::Standalone;
use flash_sampling::{CpuOptions, PerturbedArgmax, Plan, RowParams, Samples};

/// How a token is drawn; the cases and fields of candle-transformers' type of the same name.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs)] // `temperature` divides the logits, `k` tokens or a mass of `p` are kept
pub enum Sampling {
    /// The largest logit.
    ArgMax,
    /// From the whole softmax.
    All { temperature: f64 },
    /// From the `k` most likely tokens.
    TopK { k: usize, temperature: f64 },
    /// From the fewest most likely tokens that reach the mass `p`.
    TopP { p: f64, temperature: f64 },
    /// The first, then the second. Here `p` is of the `k` tokens' mass, as in vLLM; candle takes it of the whole mass.
    TopKThenTopP { k: usize, p: f64, temperature: f64 },
    /// The same law as `All`, which is what all of these are drawn by here: with the seed's noise, at full range.
    GumbelSoftmax { temperature: f64 },
}

/// Draws tokens from logits; those on a GPU are copied to the CPU, as candle's own processor does. The n-th draw has the
/// noise of (seed, n): the same seed gives the same tokens, not those of candle's own processor.
#[derive(Debug)]
pub struct LogitsProcessor {
    seed: u64,
    sampling: Sampling,
    drawn: u64,
    sampler: Option<Standalone>,
    samples: Samples,
}

impl LogitsProcessor {
    /// Draws by `sampling`.
    pub fn from_sampling(seed: u64, sampling: Sampling) -> Self {
        LogitsProcessor { seed, sampling, drawn: 0, sampler: None, samples: Samples::new() }
    }

    /// The largest logit without a temperature or with one below 1e-7; else the softmax, or its most likely `top_p`.
    pub fn new(seed: u64, temperature: Option<f64>, top_p: Option<f64>) -> Self {
        let sampling = match (temperature.filter(|t| t.is_nan() || *t >= 1e-7), top_p) {
            (None, _) => Sampling::ArgMax,
            (Some(temperature), None) => Sampling::All { temperature },
            (Some(temperature), Some(p)) => Sampling::TopP { p, temperature },
        };
        LogitsProcessor::from_sampling(seed, sampling)
    }

    fn row(&self, vocab: usize) -> RowParams<'static> {
        // candle takes a `p` outside of (0, 1), or a `k` of the whole vocabulary, as no filter.
        let top_p = |p: f64| if p > 0.0 && p < 1.0 { p as f32 } else { 1.0 };
        let top_k = |k: usize| if k < vocab { k as u32 } else { 0 };
        let row = RowParams { seed: self.seed, position: self.drawn, ..RowParams::default() };
        let at = |temperature: f64| RowParams { temperature: temperature as f32, ..row };
        match self.sampling {
            Sampling::ArgMax => at(0.0),
            Sampling::All { temperature } | Sampling::GumbelSoftmax { temperature } => at(temperature),
            Sampling::TopK { k, temperature } => RowParams { top_k: top_k(k), ..at(temperature) },
            Sampling::TopP { p, temperature } => RowParams { top_p: top_p(p), ..at(temperature) },
            Sampling::TopKThenTopP { k, p, temperature } => {
                RowParams { top_k: top_k(k), top_p: top_p(p), ..at(temperature) }
            }
        }
    }

    /// Draws a token from logits `[vocab]`.
    ///
    /// # Errors
    /// Logits of another rank; a NaN or +inf among them; none that is finite; a temperature that is not finite and
    /// positive; a `k` of 0.
    pub fn sample(&mut self, logits: &Tensor) -> Result<u32> {
        let vocab = logits.dims1()?;
        if matches!(self.sampling, Sampling::TopK { k: 0, .. } | Sampling::TopKThenTopP { k: 0, .. }) {
            bail!("k is 0: no token would be left");
        }
        let logits = logits.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?.reshape((1, vocab))?;
        let row = self.row(vocab);
        let sampler = match &mut self.sampler {
            Some(sampler) if sampler.shape().input == vocab => sampler,
            sampler => sampler.insert(wrap(Standalone::new(vocab, Plan::default(), &CpuOptions::default()))?),
        };
        with_matrix(&logits, |logits| wrap(sampler.sample(logits, &[row], &mut self.samples)))?;
        let token = wrap(self.samples.row(0))?.token();
        self.drawn += 1;
        Ok(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(values: &[f32]) -> Tensor {
        Tensor::new(values, &Device::Cpu).unwrap()
    }

    #[test]
    fn the_law_is_the_softmax_at_the_temperature() {
        let logits = logits(&[0.0, 2.0f32.ln(), 5.0f32.ln(), f32::NEG_INFINITY]);
        for (temperature, expected) in [(1.0f64, [0.125f64, 0.25, 0.625]), (0.5, [1.0 / 30.0, 4.0 / 30.0, 25.0 / 30.0])]
        {
            let mut processor = LogitsProcessor::new(3, Some(temperature), None);
            let mut counts = [0u32; 4];
            (0..20_000).for_each(|_| counts[processor.sample(&logits).unwrap() as usize] += 1);
            assert_eq!(counts[3], 0);
            for (count, p) in counts.into_iter().zip(expected) {
                // Six standard deviations.
                let deviation = (20_000.0 * p * (1.0 - p)).sqrt();
                assert!((f64::from(count) - 20_000.0 * p).abs() < 6.0 * deviation, "{counts:?} at {temperature}");
            }
        }
    }

    #[test]
    fn filters_keep_what_they_should() {
        let logits = logits(&[0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()]);
        let (temperature, p) = (1.0, 0.6);
        for (sampling, kept) in [
            (Sampling::TopK { k: 1, temperature }, &[1][..]),
            (Sampling::TopK { k: 2, temperature }, &[1, 2]),
            (Sampling::TopP { p, temperature }, &[1, 2]),
            (Sampling::TopKThenTopP { k: 2, p, temperature }, &[1]),
            (Sampling::TopP { p: 1.0, temperature }, &[0, 1, 2]),
        ] {
            let mut processor = LogitsProcessor::from_sampling(5, sampling.clone());
            let mut drawn: Vec<_> = (0..200).map(|_| processor.sample(&logits).unwrap()).collect();
            drawn.sort_unstable();
            drawn.dedup();
            assert_eq!(drawn, kept, "{sampling:?}");
        }
    }

    #[test]
    fn a_seed_replays_and_another_does_not() {
        let logits = logits(&[0.0; 500]);
        let tokens = |seed| {
            let mut processor = LogitsProcessor::new(seed, Some(0.8), None);
            (0..20).map(|_| processor.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(tokens(1), tokens(1));
        assert_ne!(tokens(1), tokens(2));
    }

    #[test]
    fn small_temperatures_are_greedy_and_bad_rows_are_errors() {
        for temperature in [None, Some(0.0), Some(1e-8)] {
            let mut processor = LogitsProcessor::new(1, temperature, None);
            assert_eq!(processor.sample(&logits(&[0.0, 3.0, 1.0])).unwrap(), 1);
        }
        let mut processor = LogitsProcessor::new(1, Some(1.0), None);
        assert!(processor.sample(&logits(&[0.0, f32::NAN])).is_err());
        assert!(processor.sample(&logits(&[f32::NEG_INFINITY; 2])).is_err());
        let none = Sampling::TopK { k: 0, temperature: 1.0 };
        assert!(LogitsProcessor::from_sampling(1, none).sample(&logits(&[0.0, 1.0])).is_err());
        let whole = Sampling::TopKThenTopP { k: 2, p: 1.0, temperature: 1.0 };
        assert!(LogitsProcessor::from_sampling(1, whole).sample(&logits(&[0.0, 1.0])).is_ok());
    }
}
