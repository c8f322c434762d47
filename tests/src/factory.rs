//! The interface of a backend to the suite: a factory of samplers.

use flash_sampling_core::backend::canonical::canonical_logit;
use flash_sampling_core::backend::check_call;
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Capabilities, DType, Description, Head, Input, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples,
    Shape,
};

/// The backend's message about a sampler that it cannot build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildError(pub String);

impl core::fmt::Display for BuildError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for BuildError {}

/// Builds samplers of one backend and variant, for any head and plan.
pub trait SamplerFactory: Sync {
    /// Returns the name: backend, variant and other properties, separated by `/`, such as `cpu/tiled/avx2`.
    /// `FLASH_SAMPLING_REQUIRE` matches these words.
    fn name(&self) -> String;

    /// Returns why no sampler can be built on this machine, or `None` if samplers can be built.
    fn unavailable(&self) -> Option<String> {
        None
    }

    /// Returns the variant of the [reference](flash_sampling_core::reference) that gives the same tokens for this head:
    /// [`ReferenceVariant::Tiled`] for every pathwise sampler, `None` if the reference lacks the factorisation.
    fn reference_variant(&self, head: &Head<'_>) -> Option<ReferenceVariant>;

    /// Returns the factor by which the laws may take more draws from large vocabularies than from the reference. The
    /// reference computes about 30 million scores of tokens per second.
    fn pace(&self) -> usize {
        1
    }

    /// Returns whether samplers can be built for a shard of a head.
    fn takes_shards(&self) -> bool {
        true
    }

    /// Builds a sampler. A sampler of logits is wrapped in [`FromLogits`].
    ///
    /// # Errors
    /// Returns the backend's message. It names the knob if the plan needs an unsupported one.
    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError>;
}

/// Adapts a sampler of [`Input::Logits`] to hidden states.
///
/// It computes the raw logits of the whole vocabulary by the canonical dot product in float32. Logits of tokens outside
/// the head are -inf.
#[derive(Debug)]
pub struct FromLogits<'w, S> {
    head: Head<'w>,
    sampler: S,
    logits: Vec<f32>,
}

impl<'w, S: PerturbedArgmax> FromLogits<'w, S> {
    /// Wraps `sampler`, which must take logits of `head.vocab_size()` columns.
    pub fn new(head: Head<'w>, sampler: S) -> Self {
        FromLogits { head, sampler, logits: Vec::new() }
    }
}

impl<S: PerturbedArgmax> PerturbedArgmax for FromLogits<'_, S> {
    fn description(&self) -> Description {
        let Description { capabilities, plan, .. } = self.sampler.description();
        let capabilities = Capabilities { input: Input::Hidden, ..capabilities };
        Description { capabilities, shape: Shape::of(&self.head), plan }
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        check_call(&input, rows, &self.shape(), &self.plan())?;
        let vocab = self.head.vocab_size() as usize;
        let mut hidden = vec![0.0; input.cols()];
        let mut scratch = vec![0.0; input.cols()];
        self.logits.clear();
        self.logits.resize(input.rows() * vocab, f32::NEG_INFINITY);
        for (r, logits) in self.logits.chunks_mut(vocab).enumerate() {
            input.row_to_f32(r, &mut hidden);
            for token in self.head.tokens() {
                logits[token as usize] = canonical_logit(&self.head, token, &hidden, &mut scratch);
            }
        }
        let bytes: Vec<u8> = self.logits.iter().flat_map(|l| l.to_ne_bytes()).collect();
        let logits = Matrix::from_bytes(&bytes, DType::F32, input.rows(), vocab, vocab)
            .expect("one row of the vocabulary per row of the input");
        self.sampler.sample(logits, rows, out)
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.sampler.replan(max_rows)
    }
}
