//! A drop-in for candle-transformers' `LogitsProcessor`.

use crate::{FusedHead, with_matrix, wrap};
use candle_core::{D, DType, Device, Result, Tensor, bail};
use flash_sampling::cpu::Standalone;
use flash_sampling::{CpuOptions, PerturbedArgmax, Plan, RowParams, Samples};

/// The distribution of a draw, with the cases and fields of candle-transformers' type of the same name.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs)] // `temperature` divides the logits, `k` tokens or a mass of `p` are kept
pub enum Sampling {
    /// The largest logit.
    ArgMax,
    /// A draw from the whole softmax.
    All { temperature: f64 },
    /// A draw from the `k` most likely tokens.
    TopK { k: usize, temperature: f64 },
    /// A draw from the smallest set of most likely tokens with mass `p`.
    TopP { p: f64, temperature: f64 },
    /// A draw from the smallest set of the `k` most likely tokens with mass `p` of all tokens, or from all `k`. (vLLM
    /// takes `p` of the mass of the `k` tokens.)
    TopKThenTopP { k: usize, p: f64, temperature: f64 },
    /// The same draw as `All`: here every draw adds exact Gumbel noise.
    GumbelSoftmax { temperature: f64 },
}

/// Draws tokens from logits.
///
/// Logits on a GPU are copied to the CPU, as in candle's own processor. Draw n has the noise of (seed, n). A seed gives
/// the same tokens in every run, but not the tokens of candle's own processor.
#[derive(Debug)]
pub struct LogitsProcessor {
    seed: u64,
    sampling: Sampling,
    drawn: u64,
    sampler: Option<Standalone>,
    samples: Samples,
}

impl LogitsProcessor {
    /// A processor that draws by `sampling`.
    pub fn from_sampling(seed: u64, sampling: Sampling) -> Self {
        LogitsProcessor { seed, sampling, drawn: 0, sampler: None, samples: Samples::new() }
    }

    /// A processor for a draw from the softmax or its top `top_p`. Without a temperature, or below 1e-7, it takes the
    /// largest logit.
    pub fn new(seed: u64, temperature: Option<f64>, top_p: Option<f64>) -> Self {
        let sampling = match (temperature.filter(|t| t.is_nan() || *t >= 1e-7), top_p) {
            (None, _) => Sampling::ArgMax,
            (Some(temperature), None) => Sampling::All { temperature },
            (Some(temperature), Some(p)) => Sampling::TopP { p, temperature },
        };
        LogitsProcessor::from_sampling(seed, sampling)
    }

