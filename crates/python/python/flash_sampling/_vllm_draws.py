"""Draws from the hidden states of a vLLM batch, with the head of the model."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from ._engines import FailedRows, Unsupported
from ._lib import Head, Sampler
from ._vllm_logprobs import MODES, NO_LOGPROBS, TOP_N_MAX, empty_results, logprobs_tensors
from ._vllm_rows import Rows, bitmaps, slot_lists

# vLLM shows the messages of loggers whose names begin with "vllm.".
LOG = logging.getLogger("vllm.flash_sampling")
# vLLM's quantization methods for heads without quantization.
_PLAIN = ["UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"]
# The maximum number of tokens with a penalty in a row. Their lists take 84 MB of GPU memory for 256 rows.
_MAX_PENALISED = 16384


class Draws:
    """A sampler of this package over the head of a model, for the batches of vLLM."""

    def __init__(self, runner: Any, hidden: Tensor) -> None:
        example = torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device, dtype=hidden.dtype)[None]
        self.model = runner.model
        self.processor, self.head = _head(self.model, example)
        self.description = self._describe()
        processor, self.vocab_size = self.processor, self.processor.org_vocab_size
        head = Head(
            self.head.weight.detach(), soft_cap=processor.soft_cap, scale=processor.scale, vocab_size=self.vocab_size
        )
        biases, penalties, bad_words = runner.sampler.logits_processors
        all_tokens = penalties.req_states.all_token_ids.gpu
        self.max_penalised = min(all_tokens.shape[1], _MAX_PENALISED)
        max_adjusted = biases.logit_bias_token_ids.gpu.shape[1] + biases.stop_token_ids.gpu.shape[1]
        max_adjusted += bad_words.bad_word_offsets.gpu.shape[1] - 1 + self.max_penalised
        self.sampler = Sampler(head, runner.max_num_reqs, max_adjusted=max_adjusted)
        self.failed_rows = FailedRows(LOG)
        # The numbers of sampled (1) and of rejected (0) tokens of rows without prompts.
        self.ones = torch.ones(runner.max_num_reqs, dtype=torch.int32, device=hidden.device)
        self.zeros = torch.zeros_like(self.ones)
        self.mode = runner.sampler.logprobs_mode
        self.max_logprobs = min(TOP_N_MAX, self.vocab_size) if self.mode in MODES else NO_LOGPROBS
        self._load_kernels(example, all_tokens)

    def _load_kernels(self, example: Tensor, all_tokens: Tensor) -> None:
        """Calls the sampler with each kind of parameters and results, so that no later call must load a kernel."""
        ones = {name: torch.ones(1, device=example.device) for name in ("temperature", "top_p", "min_p")}
        zero = torch.zeros(1, dtype=torch.int64, device=example.device)
        filters = {"top_k": zero.int(), **ones}
        lists = {"mask": bitmaps(zero.int()[None], zero, self.vocab_size)}
        lists |= slot_lists("banned", zero.int()[None], zero) | slot_lists("prompt", all_tokens[:1], zero)
        calls = [{}, filters, lists, filters | lists]
        if self.max_logprobs != NO_LOGPROBS:
            results = empty_results(1, self.max_logprobs, example.device)
            calls += [call | results | {"logprobs_mode": self.mode, "complete": True} for call in calls]
        for call in calls:
            self.sampler.enqueue(example, zero.clone(), seed=zero, position=zero, **call)
        if self.max_logprobs != NO_LOGPROBS:
            logprobs_tensors(zero, results)

    def _describe(self):
        """Returns the properties of the head on which the sampler depends."""
        weight, processor = self.head.weight, self.processor
        return weight.data_ptr(), weight.shape, weight.dtype, processor.soft_cap, processor.scale

    def is_current(self, runner: Any) -> bool:
        """Whether the runner still has the sampler's head. A reload of the weights may move the head in memory."""
        return runner.model is self.model and self.description == self._describe()

    def draw(self, hidden: Tensor, batch: Any, rows: Rows) -> tuple[Tensor, Any]:
        """Draws rows without waiting. Returns the tokens, [rows] int64, and their `LogprobsTensors` or None."""
        count, at = len(rows), slice(len(rows)) if rows.at is None else rows.at
        is_decoding = batch.num_tokens == batch.num_reqs  # Each row has one token.
        tokens = torch.empty(count, dtype=torch.int64, device=hidden.device)
        self.sampler.enqueue(
            hidden[at if is_decoding else batch.logits_indices[at]],
            tokens,
            position=batch.seq_lens[at],
            statuses=self.failed_rows.statuses(count, hidden.device, rows.names),
            complete=True,
            logprobs_mode=self.mode if rows.results else MODES[0],
            **rows.arguments(),
            **rows.results,
        )
        return tokens, logprobs_tensors(tokens, rows.results) if rows.results else None


def _head(model, example):
    """Computes logits, and returns the logits processor and the head that the model uses for them.

    example: one row of hidden states.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    calls = []

    def record(module, args, kwargs, logits):
        calls.append((module, args, kwargs))

    modules = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        logits = model.compute_logits(example)
    finally:
        for hook in hooks:
            hook.remove()
    if len(calls) != 1:
        raise Unsupported(f"the logits of {type(model).__name__} come from {len(calls)} logits processors")
    [(processor, args, kwargs)] = calls
    call = inspect.signature(LogitsProcessor.forward).bind(processor, *args, **kwargs).arguments
    head = call["lm_head"]
    method = type(head.quant_method).__name__
    reasons = {
        f"the logits processor is a {type(processor).__name__}": type(processor) is not LogitsProcessor,
        "the model's output is logits": processor.logits_as_input,
        f"the head computes in {processor.head_dtype}": processor.head_dtype not in (None, example.dtype),
        f"the head is sharded over {head.tp_size} ranks": head.tp_size != 1,
        f"the head's quantization method is {method}": method not in _PLAIN,
        "the head has a bias": call.get("embedding_bias") is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(reason)
    # The model's own code may change hidden states or logits, so this compares its logits with logits from the head.
    ours = torch.nn.functional.linear(example, head.weight[: processor.org_vocab_size]).float()
    if processor.soft_cap is not None:
        ours = processor.soft_cap * torch.tanh(ours / processor.soft_cap)
    ours *= processor.scale
    tolerance = 1e-4 + 4 * torch.finfo(example.dtype).eps  # vLLM rounds to the model's type after each operation.
    if ours.shape != logits.shape or not (ours - logits.float()).abs().max() <= tolerance * ours.abs().max():
        raise Unsupported(f"the logits of {type(model).__name__} are not those of its head")
    return processor, head
