"""The parameters of rows of a vLLM batch, as arguments of `Sampler.enqueue`.

The sampler reads vLLM's own tensors, without a copy. They have an element or a list for each slot of vLLM's sampler.
vLLM's kernels read the same tensors in the same step. vLLM writes to tensors in GPU memory on the same stream, so no
write overtakes a read. For tensors in pinned host memory, vLLM has one copy for each step that is not complete.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor

from ._vllm_logprobs import NO_LOGPROBS, empty_results

# The penalties, with the values that disable them.
_PENALTIES = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}


class Rows:
    """The rows of a batch that this package draws, while their slots have the same requests.

    at: the indices of the rows in the batch, on the GPU; None: all rows. names: the names of the requests.
    counts: the numbers of sampled and of rejected tokens of each row, for a batch without prompts. All steps share
    them, because vLLM only reads them.
    results: the tensors of `Sampler.enqueue` for log-probabilities. Each step writes to them.
    """

    def __init__(self, draws: Any, engine: Any, batch: Any, rows: numpy.ndarray) -> None:
        """draws: the `Draws` of this package. engine: the sampler of vLLM. rows: the indices of the rows."""
        self.names, self.at = batch.req_ids, None
        self.slots, self.slots_np = batch.expanded_idx_mapping, batch.idx_mapping_np
        if len(rows) < len(batch.req_ids):
            from vllm.utils.torch_utils import async_tensor_h2d

            self.at = async_tensor_h2d(rows, device=self.slots.device)
            self.names = [batch.req_ids[row] for row in rows]
            self.slots, self.slots_np = self.slots[self.at], self.slots_np[rows]
        self.counts = draws.ones[: len(rows)], draws.zeros[: len(rows)]
        self.history = engine.req_states
        # vLLM's holders of the tensors. In each step, vLLM uses other memory, so `arguments` gets the tensors anew.
        self.columns = {"temperature": engine.sampling_states.temperature, "seed": engine.sampling_states.seeds}
        self.lists = {"index": self.slots.int()}
        biases, penalties, bad_words = engine.logits_processors
        self._add_filters(engine.sampling_states)
        if biases.use_logit_bias[self.slots_np].any():
            self._add_biases(biases, draws.vocab_size)
            self._add_stop_tokens(biases)
        if penalties.use_penalty[self.slots_np].any():
            self._add_penalties(penalties)
        self._add_bad_words(bad_words)
        top_n = int(engine.sampling_states.num_logprobs[self.slots_np].max())
        self.results = {} if top_n == NO_LOGPROBS else empty_results(len(rows), top_n, self.slots.device)

    def __len__(self) -> int:
        return len(self.names)

    def arguments(self) -> dict[str, Tensor]:
        """Returns the arguments of `Sampler.enqueue` for a step, except the results."""
        arguments = {name: column.gpu for name, column in self.columns.items()} | self.lists
        if "output_tokens" in arguments:
            # In a step before the last part of a prompt, `total_len` counts the whole prompt. vLLM discards the token
            # of such a step.
            arguments["output_end"] = self.history_begin + self.history.total_len.gpu
        if self.words > 0:
            arguments["banned_tokens"] = last_tokens(self.bad_words, self.slots, self.words).view(-1)
        return arguments

    def _any(self, column: Any, off: float) -> bool:
        """Whether a row has a value other than `off`, the value that disables the parameter."""
        return numpy.count_nonzero(column.np[self.slots_np] != off) > 0

    def _add_filters(self, states: Any) -> None:
        for name, off in (("top_k", states.vocab_size), ("top_p", 1), ("min_p", 0)):
            if self._any(getattr(states, name), off):
                self.columns[name] = getattr(states, name)

    def _add_biases(self, state: Any, vocab_size: int) -> None:
        """Adds the allowed tokens and the biases."""
        if self._any(state.num_logit_bias, 0):
            self.lists |= slot_lists("bias", state.logit_bias_token_ids.gpu, state.num_logit_bias.gpu)
            self.lists["bias_values"] = state.logit_bias.gpu.view(-1)
        if self._any(state.num_allowed_token_ids, 0):
            counts = state.num_allowed_token_ids.gpu[self.slots]
            self.lists["mask"] = bitmaps(state.allowed_token_ids.gpu[self.slots], counts, vocab_size)

    def _add_penalties(self, state: Any) -> None:
        given = [name for name, off in _PENALTIES.items() if self._any(getattr(state, name), off)]
        self.columns |= {name: getattr(state, name) for name in given}
        self._add_history()

    def _add_stop_tokens(self, state: Any) -> None:
        """Adds the stop tokens, which are banned while the output has fewer than `min_tokens` tokens."""
        if self._any(state.num_stop_token_ids, 0):
            self.lists |= slot_lists("stop", state.stop_token_ids.gpu, state.num_stop_token_ids.gpu)
            self.lists["min_tokens"] = state.min_lens.gpu - self.history.prompt_len.gpu
            self._add_history()

    def _add_history(self) -> None:
        """Adds the tokens of sequences. The sampler reads only the tokens of rows with penalties."""
        if "output_tokens" not in self.lists:
            lists = slot_lists("prompt", self.history.all_token_ids.gpu, self.history.prompt_len.gpu)
            self.history_begin = lists["prompt_begin"]
            self.lists |= lists | {"output_begin": lists["prompt_end"], "output_tokens": lists["prompt_tokens"]}

    def _add_bad_words(self, state: Any) -> None:
        """Adds the begins and ends of the lists of banned tokens. Each step computes the tokens, by `last_tokens`."""
        self.bad_words, self.words = state, int(state.num_bad_words.np[self.slots_np].max())
        if self.words > 0:
            begin = torch.zeros(len(state.num_bad_words.np), dtype=torch.int64, device=self.slots.device)
            begin[self.slots] = torch.arange(len(self), device=begin.device) * self.words
            self.lists |= {"banned_begin": begin, "banned_end": begin + self.words}


def _range(count: int, like: Tensor) -> Tensor:
    """Returns the numbers from 0 to count - 1, on the device of the tensor `like`: [count] int32."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


