//! The LM head: borrowed tensors, and the transforms of the model.

use crate::column::rounded;
use crate::error::{invalid, of_head};
use crate::tensor::{Layout, Place, Tensor};
use flash_sampling::{Head as FacadeHead, HeadError, HeadOwner, Matrix};
use pyo3::prelude::*;
use std::sync::Arc;

/// The parts of a head, which its samplers share.
pub(crate) struct HeadParts {
    pub(crate) weight: Tensor,
    pub(crate) layout: Layout,
    pub(crate) bias: Bias,
    pub(crate) soft_cap: Option<f32>,
    pub(crate) scale: f32,
    pub(crate) vocab_size: usize,
    pub(crate) first_token: usize,
}

/// The bias: one value for each row of the weight.
pub(crate) enum Bias {
    None,
    Host(Vec<f32>),
    /// Contiguous float32 in memory of the weight's GPU.
    Device(Tensor),
}

impl HeadParts {
    /// The facade's head over a weight in host memory.
    fn head(&self) -> Result<FacadeHead<'_>, HeadError> {
        let Layout { dtype, rows, cols, row_stride } = self.layout;
        let matrix = Matrix::from_bytes(self.weight.rows_in_host_memory(&self.layout), dtype, rows, cols, row_stride)?;
        let mut head = FacadeHead::shard(matrix, self.first_token, self.vocab_size)?.with_scale(self.scale)?;
        if let Bias::Host(bias) = &self.bias {
            head = head.with_bias(bias)?;
        }
        self.soft_cap.map_or(Ok(head), |cap| head.with_soft_cap(cap))
    }
}

/// The owner of a sampler's weight, which it keeps alive.
pub(crate) struct Owner(pub(crate) Arc<HeadParts>);

impl HeadOwner for Owner {
    fn head(&self) -> Result<FacadeHead<'_>, HeadError> {
        self.0.head()
    }
}

/// An LM head: `logits = scale * soft_cap(hidden @ weight.T + bias)`.
///
/// It borrows the weight: the weight is not copied, and the head keeps it alive. Nothing may write to the weight during
/// a call.
///
/// weight: [vocab, hidden] in bfloat16, float16 or float32, on the CPU or a GPU. Each row is contiguous; the stride
///     between rows may be larger than a row. numpy has no bfloat16, so uint16 elements are read as its bits.
/// bias: [vocab] float, added first. On a GPU: float32, contiguous.
/// soft_cap: the cap of `cap * tanh(logit / cap)`, as in Gemma 2.
/// scale: the factor of the logits, as in Cohere and Granite.
/// vocab_size: the number of tokens of the vocabulary; None: `first_token` plus the rows of the weight. Rows beyond it
///     are padding, which is never sampled.
/// first_token: the token id of the weight's first row, for a shard of a vocabulary.
#[pyclass(frozen, module = "flash_sampling")]
pub(crate) struct Head {
    pub(crate) parts: Arc<HeadParts>,
}

#[pymethods]
impl Head {
    #[new]
    #[pyo3(signature = (weight, bias=None, soft_cap=None, scale=1.0, vocab_size=None, first_token=0))]
    fn new(
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        soft_cap: Option<f32>,
        scale: f32,
        vocab_size: Option<usize>,
        first_token: usize,
    ) -> PyResult<Head> {
        let weight = Tensor::borrow(weight, "weight")?;
        let layout = weight.layout("weight")?;
        let bias = match (bias, weight.place()) {
            (None, _) => Bias::None,
            (Some(bias), Place::Host) => {
                let bias = rounded(bias, "bias", layout.rows)?;
                Bias::Host((0..layout.rows).map(|row| bias.get(row)).collect())
            }
            (Some(bias), place) => {
                let bias = Tensor::borrow(bias, "bias")?;
                if bias.place() != place || !bias.is_floats(layout.rows) {
                    let text = format!("bias must be {} contiguous values of float32 on {place}", layout.rows);
                    return Err(invalid("bias", text));
                }
                Bias::Device(bias)
            }
        };
        let vocab_size = vocab_size.unwrap_or(first_token.saturating_add(layout.rows));
        let weight_place = weight.place();
        let parts = HeadParts { weight, layout, bias, soft_cap, scale, vocab_size, first_token };
        if weight_place == Place::Host {
            // On a GPU, the sampler makes these checks.
            parts.head().map_err(|error| of_head(&error))?;
        }
        Ok(Head { parts: Arc::new(parts) })
    }

    /// The number of tokens of the vocabulary.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.parts.vocab_size
    }

    /// The shape of the weight, (rows, hidden).
    #[getter]
    fn shape(&self) -> (usize, usize) {
        let shape = self.parts.weight.shape();
        (shape[0], shape[1])
    }

    /// The device of the weight: "the CPU", or for example "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.parts.weight.place().to_string()
    }

    fn __repr__(&self) -> String {
        let (rows, hidden) = self.shape();
        format!("Head([{rows}, {hidden}], vocab_size={}, on {})", self.parts.vocab_size, self.device())
    }
}
