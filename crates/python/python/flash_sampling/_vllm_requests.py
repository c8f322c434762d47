"""The requests in the slots of a vLLM batch: the rows that this package draws, and the rows that vLLM draws.

Most results depend on the requests alone, so steps with the same requests share them. They are computed again if a
batch has other slots than the last batch, or if vLLM has added a request since the last batch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy

from ._engines import TOP_K_MAX
from ._vllm_rows import Rows

# The requests of the last batch of each sampler of vLLM.
_LAST: "weakref.WeakKeyDictionary[Any, Requests]" = weakref.WeakKeyDictionary()


def forgetting(add_request: Callable[..., None]) -> Callable[..., None]:
    """Returns vLLM's method `Sampler.add_request`, changed to also discard the `Requests` of the last batch."""

    @functools.wraps(add_request)
    def changed(self: Any, req_idx: int, sampling_params: Any) -> None:
        _LAST.pop(self, None)
        return add_request(self, req_idx, sampling_params)

    return changed


def rows_of(draws: Any, engine: Any, batch: Any, grammar_output: Any) -> Rows | None:
    """Returns the rows of a batch that this package draws, or None if vLLM draws all rows.

    draws: the `Draws` of this package. engine: the sampler of vLLM.
    """
    slots = batch.idx_mapping_np
    if batch.num_draft_tokens or batch.logits_indices.shape[0] != len(slots):
        return None
    requests = _LAST.get(engine)
    if requests is None or requests.draws is not draws or requests.slots != slots.tobytes():
        requests = _LAST[engine] = Requests(draws, engine, slots)
    return requests.rows_of(engine, batch, grammar_output)


class Requests:
    """The requests in the slots of a batch, with the results that steps share."""

    def __init__(self, draws: Any, engine: Any, slots: numpy.ndarray) -> None:
        self.draws, self.slots = draws, slots.tobytes()
        bias, penalties, _ = engine.logits_processors
        states = engine.sampling_states
        top_k = states.top_k.np[slots]
        unsupported = (
            (states.num_logprobs[slots] > draws.max_logprobs)
            | (engine.logprob_token_ids_state.num_token_ids.np[slots] > 0)
            | (bias.restore_when_all_masked.np[slots] != 0)
            | ((top_k > TOP_K_MAX) & (top_k < draws.vocab_size))
        )
        # The maximum length of each sequence that this package supports, or None if no sequence can be longer.
        self.max_lens = None
        is_penalised = penalties.use_penalty[slots]
        if is_penalised.any():
            history = engine.req_states
            # The repetition penalty also counts the tokens of the prompt.
            prompt_lens = numpy.where(penalties.repetition_penalty.np[slots] != 1, 0, history.prompt_len.np[slots])
            max_model_len = history.all_token_ids.gpu.shape[1]
            max_lens = numpy.where(is_penalised, draws.max_penalised + prompt_lens, max_model_len)
            unsupported |= history.prefill_len.np[slots] > max_lens
            self.max_lens = max_lens if (max_lens < max_model_len).any() else None
        if engine.thinking_budget_state.enabled:
            unsupported |= engine.thinking_budget_state.use_thinking_budget[slots]
        self.is_supported = ~unsupported
        # The rows that this package drew in the last step, and whether each row of the batch is one of them.
        self.rows: Rows | None = None
        self.is_of_rows: numpy.ndarray | None = None

    def rows_of(self, engine: Any, batch: Any, grammar_output: Any) -> Rows | None:
        """Returns the rows of a batch of these requests that this package draws, or None if vLLM draws all rows."""
        is_supported = self.is_supported
        if self.max_lens is not None:
            # Without speculative decoding, these upper bounds are the exact lengths.
            lens = batch.seq_lens_cpu_upper_bound.numpy()[: len(is_supported)]
            is_supported = is_supported & (lens <= self.max_lens)
        if grammar_output is not None:
            grammars = set(grammar_output.structured_output_request_ids)
            is_supported = is_supported & numpy.array([name not in grammars for name in batch.req_ids], dtype=bool)
        if is_supported is not self.is_of_rows and not numpy.array_equal(is_supported, self.is_of_rows):
            rows = numpy.flatnonzero(is_supported)
            self.rows = Rows(self.draws, engine, batch, rows) if len(rows) > 0 else None
            self.is_of_rows = is_supported
        return self.rows
