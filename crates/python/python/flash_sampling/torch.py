"""The torch operator ``flash_sampling::sample``, which ``torch.compile`` keeps as one node.

``operator(sampler)`` returns a function of tensors that calls it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ._lib import Sampler

__all__ = ["operator"]

# The arguments of an operator cannot be Python objects, so a number stands for a sampler.
_NUMBERS = itertools.count()
_SAMPLERS: "weakref.WeakValueDictionary[int, Sampler]" = weakref.WeakValueDictionary()
_TYPES = {
    "seed": torch.int64,
    "position": torch.int64,
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "mask": torch.int32,
}


@torch.library.custom_op("flash_sampling::sample", mutates_args=())
def _sample(
    hidden: Tensor,
    sampler: int,
    seed: Tensor,
    position: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    knobs = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "mask": mask}
    if not hidden.is_cuda:
        return _SAMPLERS[sampler](hidden, seed=seed, position=position, **knobs)
    # These conversions run on the GPU and do not wait.
    given = {"seed": seed, "position": position, **knobs}
    columns = {name: value.to(_TYPES[name]).contiguous() for name, value in given.items() if value is not None}
    tokens = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    return _SAMPLERS[sampler].enqueue(hidden, tokens, **columns)


@_sample.register_fake
def _(hidden, sampler, seed, position, temperature=None, top_k=None, top_p=None, min_p=None, mask=None):
    return hidden.new_empty((hidden.shape[0],), dtype=torch.int64)


def operator(sampler: Sampler) -> Callable[..., Tensor]:
    """Returns a function that draws like ``sampler``, and that ``torch.compile`` keeps as one node.

    Its arguments are ``(hidden, *, seed, position, temperature=None, top_k=None, top_p=None, min_p=None, mask=None)``.
    The parameters are tensors [rows], and ``mask`` is [rows, words]. The function returns the tokens, [rows] int64, on
    the device of ``hidden``. It keeps the sampler alive; a compiled program alone does not. On a GPU, the parameters
    must be on the GPU, the operator does not wait, and a row that fails has token -1.
    """
    number = next(_NUMBERS)
    _SAMPLERS[number] = sampler

    def sample(hidden, *, seed, position, temperature=None, top_k=None, top_p=None, min_p=None, mask=None):
        return _sample(hidden, number, seed, position, temperature, top_k, top_p, min_p, mask)

    sample.sampler = sampler
    return sample
