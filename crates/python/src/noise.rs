//! The function `noise`.

use crate::column::{integer, list_of_integers};
use crate::error::invalid;
use crate::history::TOKENS;
use crate::result::deliver;
use flash_sampling::{Domain, Noise};
use pyo3::prelude::*;

/// The standard Gumbel noise of tokens: a pure function of (seed, position, draw, token).
///
/// A draw is the argmax of `logits / temperature + noise(...)` over the tokens.
///
/// seed: 0 to 2^64 - 1. position: 0 to 2^56 - 1. draw: the index of the draw, from 0.
/// tokens: token ids; a sequence of int, or a tensor [tokens] of integers.
///
/// Returns [tokens] float32. A torch or CuPy tensor `tokens` gives an array of the same library. Any other `tokens`
/// gives a numpy array, or a list if numpy is not installed.
#[pyfunction]
pub(crate) fn noise<'py>(
    py: Python<'py>,
    seed: i128,
    position: i128,
    draw: i128,
    tokens: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let ids: Vec<u32> = list_of_integers(tokens, "tokens", TOKENS)?;
    let draw = integer("draw", draw, 0)?;
    let noise = Noise::new(integer("seed", seed, 0)?, integer("position", position, 0)?);
    let noise = noise.ok_or_else(|| invalid("position", format!("position is {position}, but must be below 2^56")))?;
    let bytes: Vec<u8> =
        py.detach(|| ids.iter().flat_map(|&token| noise.gumbel(Domain::Token, draw, token).to_ne_bytes()).collect());
    deliver(py, tokens, &bytes, "float32", None)
}
