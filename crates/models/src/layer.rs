//! The parts of a transformer layer.

use crate::config::{Family, ModelConfig};
use crate::error::ModelError;
use flash_sampling::cpu::matmul;
use flash_sampling::{Isa, Matrix};

/// A function that returns the tensor of a name: a matrix, or a vector as a matrix of one row; `None` if the tensor is
/// absent.
pub(crate) trait Tensors<'w>: FnMut(&str) -> Result<Option<Matrix<'w>>, ModelError> {}
impl<'w, F: FnMut(&str) -> Result<Option<Matrix<'w>>, ModelError>> Tensors<'w> for F {}

/// Returns the tensor of a name, and checks its shape.
pub(crate) fn tensor<'w>(
    tensors: &mut impl Tensors<'w>,
    name: &str,
    expected: [usize; 2],
) -> Result<Matrix<'w>, ModelError> {
    let tensor = tensors(name)?.ok_or_else(|| ModelError::Missing(name.into()))?;
    let found = [tensor.rows(), tensor.cols()];
    if found == expected { Ok(tensor) } else { Err(ModelError::Shape { tensor: name.into(), found, expected }) }
}

/// Returns the vector of a name as float32, and checks its length.
pub(crate) fn vector<'w>(tensors: &mut impl Tensors<'w>, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
    // Checks the length before the allocation, because the length comes from a file.
    let found = tensor(tensors, name, [1, len])?;
    let mut values = vec![0.0; len];
    found.row_to_f32(0, &mut values);
    Ok(values)
}

/// The linear map `x * W^T + b`.
#[derive(Debug)]
pub(crate) struct Linear<'w> {
    weight: Matrix<'w>,
    bias: Option<Vec<f32>>,
}

impl<'w> Linear<'w> {
    fn new(tensors: &mut impl Tensors<'w>, name: &str, shape: [usize; 2], biased: bool) -> Result<Self, ModelError> {
        let weight = tensor(tensors, &format!("{name}.weight"), shape)?;
        let bias = biased.then(|| vector(tensors, &format!("{name}.bias"), shape[0])).transpose()?;
        Ok(Linear { weight, bias })
    }

    /// Returns `[rows, outputs]` for `x [rows, inputs]`.
    pub(crate) fn apply(&self, x: &[f32], isa: Option<Isa>) -> Result<Vec<f32>, ModelError> {
        let (inputs, outputs) = (self.weight.cols(), self.weight.rows());
        let rows = x.len() / inputs;
        let mut out = vec![0.0; rows * outputs];
        let x = Matrix::new(x, rows, inputs).map_err(flash_sampling::CpuError::from)?;
        matmul(&x, &self.weight, isa, &mut out)?;
        if let Some(bias) = &self.bias {
            out.chunks_exact_mut(outputs).flat_map(|row| row.iter_mut().zip(bias)).for_each(|(x, b)| *x += b);
        }
        Ok(out)
    }
}

/// Root-mean-square normalisation of vectors of `weight.len()` elements.
#[derive(Debug)]
pub(crate) struct Norm {
    weight: Vec<f32>,
    eps: f32,
}

impl Norm {
    /// Reads the weight `name` of length `len`. A checkpoint of Gemma 2 stores the weight minus 1.
    pub(crate) fn new<'w>(
        config: &ModelConfig,
        tensors: &mut impl Tensors<'w>,
        name: &str,
        len: usize,
    ) -> Result<Self, ModelError> {
        let mut weight = vector(tensors, name, len)?;
        if config.family == Family::Gemma2 {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(Norm { weight, eps: config.norm_eps })
    }

    /// Normalises each vector of `x [rows, weight.len()]` in place.
    pub(crate) fn apply(&self, x: &mut [f32]) {
        for row in x.chunks_exact_mut(self.weight.len()) {
            let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let mean = (squares / row.len() as f64) as f32;
            let factor = 1.0 / (mean + self.eps).sqrt();
            row.iter_mut().zip(&self.weight).for_each(|(x, w)| *x = w * (*x * factor));
        }
    }
}

/// SiLU: `x * sigmoid(x)`.
fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// GELU, `x * Phi(x)`, in its approximation by tanh (Hendrycks and Gimpel 2016): `gelu_pytorch_tanh` in `transformers`.
/// `Phi` is the distribution function of the standard normal distribution.
fn gelu(x: f32) -> f32 {
    const FACTOR: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
    0.5 * x * (1.0 + (FACTOR * (x + 0.044_715 * x * x * x)).tanh())
}

