"""The parameters of rows of a vLLM batch, as arguments of `Sampler.enqueue`.

Prompts, outputs and biases are in vLLM's own tensors. vLLM writes to these tensors in the same stream, so no write is
concurrent with a draw. vLLM keeps prompts and outputs in pinned host memory, which the GPU reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

# The penalties, with the values that disable them.
_PENALTIES = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}


@dataclass
class Rows:
    """Rows of a batch.

    slots: [rows], the index of each row's request in the states of vLLM's sampler. slots_np: the same on the CPU.
    position: [rows] int64, the number of tokens of each sequence.
    """

    slots: Tensor
    slots_np: numpy.ndarray
    position: Tensor

    def arguments(self, engine: Any, vocab_size: int) -> dict[str, Tensor]:
        """Returns the arguments of `Sampler.enqueue`. engine: the sampler of vLLM, which has the states of requests."""
        biases, penalties, bad_words = engine.logits_processors
        arguments = self._sampling(engine.sampling_states) | self._biases(biases, vocab_size)
        return arguments | self._penalties(penalties) | self._banned(biases, bad_words)

    def _any(self, column: Any, off: float) -> bool:
        """Whether a row has a value other than `off`, the value that disables the parameter."""
        return bool((column.np[self.slots_np] != off).any())

    def _sampling(self, states: Any) -> dict[str, Tensor]:
        columns = {"temperature": states.temperature, "seed": states.seeds}
        for name, off in (("top_k", states.vocab_size), ("top_p", 1), ("min_p", 0)):
            if self._any(getattr(states, name), off):
                columns[name] = getattr(states, name)
        # The sampler gets copies, because vLLM uses other memory for these states in each step.
        return {name: column.gpu[self.slots] for name, column in columns.items()} | {"position": self.position}

    def _biases(self, state: Any, vocab_size: int) -> dict[str, Tensor]:
        """Returns the allowed tokens and the biases."""
        arguments = {}
        if self._any(state.num_logit_bias, 0):
            counts = state.num_logit_bias.gpu[self.slots]
            arguments |= slot_lists("bias", state.logit_bias_token_ids.gpu, self.slots, counts)
            arguments["bias_values"] = state.logit_bias.gpu.view(-1)
        if self._any(state.num_allowed_token_ids, 0):
            counts = state.num_allowed_token_ids.gpu[self.slots]
            arguments["mask"] = bitmaps(state.allowed_token_ids.gpu[self.slots], counts, vocab_size)
        return arguments

    def _penalties(self, state: Any) -> dict[str, Tensor]:
        """Returns penalties and the tokens of sequences. The sampler reads only the tokens of rows with penalties."""
        given = [name for name, off in _PENALTIES.items() if self._any(getattr(state, name), off)]
        if not given:
            return {}
        tokens, prompt_len = state.req_states.all_token_ids.gpu, state.req_states.prompt_len.gpu[self.slots]
        begin = self.slots.long() * tokens.shape[1]
        middle = begin + torch.minimum(prompt_len, self.position)
        arguments = {name: getattr(state, name).gpu[self.slots] for name in given}
        arguments |= {"prompt_begin": begin, "prompt_end": middle, "prompt_tokens": tokens.view(-1)}
        end = begin + self.position
        return arguments | {"output_begin": middle, "output_end": end, "output_tokens": tokens.view(-1)}

    def _banned(self, biases: Any, bad_words: Any) -> dict[str, Tensor]:
        """Returns the stop tokens of outputs that are too short, and the last tokens of bad words."""
        banned = []
        if self._any(biases.num_stop_token_ids, 0):
            is_short = self.position < biases.min_lens.gpu[self.slots]
            counts = torch.where(is_short, biases.num_stop_token_ids.gpu[self.slots], 0)
            tokens = biases.stop_token_ids.gpu[self.slots]
            banned.append(torch.where(_range(tokens.shape[1], tokens) < counts[:, None], tokens, -1))
        if self._any(bad_words.num_bad_words, 0):
            banned.append(self._bad_words(bad_words))
        return row_lists("banned", torch.cat(banned, 1)) if banned else {}

    def _bad_words(self, state: Any) -> Tensor:
        """Returns the last token of each bad word whose other tokens are the end of the output: [rows, words] int32.

        The element of any other bad word is -1.
        """
        history, count = state.req_states, state.num_bad_words.gpu[self.slots][:, None]
        all_tokens, tokens = history.all_token_ids.gpu, state.bad_word_token_ids.gpu[self.slots]
        words, places = int(state.num_bad_words.np[self.slots_np].max()), tokens.shape[1]
        # Word w has the tokens from end w - 1 to end w. After the last end, a slot may have ends of an earlier request.
        is_word, ends = _range(words, tokens) < count, state.bad_word_offsets.gpu[self.slots, 1 : words + 1]
        ends = torch.where(is_word, ends, places).contiguous()
        # For each token: the index of its word (at least `count` after the last word), and its distance from the last
        # token of the word.
        place = _range(places, ends).expand(len(ends), -1).contiguous()
        word = torch.searchsorted(ends, place, right=True)
        distance = ends.gather(1, word.clamp(max=words - 1)) - 1 - place
        is_before_last = (word < count) & (distance > 0)
        at = self.position[:, None] - distance
        is_in_output = is_before_last & (at >= history.prompt_len.gpu[self.slots][:, None])
        at = torch.where(is_in_output, self.slots.long()[:, None] * all_tokens.shape[1] + at, 0)
        differs = is_before_last & ~(is_in_output & (all_tokens.view(-1)[at] == tokens))
        differences = torch.zeros_like(ends).scatter_add_(1, word.clamp(max=words - 1), differs.int())
        return torch.where(is_word & (differences == 0), tokens.gather(1, ends.long() - 1), -1)


def _range(count: int, like: Tensor) -> Tensor:
    """Returns the numbers from 0 to count - 1, on the device of the tensor `like`: [count] int32."""
    return torch.arange(count, dtype=torch.int32, device=like.device)


def row_lists(name: str, tokens: Tensor) -> dict[str, Tensor]:
    """Returns the lists `name` of `Sampler.enqueue`, from tokens [rows, n] int32. An element of -1 has no effect."""
    begin = torch.arange(len(tokens), device=tokens.device) * tokens.shape[1]
    return {f"{name}_begin": begin, f"{name}_end": begin + tokens.shape[1], f"{name}_tokens": tokens.view(-1)}


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
