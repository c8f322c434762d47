//! The LM head: a borrowed weight, and the transforms of the model.

use crate::column::{integer, rounded};
use crate::error::{invalid, of_head};
use crate::gguf;
use crate::scales::WeightScales;
use crate::tensor::{Layout, Place, Tensor};
use flash_sampling::{Head as FacadeHead, HeadError, HeadOwner, Matrix};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// The parts of a head, shared by all samplers of the head.
pub(crate) struct HeadParts {
    /// The matrix with the layout `layout`, or the bytes of this matrix in a file.
    pub(crate) weight: Tensor,
    pub(crate) layout: Layout,
    pub(crate) scales: Option<WeightScales>,
    /// One value for each row of the weight.
    pub(crate) bias: Option<Floats>,
    pub(crate) soft_cap: Option<f32>,
    pub(crate) scale: f32,
    pub(crate) vocab_size: usize,
    pub(crate) first_token: usize,
}

/// Float32 numbers on the device of the weight.
pub(crate) enum Floats {
    Host(Vec<f32>),
    /// Contiguous float32 in memory of the weight's GPU.
    Device(Tensor),
}

impl Floats {
    /// The tensor, if it is in memory of a GPU.
    pub(crate) fn on_device(&self) -> Option<&Tensor> {
        match self {
            Floats::Host(_) => None,
            Floats::Device(tensor) => Some(tensor),
        }
    }
}

impl HeadParts {
    /// The facade's head over a weight in host memory.
    pub(crate) fn head(&self) -> Result<FacadeHead<'_>, HeadError> {
        let Layout { dtype, rows, cols, row_stride } = self.layout;
        let mut matrix = Matrix::from_bytes(self.weight.bytes(), dtype, rows, cols, row_stride)?;
        if let Some(WeightScales { values: Floats::Host(values), block }) = &self.scales {
            matrix = matrix.with_scales(values, *block)?;
        }
        let mut head = FacadeHead::shard(matrix, self.first_token, self.vocab_size)?.with_scale(self.scale)?;
        if let Some(Floats::Host(bias)) = &self.bias {
            head = head.with_bias(bias)?;
        }
        self.soft_cap.map_or(Ok(head), |cap| head.with_soft_cap(cap))
    }
}

/// Keeps a sampler's weight alive.
pub(crate) struct Owner(pub(crate) Arc<HeadParts>);

impl HeadOwner for Owner {
    fn head(&self) -> Result<FacadeHead<'_>, HeadError> {
        self.0.head()
    }
}

/// An LM head: `logits = scale * soft_cap(hidden @ weight.T + bias)`.
///
/// The head borrows the weight: it does not copy the weight, and keeps the weight alive. Nothing may write to the
/// weight during a call.
///
/// weight: [vocab, hidden] in bfloat16, float16, float32, float8_e4m3fn or int8, on the CPU or a GPU. Each row is
///     contiguous; the stride between rows may be larger than a row. numpy has no bfloat16, so uint16 elements are read
///     as the bits of bfloat16.
/// bias: [vocab] float, added to `hidden @ weight.T`. On a GPU: float32, contiguous.
/// soft_cap: the cap of `cap * tanh(logit / cap)`, as in Gemma 2.
/// scale: the factor of the logits, as in Cohere and Granite.
/// vocab_size: the number of tokens of the vocabulary; None: `first_token` plus the rows of the weight. Rows beyond it
///     are padding, which is never sampled.
/// first_token: the token id of the weight's first row, for a shard of a vocabulary.
/// weight_scale: the factors of a weight of float8_e4m3fn or int8, in bfloat16, float16 or float32: a number or [] for
///     the weight, [vocab] or [vocab, 1] for its rows, [ceil(vocab / 128), ceil(hidden / 128)] for blocks of 128 x 128,
///     [vocab, n] for groups of hidden / n columns. A tensor on a GPU is contiguous float32. The tensors `weight_scale`
///     and `weight_scale_inv` of checkpoints are such factors.
#[pyclass(frozen, module = "flash_sampling")]
pub(crate) struct Head {
    pub(crate) parts: Arc<HeadParts>,
}

#[pymethods]
impl Head {
    #[new]
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (weight, bias=None, soft_cap=None, scale=1.0, vocab_size=None, first_token=0,
        weight_scale=None))]
    fn new(
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        soft_cap: Option<f32>,
        scale: f32,
        vocab_size: Option<i128>,
        first_token: i128,
        weight_scale: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Head> {
        let weight = Tensor::borrow(weight, "weight")?;
        let layout = weight.weight_layout("weight")?;
        let scales = WeightScales::read(weight_scale, &weight, &layout)?;
        let bias = match (bias, weight.place) {
            (None, _) => None,
            (Some(bias), Place::Host) => {
                let bias = rounded(bias, "bias", layout.rows)?;
                Some(Floats::Host((0..layout.rows).map(|row| bias.get(row)).collect()))
            }
            (Some(bias), place) => {
                let bias = Tensor::borrow(bias, "bias")?;
                if bias.place != place || bias.shape != [layout.rows] || !bias.is_floats() {
                    let text = format!("bias must be {} contiguous values of float32 on {place}", layout.rows);
                    return Err(invalid("bias", text));
                }
                Some(Floats::Device(bias))
            }
        };
        let first_token: usize = integer("first_token", first_token, 0)?;
        let vocab_size = match vocab_size {
            Some(size) => integer("vocab_size", size, 0)?,
            None => first_token.saturating_add(layout.rows),
        };
        let parts = HeadParts { weight, layout, scales, bias, soft_cap, scale, vocab_size, first_token };
        if parts.weight.place == Place::Host {
            // On a GPU, the sampler makes these checks.
            parts.head().map_err(|error| of_head(&error))?;
        }
        Ok(Head { parts: Arc::new(parts) })
    }

    /// Makes the head of a GGUF file, for samplers on the CPU, or on a GPU by `Sampler(head, backend="cuda:GPU")`.
    ///
    /// path: the file, which is mapped into memory. Nothing may write to the file while the head exists.
    /// tensor: the name of the weight [vocab, hidden], in any type of docs/weights.md; None: "output.weight", or
    ///     "token_embd.weight" if the file has no "output.weight".
    ///
    /// The head has the vocabulary size (at most the rows of the weight), the soft cap and the scale of the file. With
    /// the default tensor, the head also has the bias of the file.
    ///
    /// Raises OSError if the file cannot be read. Raises FlashSamplingError if the file is not a GGUF file, has no such
    /// tensor, or has the tensor in a type that is not supported.
    #[staticmethod]
    #[pyo3(signature = (path, tensor=None))]
    fn from_gguf(path: PathBuf, tensor: Option<&str>) -> PyResult<Head> {
        Ok(Head { parts: Arc::new(gguf::head(&path, tensor)?) })
    }

    /// The number of tokens of the vocabulary.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.parts.vocab_size
    }

    /// The shape of the weight, (rows, hidden).
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.parts.layout.rows, self.parts.layout.cols)
    }

    /// The device of the weight: "the CPU", or for example "cuda:0".
    #[getter]
    fn device(&self) -> String {
        self.parts.weight.place.to_string()
    }

    fn __repr__(&self) -> String {
        let (rows, hidden) = self.shape();
        format!("Head([{rows}, {hidden}], vocab_size={}, on {})", self.parts.vocab_size, self.device())
    }
}