/// The weights and the activation of a transformer layer.
#[derive(Debug)]
pub(crate) struct Layer<'w> {
    pub(crate) before_attention: Norm,
    pub(crate) query: Linear<'w>,
    pub(crate) key: Linear<'w>,
    pub(crate) value: Linear<'w>,
    /// Qwen3: the norm of each query head, and the norm of each key head.
    pub(crate) head_norms: Option<[Norm; 2]>,
    pub(crate) attention_out: Linear<'w>,
    /// Gemma 2: the norm after attention.
    pub(crate) after_attention: Option<Norm>,
    pub(crate) before_feed_forward: Norm,
    pub(crate) gate: Linear<'w>,
    pub(crate) up: Linear<'w>,
    /// The activation of the gate.
    pub(crate) activation: fn(f32) -> f32,
    pub(crate) down: Linear<'w>,
    /// Gemma 2: the norm after the feed-forward layers.
    pub(crate) after_feed_forward: Option<Norm>,
}

impl<'w> Layer<'w> {
    /// Reads the tensors whose names are `prefix` followed by Hugging Face's names.
    pub(crate) fn new(config: &ModelConfig, prefix: &str, tensors: &mut impl Tensors<'w>) -> Result<Self, ModelError> {
        let (hidden, wide, dim) = (config.hidden, config.intermediate, config.head_dim);
        let (queries, keys) = (config.heads * dim, config.kv_heads * dim);
        let (biased, mlp_biased) = (config.attention_bias, config.mlp_bias);
        let mut norm = |name: &str, len: usize| Norm::new(config, tensors, &format!("{prefix}{name}.weight"), len);
        let before_attention = norm("input_layernorm", hidden)?;
        let post_attention = norm("post_attention_layernorm", hidden)?;
        let (after_attention, before_feed_forward, after_feed_forward) = match config.family {
            // These families give the name `post_attention_layernorm` to the norm before the feed-forward layers.
            Family::Llama | Family::Qwen3 => (None, post_attention, None),
            Family::Gemma2 => {
                let after = norm("post_feedforward_layernorm", hidden)?;
                (Some(post_attention), norm("pre_feedforward_layernorm", hidden)?, Some(after))
            }
        };
        let head_norms = match config.family {
            Family::Qwen3 => Some([norm("self_attn.q_norm", dim)?, norm("self_attn.k_norm", dim)?]),
            Family::Llama | Family::Gemma2 => None,
        };
        let mut linear = |name: &str, shape: [usize; 2], biased: bool| {
            Linear::new(tensors, &format!("{prefix}{name}"), shape, biased)
        };
        Ok(Layer {
            before_attention,
            query: linear("self_attn.q_proj", [queries, hidden], biased)?,
            key: linear("self_attn.k_proj", [keys, hidden], biased)?,
            value: linear("self_attn.v_proj", [keys, hidden], biased)?,
            head_norms,
            attention_out: linear("self_attn.o_proj", [hidden, queries], biased)?,
            after_attention,
            before_feed_forward,
            gate: linear("mlp.gate_proj", [wide, hidden], mlp_biased)?,
            up: linear("mlp.up_proj", [wide, hidden], mlp_biased)?,
            activation: if config.family == Family::Gemma2 { gelu } else { silu },
            down: linear("mlp.down_proj", [hidden, wide], mlp_biased)?,
            after_feed_forward,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_norm_leaves_a_mean_square_of_one() {
        let norm = Norm { weight: vec![1.0, 1.0, 2.0, 1.0], eps: 1e-9 };
        let mut x = [3.0, -1.0, 2.0, 0.5, 300.0, -100.0, 200.0, 50.0];
        norm.apply(&mut x);
        assert_eq!(x[2] / x[0], 4.0 / 3.0);
        for (a, b) in x[..4].iter().zip(&x[4..]) {
            assert!((a - b).abs() < 1e-6);
        }
        let squares: f32 = x[..4].iter().map(|x| x * x).sum::<f32>() - 0.75 * x[2] * x[2];
        assert!((squares - 4.0).abs() < 1e-5);
    }

    #[test]
    fn silu_has_its_limits() {
        assert_eq!((silu(0.0), silu(-200.0), silu(200.0)), (0.0, -0.0, 200.0));
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6);
    }

    #[test]
    fn gelu_has_its_limits() {
        assert_eq!((gelu(0.0), gelu(-200.0), gelu(200.0)), (0.0, -0.0, 200.0));
        // torch.nn.functional.gelu(torch.tensor([1.0, -0.5], dtype=torch.float64), approximate="tanh")
        for (x, expected) in [(1.0, 0.841_192), (-0.5, -0.154_286)] {
            assert!((gelu(x) - expected).abs() < 1e-6);
        }
    }
}