def slot_lists(name: str, tokens: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Returns the first `counts` tokens of each slot, as the lists `name` of `Sampler.enqueue`.

    tokens: [slots, n] int32. counts: [slots].
    """
    begin = torch.arange(len(tokens), device=tokens.device) * tokens.shape[1]
    return {f"{name}_begin": begin, f"{name}_end": begin + counts, f"{name}_tokens": tokens.view(-1)}


def bitmaps(tokens: Tensor, counts: Tensor, vocab_size: int) -> Tensor:
    """Returns bitmaps of the first `counts` tokens of each row: [rows, words] int32.

    A row without tokens allows every token. tokens: [rows, n] int32, which may have duplicates. counts: [rows].
    """
    words = -(-vocab_size // 32)
    # Places without a token, and tokens outside of the vocabulary, set a bit in an extra word, which is not returned.
    place = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(place < counts[:, None], tokens, 32 * words).clamp(max=32 * words).sort(1).values
    is_first = torch.ones_like(tokens, dtype=torch.bool)
    is_first[:, 1:] = tokens[:, 1:] != tokens[:, :-1]
    bits = torch.where(is_first, torch.ones_like(tokens) << (tokens & 31), 0)
    mask = torch.where(counts[:, None] > 0, 0, -1).int().repeat(1, words + 1)
    return mask.scatter_add_(1, (tokens >> 5).long(), bits)[:, :words]


def last_tokens(state: Any, slots: Tensor, words: int) -> Tensor:
    """Returns the last token of each bad word whose other tokens are at the end of the output: [rows, words] int32.

    The element of any other bad word is -1. words: the largest number of bad words in these slots.
    """
    history, count = state.req_states, state.num_bad_words.gpu[slots][:, None]
    all_tokens, tokens = history.all_token_ids.gpu, state.bad_word_token_ids.gpu[slots]
    places = tokens.shape[1]
    # Word w has the tokens from end w - 1 to end w. After the last end, a slot may have ends of an earlier request.
    is_word, ends = _range(words, tokens) < count, state.bad_word_offsets.gpu[slots, 1 : words + 1]
    ends = torch.where(is_word, ends, places).contiguous()
    # For each token: the index of its word (at least `count` after the last word), and its distance from the last
    # token of the word.
    place = _range(places, ends).expand(len(ends), -1).contiguous()
    word = torch.searchsorted(ends, place, right=True)
    distance = ends.gather(1, word.clamp(max=words - 1)) - 1 - place
    is_before_last = (word < count) & (distance > 0)
    at = history.total_len.gpu[slots][:, None] - distance
    is_in_output = is_before_last & (at >= history.prompt_len.gpu[slots][:, None])
    at = torch.where(is_in_output, slots.long()[:, None] * all_tokens.shape[1] + at, 0)
    differs = is_before_last & ~(is_in_output & (all_tokens.view(-1)[at] == tokens))
    differences = torch.zeros_like(ends).scatter_add_(1, word.clamp(max=words - 1), differs.int())
    return torch.where(is_word & (differences == 0), tokens.gather(1, ends.long() - 1), -1)