    /// The draw of `sample`; `weights` gives the probabilities.
    fn row(&self, vocab: usize, weights: impl FnOnce(f64) -> Result<Vec<f32>>) -> Result<RowParams<'static>> {
        // candle takes a `p` outside of (0, 1), or a `k` of the whole vocabulary, as no filter.
        let top_p = |p: f64| if p > 0.0 && p < 1.0 { p as f32 } else { 1.0 };
        let top_k = |k: usize| if k < vocab { k as u32 } else { 0 };
        let row = RowParams { seed: self.seed, position: self.drawn, ..RowParams::default() };
        let at = |temperature: f64| RowParams { temperature: temperature as f32, ..row };
        Ok(match self.sampling {
            Sampling::ArgMax => at(0.0),
            Sampling::All { temperature } | Sampling::GumbelSoftmax { temperature } => at(temperature),
            Sampling::TopK { k, temperature } => RowParams { top_k: top_k(k), ..at(temperature) },
            Sampling::TopP { p, temperature } => RowParams { top_p: top_p(p), ..at(temperature) },
            Sampling::TopKThenTopP { k, p, temperature } if k < vocab && p > 0.0 && p < 1.0 => {
                RowParams { top_k: reached(weights(temperature)?, k, p) as u32, ..at(temperature) }
            }
            Sampling::TopKThenTopP { k, p, temperature } => {
                RowParams { top_k: top_k(k), top_p: top_p(p), ..at(temperature) }
            }
        })
    }

    /// The draw of `sample_f`, from the logarithms of `weights`.
    fn row_of(&self, weights: &[f32]) -> RowParams<'static> {
        let all = weights.len();
        let (k, p) = match self.sampling {
            Sampling::TopK { k, .. } => (k, 1.0),
            Sampling::TopP { p, .. } => (all, p),
            Sampling::TopKThenTopP { k, p, .. } => (k, p),
            Sampling::ArgMax | Sampling::All { .. } | Sampling::GumbelSoftmax { .. } => (all, 1.0),
        };
        let kept = if p > 0.0 && p < 1.0 { reached(weights.to_vec(), k, p) } else { k };
        let top_k = if kept < all { kept as u32 } else { 0 };
        RowParams { seed: self.seed, position: self.drawn, top_k, ..RowParams::default() }
    }

    /// Draws a token from logits `[vocab]`.
    ///
    /// # Errors
    /// Logits of another rank, a NaN or +inf, no finite logit, a temperature that is not finite and positive, a `k` of 0.
    pub fn sample(&mut self, logits: &Tensor) -> Result<u32> {
        let logits = self.on_cpu(logits)?;
        let row = self.row(logits.elem_count(), |temperature| probabilities(&logits, temperature))?;
        self.draw(&logits, row)
    }

    /// Draws a token after `f` has changed the probabilities `[vocab]`, which need not sum to 1 afterwards. As in candle,
    /// a greedy draw and `GumbelSoftmax` do not call `f`. If `f` changes nothing, the draw is that of
    /// [`LogitsProcessor::sample`], up to rounding.
    ///
    /// # Errors
    /// As [`LogitsProcessor::sample`]; a negative, NaN or infinite probability after `f`, or none above 0.
    pub fn sample_f(&mut self, logits: &Tensor, f: impl FnOnce(&mut [f32])) -> Result<u32> {
        let temperature = match self.sampling {
            Sampling::ArgMax | Sampling::GumbelSoftmax { .. } => return self.sample(logits),
            Sampling::All { temperature } | Sampling::TopK { temperature, .. } => temperature,
            Sampling::TopP { temperature, .. } | Sampling::TopKThenTopP { temperature, .. } => temperature,
        };
        let mut weights = probabilities(&self.on_cpu(logits)?, temperature)?;
        f(&mut weights);
        let row = self.row_of(&weights);
        // The logarithm of a negative weight is NaN, and the error of the draw names it.
        let logs: Vec<f32> = weights.iter().map(|weight| weight.ln()).collect();
        self.draw(&Tensor::from_vec(logs, (1, weights.len()), &Device::Cpu)?, row)
    }

    /// Draws a token from one row of hidden states, `[hidden]` or `[1, ..., 1, hidden]`, without logits in memory. The
    /// token is that of [`LogitsProcessor::sample`] on the head's logits, up to their rounding.
    ///
    /// # Errors
    /// As [`LogitsProcessor::sample`] and [`FusedHead::sample`], and a `TopKThenTopP` whose two filters are both enabled,
    /// because candle takes `p` of the mass of all tokens.
    pub fn sample_head(&mut self, head: &mut FusedHead, hidden: &Tensor) -> Result<u32> {
        self.check_k()?;
        let row = self.row(head.vocab_size(), |_| bail!("a fused head has no TopKThenTopP: sample from logits"))?;
        let hidden = hidden.reshape((1, hidden.dim(D::Minus1)?))?;
        head.sample(&hidden, &[row], &mut self.samples)?;
        self.finish()
    }

    fn check_k(&self) -> Result<()> {
        if matches!(self.sampling, Sampling::TopK { k: 0, .. } | Sampling::TopKThenTopP { k: 0, .. }) {
            bail!("k is 0: no token would be left");
        }
        Ok(())
    }

    /// Logits `[1, vocab]`, float32.
    fn on_cpu(&self, logits: &Tensor) -> Result<Tensor> {
        let vocab = logits.dims1()?;
        self.check_k()?;
        logits.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?.reshape((1, vocab))
    }

    fn draw(&mut self, logits: &Tensor, row: RowParams<'_>) -> Result<u32> {
        let vocab = logits.elem_count();
        let sampler = match &mut self.sampler {
            Some(sampler) if sampler.shape().input == vocab => sampler,
            sampler => sampler.insert(wrap(Standalone::new(vocab, Plan::default(), &CpuOptions::default()))?),
        };
        with_matrix(logits, |logits| wrap(sampler.sample(logits, &[row], &mut self.samples)))?;
        self.finish()
    }

    /// Ends a draw: its token.
    fn finish(&mut self) -> Result<u32> {
        let token = wrap(self.samples.row(0))?.token();
        self.drawn += 1;
        Ok(token)
    }
}

/// The softmax of logits `[1, vocab]`, divided by a temperature.
fn probabilities(logits: &Tensor, temperature: f64) -> Result<Vec<f32>> {
    let logits = logits.flatten_all()?.to_vec1::<f32>()?;
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (f64::from(logit - largest) / temperature).exp()).collect();
    let sum: f64 = weights.iter().sum();
    Ok(weights.iter().map(|weight| (weight / sum) as f32).collect())
}

