"""Functions for torch: an operator, log-probabilities of given tokens, and ranks over ``torch.distributed``.

``operator(sampler)`` returns a function of tensors that calls the operator ``flash_sampling::sample``, which
``torch.compile`` keeps as one node. ``token_logprobs(sampler, hidden, tokens)`` returns log-probabilities of given
tokens. ``group(process_group)`` returns the group of ranks for a sampler of a sharded vocabulary.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import Tensor

from ._lib import FlashSamplingError, Sampler, SamplingParams

__all__ = ["group", "operator", "token_logprobs"]

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


def token_logprobs(sampler: Sampler, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Returns the log-probabilities of given tokens in nats, from the model's own logits: [rows, n] float32.

    hidden: [rows, hidden], with any number of rows. tokens: [rows, n] int64 on the device of ``hidden``. For a prompt,
    row i of ``tokens`` has the token that follows token i of the prompt. Logits exist for at most ``sampler.max_rows``
    rows at a time. On the CPU, the sampler needs ``max_logprobs``. On a GPU, the function does not wait, and the result
    is -inf for a token outside of the vocabulary and for a row with invalid logits.
    """
    if tokens.ndim != 2 or len(tokens) != len(hidden) or tokens.dtype != torch.int64:
        shape = f"{list(tokens.shape)} and type {tokens.dtype}"
        error = FlashSamplingError(f"tokens has shape {shape}, but must be [{len(hidden)}, n] int64")
        error.knob = "tokens"
        raise error
    if not hidden.is_cuda:
        invalid = ((tokens < 0) | (tokens >= sampler.vocab_size)).nonzero().tolist()
        if invalid:
            row, column = invalid[0]
            text = f"tokens has {tokens[row, column]}, but the vocabulary has size {sampler.vocab_size}"
            error = FlashSamplingError(f"row {row}: {text}")
            error.row, error.knob = row, "tokens"
            raise error
    logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=hidden.device)
    for first in range(0, len(hidden), sampler.max_rows):
        rows = slice(first, first + sampler.max_rows)
        of_rows, given = hidden[rows], tokens[rows]
        if hidden.is_cuda:
            # Temperature 0 needs no noise.
            zero = torch.zeros(len(of_rows), dtype=torch.int64, device=hidden.device)
            options = {"temperature": zero.float(), "logprobs_mode": "raw_logprobs"}
            columns = {"logprob_token_ids": given.contiguous(), "token_logprobs": logprobs[rows]}
            sampler.enqueue(of_rows, zero.clone(), seed=zero, position=zero, **options, **columns)
            continue
        options = {"temperature": 0, "logprobs": 0, "logprobs_mode": "raw_logprobs"}
        params = [SamplingParams(**options, logprob_token_ids=row) for row in given.tolist()]
        results = sampler.sample(of_rows, params, seed=range(len(params)), position=0)
        logprobs[rows] = torch.tensor([[nats for _, nats in row.token_logprobs] for row in results])
    return logprobs


def group(process_group=None, time_limit: float = 30.0) -> "_Group":
    """Returns the group of ranks of a process group of ``torch.distributed``, for ``Sampler(head, group=...)``.

    Every process of ``process_group`` calls this function. ``process_group`` may have any backend; None means all
    processes. The ranks exchange bytes over a gloo group of the same processes, which this function makes. The rank of
    a process is its rank in the gloo group.

    time_limit: the seconds that a rank waits for the others. After this time, its call is an error, and the group is
    unusable.
    """
    return _Group(process_group, time_limit)


class _Group:
    """The ranks of a process group, with an exchange of bytes over gloo."""

    # The number of message bytes in the first exchange. Longer messages take a second exchange.
    ROOM = 4096

    def __init__(self, process_group, time_limit: float):
        from torch import distributed

        ranks = distributed.get_process_group_ranks(process_group or distributed.group.WORLD)
        options = {"backend": "gloo", "timeout": timedelta(seconds=time_limit), "use_local_synchronization": True}
        self._group = distributed.new_group(ranks, **options)
        self._distributed = distributed
        self.rank, self.world = distributed.get_rank(self._group), len(ranks)
        self.time_limit = time_limit

    def all_gather(self, message: bytes, time_limit: float) -> list[bytes]:
        end = time.monotonic() + time_limit
        size = len(message).to_bytes(8, "little")
        messages = self._gather(size + message[: self.ROOM], 8 + self.ROOM, end)
        sizes = [int.from_bytes(each[:8], "little") for each in messages]
        rest = max(sizes) - self.ROOM
        rests = self._gather(message[self.ROOM :], rest, end) if rest > 0 else [b""] * self.world
        return [bytes(each[8:] + rest)[:size] for each, rest, size in zip(messages, rests, sizes)]

    def _gather(self, mine: bytes, size: int, end: float) -> "list[bytearray]":
        """Gathers the messages of all ranks, each padded with zeros to `size` bytes, until the time `end`."""
        memory = [bytearray(mine.ljust(size, b"\0"))] + [bytearray(size) for _ in range(self.world)]
        mine, *every = (torch.frombuffer(bytes, dtype=torch.uint8) for bytes in memory)
        left = max(end - time.monotonic(), 0.001)
        try:
            self._distributed.all_gather(every, mine, self._group, async_op=True).wait(timedelta(seconds=left))
        except RuntimeError as error:
            if time.monotonic() < end - 0.1:  # An error before the end. torch measures the time by another clock.
                raise
            raise TimeoutError("not all ranks came to the exchange within the time limit") from error
        return memory[1:]
