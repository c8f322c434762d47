//! How the kernels take the outer logarithm of the noise (paper App. J).

/// How the kernels over existing logits take the outer of a Gumbel's two logarithms. The inner one is always exact-math: an
/// approximation there loses rare tokens. The fused kernels have no choice, and need none: about one token in a thousand
/// comes so far that a logarithm is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NoiseMath {
    /// Noise has the same bits as on every backend.
    #[default]
    Exact,
    /// The GPU's approximate logarithm. The law of the draw is kept to within 1e-6 nats of the logits; scores differ in
    /// their last bits from those of other backends, and a near tie may give another token.
    Fast,
}
