//! The filters of a row: rules that keep or drop tokens by their probabilities.

use crate::error::RowError;
use crate::summary::moments::Moments;
use crate::summary::winner::Candidate;

/// The order of the filters and the temperature.
///
/// A filter sees the tokens that earlier filters keep, with renormalised probabilities. Disabled filters have no
/// effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize, serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Order {
    /// vLLM (v1): temperature, top-n-sigma, min-p, top-k, top-p, typical-p, epsilon, XTC.
    #[default]
    Vllm,
    /// Hugging Face transformers: temperature, top-n-sigma, top-k, top-p, min-p, typical-p, epsilon, XTC.
    HuggingFace,
    /// llama.cpp: top-n-sigma, top-k, typical-p, top-p, min-p, epsilon, XTC, temperature. The filters see the logits
    /// before the temperature.
    LlamaCpp,
}

/// One filter with its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Filter {
    /// Keep the `k` first tokens; k >= 1.
    TopK(u32),
    /// Keep the smallest set of first tokens whose probability reaches `p`; 0 < p < 1.
    TopP(f32),
    /// Keep tokens with a probability of at least `p` times the largest; 0 < p <= 1.
    MinP(f32),
    /// Keep logits of at least the largest minus `n` standard deviations of the row's finite logits (Tang et al. 2024);
    /// n > 0.
    TopNSigma(f32),
    /// Keep tokens with a probability of at least epsilon (Hewitt et al. 2022); 0 < epsilon < 1.
    Epsilon(f32),
    /// Keep the tokens with surprisals nearest to the entropy, until their probability reaches `p` (Meister et al.
    /// 2023). Of two equally near tokens, the more probable one comes first. 0 < p < 1.
    TypicalP(f32),
    /// Of the tokens with a probability of at least the threshold, keep only the least probable one (exclude top
    /// choices). The row has this filter only if its XTC coin selects it.
    Xtc(f32),
}

/// The filters of a row, in their order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filters {
    steps: [Filter; Filters::MAX],
    len: usize,
    /// The factor from a filter's logit to the draw's logit: 1 / temperature in [`Order::LlamaCpp`], otherwise 1.
    pub rescale: f32,
    /// The temperature of the logits of the filters; 1 in [`Order::LlamaCpp`].
    pub temperature: f32,
}

impl Filters {
    /// Number of kinds of filters.
    pub const MAX: usize = 7;

    /// The enabled filters, first to last, at temperature 1. Each kind occurs at most once.
    pub fn new(steps: [Option<Filter>; Filters::MAX], rescale: f32) -> Self {
        let mut filters = Filters { steps: [Filter::TopK(u32::MAX); Filters::MAX], len: 0, rescale, temperature: 1.0 };
        for (slot, step) in filters.steps.iter_mut().zip(steps.into_iter().flatten()) {
            *slot = step;
            filters.len += 1;
        }
        filters
    }

    /// The filters, first to last.
    pub fn steps(&self) -> &[Filter] {
        &self.steps[..self.len]
    }

    /// The kept tokens with a finite logit after the temperature; `kept` is sorted by descending logits.
    ///
    /// A temperature after the filters can move logits beyond float32.
    ///
    /// # Errors
    /// [`RowError::PositiveInfinity`] with the token of the largest logit; [`RowError::NoFiniteLogit`].
    pub fn drawable<'l>(&self, kept: &'l [Candidate]) -> Result<&'l [Candidate], RowError> {
        match kept.first() {
            Some(c) if c.logit * self.rescale == f32::INFINITY => {
                Err(RowError::PositiveInfinity { token: c.winner.token })
            }
            Some(c) if c.logit * self.rescale > f32::NEG_INFINITY => {
                Ok(&kept[..kept.partition_point(|c| c.logit * self.rescale > f32::NEG_INFINITY)])
            }
            _ => Err(RowError::NoFiniteLogit),
        }
    }

    /// Whether any filter needs masses beyond the first `listed` tokens; filters after a top-k within them need none.
    pub fn need_mass_beyond(&self, listed: usize) -> bool {
        for filter in self.steps() {
            match filter {
                Filter::TopK(k) => return *k as usize > listed,
                Filter::MinP(_) | Filter::TopNSigma(_) => {}
                Filter::TopP(_) | Filter::Epsilon(_) | Filter::TypicalP(_) | Filter::Xtc(_) => return true,
            }
        }
        false
    }

    /// Whether tokens below the first `listed` tokens, or below [`Filters::drop_threshold`], change no result: the first
    /// filter is a min-p, or a top-k of at most `listed`.
    pub fn need_only_largest(&self, listed: usize) -> bool {
        let cuts = match self.steps().first() {
            Some(Filter::TopK(k)) => *k as usize <= listed,
            Some(Filter::MinP(_)) => true,
            _ => false,
        };
        cuts && !self.need_moments()
    }

    /// A logit below which the row keeps no token and needs no mass, given the largest logit so far. Only a min-p as
    /// the first filter gives such a logit; otherwise the result is -inf.
    pub fn drop_threshold(&self, largest: f32) -> f32 {
        match self.steps().first() {
            Some(Filter::MinP(p)) => largest + p.ln() - 1e-3 * (1.0 + largest.abs()),
            _ => f32::NEG_INFINITY,
        }
    }

    /// The `p` of a top-p, if it is the only filter.
    pub fn only_top_p(&self) -> Option<f32> {
        match self.steps() {
            [Filter::TopP(p)] => Some(*p),
            _ => None,
        }
    }

    /// Empty moments for the row's logits.
    pub fn moments(&self) -> Moments {
        Moments::of_temperature(self.temperature)
    }

    /// Whether any filter needs the row's moments.
    pub fn need_moments(&self) -> bool {
        self.steps().iter().any(|f| matches!(f, Filter::TopNSigma(_)))
    }

    /// The smallest `k` of a top-k, if there is one. The row keeps at most `k` tokens.
    pub fn smallest_k(&self) -> Option<u32> {
        self.steps().iter().filter_map(|f| if let Filter::TopK(k) = f { Some(*k) } else { None }).min()
    }
}
