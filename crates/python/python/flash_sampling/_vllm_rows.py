"""The parameters of rows of a vLLM batch, as arguments of `Sampler.enqueue`.

Lists of tokens are vLLM's own tensors. vLLM writes to them in the same stream, so no write is concurrent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor


@dataclass
class Rows:
    """Rows of a batch.

    slots: [rows], the place of each row's request in the states of vLLM's sampler. slots_np: the same on the CPU.
    position: [rows] int64, the number of tokens of each sequence.
    """

    slots: Tensor
    slots_np: numpy.ndarray
    position: Tensor

    def arguments(self, engine: Any, vocab_size: int) -> dict[str, Tensor]:
        """Returns the arguments for the states of a sampler of vLLM."""
        biases = engine.logits_processors[0]
        return self._sampling(engine.sampling_states) | self._biases(biases, vocab_size)

    def _any(self, column: Any, off: float) -> bool:
        """Whether a row has another value than `off`, which disables a parameter."""
        return bool((column.np[self.slots_np] != off).any())

    def _sampling(self, states: Any) -> dict[str, Tensor]:
        columns = {"temperature": states.temperature, "seed": states.seeds}
        for name, off in (("top_k", states.vocab_size), ("top_p", 1), ("min_p", 0)):
            if self._any(getattr(states, name), off):
                columns[name] = getattr(states, name)
        # The sampler gets copies, because vLLM moves these tensors in each step.
        return {name: column.gpu[self.slots] for name, column in columns.items()} | {"position": self.position}

    def _biases(self, state: Any, vocab_size: int) -> dict[str, Tensor]:
        """Returns the allowed tokens, biases and banned stop tokens."""
        arguments = {}
        if self._any(state.num_logit_bias, 0):
            counts = state.num_logit_bias.gpu[self.slots]
            arguments |= slot_lists("bias", state.logit_bias_token_ids.gpu, self.slots, counts)
            arguments["bias_values"] = state.logit_bias.gpu.view(-1)
        if self._any(state.num_stop_token_ids, 0):
            is_short = self.position < state.min_lens.gpu[self.slots]
            counts = torch.where(is_short, state.num_stop_token_ids.gpu[self.slots], 0)
            arguments |= slot_lists("banned", state.stop_token_ids.gpu, self.slots, counts)
        if self._any(state.num_allowed_token_ids, 0):
            counts = state.num_allowed_token_ids.gpu[self.slots]
            arguments["mask"] = bitmaps(state.allowed_token_ids.gpu[self.slots], counts, vocab_size)
        return arguments


def slot_lists(name, tokens, slots, counts):
    """Returns the first `counts` tokens of the slot of each row, as the lists `name` of `Sampler.enqueue`.

    tokens: [all slots, n] int32. slots, counts: [rows].
    """
    begin = slots.long() * tokens.shape[1]
    return {f"{name}_begin": begin, f"{name}_end": begin + counts, f"{name}_tokens": tokens.view(-1)}


def bitmaps(tokens, counts, vocab_size):
    """Returns bitmaps of the first `counts` tokens of each row: [rows, words] int32.

    A row without tokens allows every token. tokens: [rows, n] int32, which may have duplicates. counts: [rows].
    """
    words = -(-vocab_size // 32)
    # Places without a token, and tokens outside of the vocabulary, set a bit in one more word, which is not returned.
    place = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(place < counts[:, None], tokens, 32 * words).clamp(max=32 * words).sort(1).values
    is_first = torch.ones_like(tokens, dtype=torch.bool)
    is_first[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
    bits = torch.where(is_first, torch.ones_like(tokens) << (tokens & 31), 0)
    mask = torch.where(counts[:, None] > 0, 0, -1).int().repeat(1, words + 1)
    return mask.scatter_add_(1, (tokens >> 5).long(), bits)[:, :words]