/// The number of largest weights that reach `p`, from 1 to `k`.
fn reached(mut weights: Vec<f32>, k: usize, p: f64) -> usize {
    let descending = |a: &f32, b: &f32| b.total_cmp(a);
    if k < weights.len() {
        weights.select_nth_unstable_by(k, descending);
        weights.truncate(k);
    }
    weights.sort_unstable_by(descending);
    let mut mass = 0.0;
    let missing = |weight: &&f32| {
        let missing = mass < p;
        mass += f64::from(**weight);
        missing
    };
    weights.iter().take_while(missing).count()
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
        let laws = [(1.0f64, [0.125f64, 0.25, 0.625]), (0.5, [1.0 / 30.0, 4.0 / 30.0, 25.0 / 30.0])];
        // The bound is six standard deviations.
        let is_of = |counts: &[u32; 4], law: &[f64; 3]| {
            counts.iter().zip(law).all(|(&count, p)| {
                let deviation = (20_000.0 * p * (1.0 - p)).sqrt();
                (f64::from(count) - 20_000.0 * p).abs() < 6.0 * deviation
            })
        };
        for (at, (temperature, expected)) in laws.iter().enumerate() {
            let mut processor = LogitsProcessor::new(3, Some(*temperature), None);
            let mut counts = [0u32; 4];
            (0..20_000).for_each(|_| counts[processor.sample(&logits).unwrap() as usize] += 1);
            assert_eq!(counts[3], 0);
            assert!(is_of(&counts, expected), "{counts:?} at {temperature}");
            // The law of the other temperature is rejected.
            assert!(!is_of(&counts, &laws[1 - at].1), "{counts:?} at {temperature}");
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
            (Sampling::TopKThenTopP { k: 2, p, temperature }, &[1, 2]),
            (Sampling::TopKThenTopP { k: 2, p: 0.45, temperature }, &[1]),
            (Sampling::TopKThenTopP { k: 2, p: 0.9, temperature }, &[1, 2]),
            (Sampling::TopKThenTopP { k: 2, p: 0.0, temperature }, &[1, 2]),
            (Sampling::TopKThenTopP { k: 3, p, temperature }, &[1, 2]),
            (Sampling::TopP { p: 1.0, temperature }, &[0, 1, 2]),
        ] {
            let mut processor = LogitsProcessor::from_sampling(5, sampling.clone());
            let mut drawn: Vec<_> = (0..200).map(|_| processor.sample(&logits).unwrap()).collect();
            drawn.sort_unstable();
            drawn.dedup();
            assert_eq!(drawn, kept, "{sampling:?}");
        }
    }

    /// candle 0.11 sums the probabilities of the first k tokens without a new normalisation. It keeps a token if the sum
    /// before it is below p. Weights are sixteenths, so these sums are exact.
    #[test]
    fn the_kept_tokens_are_those_of_candles_own() {
        let weights = [0.125f32, 0.25, 0.0625, 0.375, 0.0625, 0.125];
        let logits = logits(&weights.map(f32::ln));
        let kept = |draw: &mut dyn FnMut() -> u32| {
            let mut drawn: Vec<_> = (0..600).map(|_| draw()).collect();
            drawn.sort_unstable();
            drawn.dedup();
            drawn
        };
        for k in [1, 2, 6, 9] {
            for p in [0.1, 0.3, 0.5, 0.7] {
                let mut expected: Vec<u32> = (0..6).collect();
                expected.sort_by(|&a, &b| weights[b as usize].total_cmp(&weights[a as usize]));
                expected.truncate(k);
                if p < expected.iter().map(|&t| weights[t as usize]).sum() {
                    let mut sum = 0.0;
                    let end = expected.iter().position(|&t| {
                        let is_beyond = sum >= p;
                        sum += weights[t as usize];
                        is_beyond
                    });
                    expected.truncate(end.unwrap_or(k));
                }
                expected.sort_unstable();
                let sampling = Sampling::TopKThenTopP { k, p: p.into(), temperature: 1.0 };
                let mut ours = LogitsProcessor::from_sampling(7, sampling.clone());
                let mut with_f = LogitsProcessor::from_sampling(7, sampling);
                assert_eq!(kept(&mut || ours.sample(&logits).unwrap()), expected, "{k} {p}");
                assert_eq!(kept(&mut || with_f.sample_f(&logits, |_| {}).unwrap()), expected, "{k} {p}");
            }
        }
    }

    #[test]
    fn probabilities_can_be_changed_before_the_draw() {
        let logits = logits(&[0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()]);
        let new = || LogitsProcessor::new(9, Some(0.7), Some(0.9));
        let (mut plain, mut same, mut without) = (new(), new(), new());
        for _ in 0..300 {
            assert_eq!(plain.sample(&logits).unwrap(), same.sample_f(&logits, |_| {}).unwrap());
            assert_ne!(without.sample_f(&logits, |weights| weights[1] = 0.0).unwrap(), 1);
        }
        // The probabilities are not normalised again: 0.2 and 0.3 do not reach 0.6, so both tokens stay.
        let p = Sampling::TopP { p: 0.6, temperature: 1.0 };
        let mut of_all = LogitsProcessor::from_sampling(2, p);
        let mut draw = || of_all.sample_f(&logits, |weights| weights[1] = 0.0).unwrap();
        let drawn: Vec<_> = (0..200).map(|_| draw()).collect();
        assert!(drawn.contains(&0) && drawn.contains(&2) && !drawn.contains(&1));
        for wrong in [-1.0, f32::NAN, f32::INFINITY] {
            assert!(new().sample_f(&logits, |weights| weights[0] = wrong).is_err(), "{wrong}");
        }
        assert!(new().sample_f(&logits, |weights| weights.fill(0.0)).is_err());
        let mut greedy = LogitsProcessor::new(9, None, None);
        assert_eq!(greedy.sample_f(&logits, |weights| weights.fill(0.0)).unwrap(), 1);
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
