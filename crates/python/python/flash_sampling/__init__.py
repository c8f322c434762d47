"""Exact token sampling fused into the LM-head matmul.

Noise is a pure function of (seed, position, draw, token), so a row draws the same token in any batch. A tensor is a
numpy array, or any object with ``__dlpack__`` (torch, JAX, CuPy). Weight and hidden states are borrowed, not copied.
Nothing may write to a tensor during a call. ``flash_sampling.torch`` has an operator for ``torch.compile``, and
``flash_sampling.hf`` a function for ``model.generate`` of transformers. ``flash_sampling.vllm`` and
``flash_sampling.sglang`` are plugins of these engines.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ._arrays import backend_of
from ._lib import (
    Draw,
    FlashSamplingError,
    Head,
    History,
    Kept,
    RowSample,
    Sampler,
    SamplingParams,
    __version__,
    noise,
)

__all__ = [
    "Draw",
    "FlashSamplingError",
    "Head",
    "History",
    "Kept",
    "RowSample",
    "Sampler",
    "SamplingParams",
    "__version__",
    "from_logits",
    "noise",
    "reference",
]


# The number of rows that `from_logits` draws at a time, which limits the memory of its samplers: for calls of few rows,
# and for all other calls.
_FEW, _ROWS = 16, 1024


@lru_cache(maxsize=8)
def _sampler_of_logits(vocab_size: int, backend: str, rows: int) -> Sampler:
    return Sampler._in_parts(vocab_size, rows, backend)


def from_logits(logits: Any, **params: Any) -> Any:
    """Draws one token for each row of existing logits.

    logits: [rows, vocab] in bfloat16, float16 or float32, on the CPU or a GPU, with any number of rows.
    params: the keyword arguments of a call of ``Sampler``: seed, position, temperature, top_k, top_p, min_p, mask, out.

    Returns the tokens, [rows] int64. ``Sampler.for_logits`` returns a sampler that also has ``sample``.
    """
    rows, vocab_size = _shape(logits, "logits")
    sampler = _sampler_of_logits(vocab_size, backend_of(logits), _FEW if rows <= _FEW else _ROWS)
    return sampler(logits, **params)


def reference(head: Head, hidden: Any, **params: Any) -> Any:
    """Draws one token for each row with the slow reference in float64, which defines the result of the fast samplers.

    head: a Head in memory of the CPU.
    hidden: [rows, hidden] in bfloat16, float16 or float32, in memory of the CPU.
    params: the keyword arguments of a call of ``Sampler``.

    Returns the tokens, [rows] int64.
    """
    rows, _ = _shape(hidden, "hidden")
    return Sampler(head, max(1, rows), backend="reference")(hidden, **params)


def _shape(tensor: Any, name: str) -> tuple[int, int]:
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if len(shape) != 2:
        error = FlashSamplingError(f"{name} has shape {list(shape)}, but must have two dimensions")
        error.knob = name
        raise error
    return shape
