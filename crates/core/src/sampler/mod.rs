//! The trait that every variant on every backend implements.

use crate::backend::Scan;
use crate::error::SampleError;
use crate::head::Head;
use crate::matrix::Matrix;
use crate::params::RowParams;
use crate::params::knob::{Knob, Knobs};
use crate::sampler::samples::Samples;
use core::ops::Range;

pub(crate) mod samples;
pub mod speculation;

/// The variants of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Variant {
    /// Fused tiled: one winner per row and tile (Alg. 1).
    Tiled,
    /// Parallel groups: log-mass and local sample per group, then a draw of the group (Alg. I.2).
    Grouped,
    /// Online: groups streamed through the binary merge (Alg. I.3).
    Online,
    /// Vocabulary shards that exchange summaries (Alg. I.4).
    Sharded,
    /// Logits that already exist (Alg. I.1).
    Standalone,
}

/// In which sense a sampler is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Exactness {
    /// The token is the argmax of the perturbed row. It does not depend on tiles, threads, batch or shards.
    Pathwise,
    /// The token follows the softmax by factorisation over groups. Another grouping may give another token.
    InDistribution,
}

/// The kind of input of a sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// Hidden states, `[rows, hidden]`.
    Hidden,
    /// Logits, `[rows, vocab]`.
    Logits,
}

/// What a sampler supports. An unsupported knob is an error; no sampler ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The backend, with the instruction set or device if it matters.
    pub backend: &'static str,
    /// The variant of the paper.
    pub variant: Variant,
    /// Pathwise or in distribution.
    pub exactness: Exactness,
    /// The input of [`PerturbedArgmax::sample`].
    pub input: Input,
    /// Whether it can draw lists without replacement.
    pub without_replacement: bool,
    /// The supported knobs of [`Knobs::FILTERS`], [`Knobs::ADJUSTMENTS`] and [`Knobs::LOGPROBS`], and [`Knob::Kept`].
    /// Every sampler supports temperature, mask, logit bias, draws, and log-probabilities of the law of the draws.
    pub knobs: Knobs,
    /// Whether it supports [`Plan::canonical`].
    pub canonical: bool,
    /// Whether draws read a [`Shadow`](crate::Shadow) of the weight. Calls that cannot read the shadow read the weight:
    /// [`Samples::fallback_rows`] counts their rows.
    pub shadow: bool,
}

impl Capabilities {
    /// Names an alternative that supports the knobs which a sampler with these capabilities and this plan lacks.
    ///
    /// It follows from the kind of the sampler: a pathwise sampler with a whole head and no canonical plan supports
    /// every knob. If both the kind and the plan are reasons, it names the plan.
    pub fn alternative(&self, plan: &Plan) -> &'static str {
        match (self.exactness, self.variant) {
            (Exactness::InDistribution, Variant::Sharded) if plan.canonical => {
                "a merge of shards by winners, planned without `canonical`,"
            }
            (Exactness::InDistribution, Variant::Sharded) => "a merge of shards by winners",
            (Exactness::InDistribution, _) => "the tiled variant",
            (Exactness::Pathwise, _) if plan.canonical => "a plan without `canonical`",
            (Exactness::Pathwise, Variant::Sharded) => "a merge of shards of the tiled variant",
            (Exactness::Pathwise, _) => "the tiled variant over a whole head in memory",
        }
    }
}

/// The limits of a sampler's calls. They size its scratch once, so a call within the plan allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Plan {
    /// Largest number of rows of a call.
    pub max_rows: usize,
    /// Largest number of draws of a row.
    pub max_draws: u32,
    /// Largest `logprobs` of a row; `None` = no row requests log-probabilities.
    pub max_logprobs: Option<u32>,
    /// Draw the same token on all instruction sets and backends, on real inputs too.
    ///
    /// The sampler re-evaluates the candidates within the rounding bound of the winner in float64, in one fixed order
    /// ([`canonical_dot`](crate::backend::canonical::canonical_dot)). Tokens, scores and logits then equal the
    /// [reference](crate::reference)'s; log Z still sums the logits of the pass.
    pub canonical: bool,
}

