//! The math of the noise's outer logarithm (paper App. J).

/// The math of the outer logarithm of Gumbel noise, for kernels over existing logits.
///
/// The inner logarithm always uses exact math: an approximation would lose rare tokens. The fused kernels always use
/// exact math. They compute a logarithm for about one token in a thousand only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NoiseMath {
    /// The same noise bits as on every backend.
    #[default]
    Exact,
    /// The GPU's approximate logarithm. The distribution is exact to within 1e-6 nats of the logits. Scores differ from
    /// other backends in their last bits, and a near tie may yield another token.
    Fast,
}