impl Default for Plan {
    /// One row, one draw, no log-probabilities, not canonical.
    fn default() -> Self {
        Plan { max_rows: 1, max_draws: 1, max_logprobs: None, canonical: false }
    }
}

/// The size of a sampler's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The global ids of the tokens that can be drawn.
    pub tokens: Range<u32>,
    /// Size of the whole vocabulary; masks and biases name tokens below it.
    pub vocab_size: u32,
    /// Columns of the input.
    pub input: usize,
}

impl Shape {
    /// Returns the shape of a sampler that takes hidden states of a head.
    pub fn of(head: &Head<'_>) -> Shape {
        Shape { tokens: head.tokens(), vocab_size: head.vocab_size(), input: head.hidden() }
    }

    /// Returns the shape of a sampler over a whole vocabulary.
    pub fn whole(vocab_size: u32, input: usize) -> Shape {
        Shape { tokens: 0..vocab_size, vocab_size, input }
    }
}

/// The capabilities, the shape and the plan of a sampler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// What the sampler supports.
    pub capabilities: Capabilities,
    /// The size of the sampler's head.
    pub shape: Shape,
    /// The plan of the sampler.
    pub plan: Plan,
}

/// Draws tokens: the argmax of transformed logits plus Gumbel noise, or a draw with the same law.
///
/// An implementer writes [`description`](Self::description) and [`sample`](Self::sample). The module
/// [`backend`](crate::backend) has parts for `sample`. A sampler may support no knobs at all
/// ([`Knobs::NONE`]): then rows with filters, penalties or log-probabilities get a typed error.
///
/// # Contract
/// The conformance suite checks these rules for every implementer:
/// * **Law.** P(token) is the softmax of the row's transformed logits, to within float32 rounding of the logits.
/// * **Noise.** It comes from [`Noise`](crate::Noise) alone, keyed by (seed, position, draw, *global* token). So a
///   row's result does not depend on its neighbours, on tiles, threads, or earlier calls.
/// * **Pathwise** samplers return the argmax of `logit + noise` over the row, ties to the lower token. The score is
///   that sum, rounded once. If dot products are exact, the bits agree with the [reference](crate::reference).
/// * **In distribution** samplers say so in [`Capabilities`]. Score and logit still belong to the drawn token.
/// * **Greedy** rows (temperature 0) take no noise: the score is the logit.
/// * **Zeros.** A logit or score of zero may have either sign; every other float has the same bits everywhere.
/// * **Bad rows** (NaN or +inf among the raw logits, no finite logit, an invalid or unsupported knob) get a
///   [`RowError`](crate::RowError), and the other rows are unaffected. A head without tokens gives every row
///   [`RowError::NoFiniteLogit`](crate::RowError::NoFiniteLogit).
/// * **Filters** keep the set that [`Selector`](crate::backend::selection::Selector) defines, a function of the row's
///   transformed logits alone. [`RowSample::passes`](crate::RowSample::passes) has the number of passes.
/// * **log Z** does not depend on the order of evaluation: it comes from a [`MassHistogram`](crate::backend::MassHistogram).
/// * [`capabilities`](Self::capabilities), [`shape`](Self::shape) and [`plan`](Self::plan) are not overridden: a boxed
///   sampler forwards only its description.
/// * A call empties `out` first, even if the call fails.
/// * A call within the plan allocates nothing if the sampler and `out` have served similar calls. The
///   [reference](crate::reference) is the exception.
pub trait PerturbedArgmax: Send {
    /// Returns the capabilities, the shape and the plan of this sampler.
    fn description(&self) -> Description;

    /// Returns what this sampler supports.
    fn capabilities(&self) -> Capabilities {
        self.description().capabilities
    }

    /// Returns the size of the sampler's head.
    fn shape(&self) -> Shape {
        self.description().shape
    }

    /// Returns the plan of the sampler.
    fn plan(&self) -> Plan {
        self.description().plan
    }

    /// Draws for `input [rows, hidden]` (or `[rows, vocab]`, see [`Capabilities::input`]), one [`RowParams`] per row.
    ///
    /// # Errors
    /// * [`SampleError::Hidden`]: the widths of input and head differ.
    /// * [`SampleError::RowCount`]: the numbers of rows and of parameter sets differ.
    /// * [`SampleError::TooManyRows`]: more rows than planned.
    /// * [`SampleError::Backend`]: the backend failed.
    ///
    /// An error of a single row is in `out`.
    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError>;

    /// Changes the plan to calls of up to `max_rows` rows. The sampler does not copy or pack the weight again.
    ///
    /// # Errors
    /// * [`SampleError::Unsupported`]: the sampler cannot change its plan. This is the default.
    /// * [`SampleError::Backend`]: the backend cannot plan for so many rows.
    ///
    /// After an error the sampler keeps its plan.
    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        let _ = max_rows;
        Err(SampleError::Unsupported { knob: Knob::MaxRows })
    }

    /// The scan that makes this sampler a vocabulary shard for rows with filters or raw log-probabilities.
    ///
    /// `None` if the sampler cannot be such a shard. A sampler with a scan supports all of [`Knobs::FILTERS`],
    /// [`Knobs::LOGPROBS`] and [`Knob::Kept`].
    fn scan(&mut self) -> Option<&mut dyn Scan> {
        None
    }
}

/// Forwards every method: a borrowed or boxed sampler is a sampler.
macro_rules! forward {
    ($($pointer:ty),*) => {$(
        impl<S: PerturbedArgmax + ?Sized> PerturbedArgmax for $pointer {
            fn description(&self) -> Description {
                (**self).description()
            }

            fn sample(
                &mut self,
                input: Matrix<'_>,
                rows: &[RowParams<'_>],
                out: &mut Samples,
            ) -> Result<(), SampleError> {
                (**self).sample(input, rows, out)
            }

            fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
                (**self).replan(max_rows)
            }

            fn scan(&mut self) -> Option<&mut dyn Scan> {
                (**self).scan()
            }
        }
    )*};
}
forward!(Box<S>, &mut S);

/// Checks a call for every implementer: width, number of parameters, number of rows.
///
/// # Errors
/// See [`PerturbedArgmax::sample`].
pub fn check_call(input: &Matrix<'_>, rows: &[RowParams<'_>], shape: &Shape, plan: &Plan) -> Result<(), SampleError> {
    if !input.dtype().is_float() {
        return Err(SampleError::InputType { found: input.dtype() });
    }
    if input.cols() != shape.input {
        return Err(SampleError::Hidden { found: input.cols(), expected: shape.input });
    }
    if input.rows() != rows.len() {
        return Err(SampleError::RowCount { rows: input.rows(), params: rows.len() });
    }
    if rows.len() > plan.max_rows {
        return Err(SampleError::TooManyRows { rows: rows.len(), max_rows: plan.max_rows });
    }
    Ok(())
}

/// Empties a list and reuses its memory for elements of another lifetime, by collecting from `into_iter`. Samplers
/// reuse the memory of a call's rows in this way.
pub fn reuse_vec<A, B>(mut list: Vec<A>) -> Vec<B> {
    list.clear();
    list.into_iter().filter_map(|_| None).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recycling_keeps_the_memory() {
        let params: Vec<RowParams<'_>> = vec![RowParams::default(); 100];
        let at = params.as_ptr() as usize;
        let recycled: Vec<RowParams<'static>> = reuse_vec(params);
        assert!(recycled.is_empty() && recycled.capacity() >= 100);
        assert_eq!(recycled.as_ptr() as usize, at);
    }
}
