"""A general plugin for vLLM. With the plugin, vLLM's model runner V2 draws tokens from hidden states instead of logits.

vLLM calls ``register`` in each of its processes. The environment variable ``FLASH_SAMPLING_VLLM=0`` turns the plugin
off.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from typing import Any

import numpy
import torch
from torch import Tensor

from ._engines import TOP_K_MAX, FailedRows, Unsupported, check_names, check_signatures, is_nvidia
from ._lib import Head, Sampler

__all__ = ["register"]

# vLLM shows the messages of loggers whose names begin with "vllm.".
_LOG = logging.getLogger("vllm.flash_sampling")
_GPU = "vllm.v1.worker.gpu"
# The parameters of the functions that the plugin replaces or calls.
_SIGNATURES = {
    f"{_GPU}.model_runner:GPUModelRunner.sample": "self hidden_states input_batch grammar_output",
    f"{_GPU}.sample.sampler:Sampler.__call__": "self logits input_batch",
    f"{_GPU}.sample.output:SamplerOutput": (
        "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected sampling_mask_tensors"
    ),
    f"{_GPU}.input_batch:get_num_sampled_and_rejected": "num_sampled seq_lens cu_num_logits idx_mapping prefill_len",
    "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward": (
        "self lm_head hidden_states embedding_bias skip_gather"
    ),
    "vllm.v1.core.sched.output:GrammarOutput": "structured_output_request_ids grammar_bitmask num_acceptable_drafts",
    "vllm.utils.torch_utils:async_tensor_h2d": "data device dtype out",
}
# The fields of InputBatch that the plugin reads.
_BATCH = (
    "req_ids num_reqs idx_mapping idx_mapping_np expanded_idx_mapping num_draft_tokens seq_lens positions "
    "logits_indices cu_num_logits"
).split()
# All attributes of Sampler and SamplingStates, because an unknown attribute may hold a parameter of requests.
_SAMPLER = (
    "logprobs_mode compute_nans use_fp64_gumbel req_states sampling_states penalties_state logits_processors "
    "logprob_token_ids_state thinking_budget_state trace_replay_state needs_logits_processing num_speculative_tokens "
    "return_sampling_mask use_flashinfer use_xpu_sampler"
).split()
_STATES = "max_num_reqs vocab_size temperature top_k top_p min_p seeds seeds_set num_logprobs".split()
_PROCESSORS = ["LogitBiasState", "PenaltiesState", "BadWordsState"]
_BIASES = (
    "prompt_len_np num_allowed_token_ids allowed_token_ids num_logit_bias logit_bias_token_ids logit_bias min_lens "
    "num_stop_token_ids restore_when_all_masked stop_token_ids use_logit_bias"
).split()
# The methods of heads without quantization.
_PLAIN = ["UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"]

# For each model runner: the draws of this package, or None if vLLM's own sampler draws.
_DRAWS: "weakref.WeakKeyDictionary[Any, _Draws | None]" = weakref.WeakKeyDictionary()


def register() -> None:
    """Makes vLLM's model runner V2 draw with this package. A second call changes nothing.

    If vLLM has unknown interfaces, a warning names the difference, and this function leaves vLLM unchanged.
    """
    if os.environ.get("FLASH_SAMPLING_VLLM") == "0":
        return
    try:
        _check_interfaces()
    except Exception as error:  # The imports may fail in any way on platforms without this model runner.
        _LOG.warning("vLLM draws its own tokens: %s", error)
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    if not hasattr(GPUModelRunner.sample, "is_flash_sampling"):
        GPUModelRunner.sample = _patched(GPUModelRunner.sample)


def _check_interfaces():
    check_signatures(_SIGNATURES)
    from vllm.v1.worker.gpu.input_batch import InputBatch

    check_names("InputBatch", set(_BATCH) - set(InputBatch.__dataclass_fields__))


def _patched(original):
    @functools.wraps(original)
    def sample(self, hidden_states, input_batch, grammar_output):
        draws = _draws(self, hidden_states, input_batch)
        rows = [] if draws is None else _supported_rows(self.sampler, draws.vocab_size, input_batch, grammar_output)
        if len(rows) == 0:
            return original(self, hidden_states, input_batch, grammar_output)
        if len(rows) == input_batch.num_reqs:
            tokens = draws.draw(self.sampler, hidden_states, input_batch, rows, None)
            output = _output(self.sampler, input_batch, tokens)
            return output, output.num_sampled, output.num_rejected
        from vllm.utils.torch_utils import async_tensor_h2d

        output, num_sampled, num_rejected = original(self, hidden_states, input_batch, grammar_output)
        index = async_tensor_h2d(rows, device=hidden_states.device)
        output.sampled_token_ids[index, 0] = draws.draw(self.sampler, hidden_states, input_batch, rows, index)
        return output, num_sampled, num_rejected

    sample.is_flash_sampling = True
    return sample


def _draws(runner, hidden, batch):
    """Returns the draws of a runner, or None if vLLM's own sampler draws.

    The first step of the runner makes the draws, and a step after a change of the head makes them anew.
    """
    draws = _DRAWS.get(runner)
    if runner in _DRAWS and (draws is None or draws.is_current(runner)):
        return draws
    try:
        _check_runner(runner)
        draws = _Draws(runner, hidden)
        _supported_rows(runner.sampler, draws.vocab_size, batch, None)  # fails if an attribute is missing
        _LOG.info("flash_sampling draws the tokens of %s", type(runner.model).__name__)
    except Exception as error:  # Any error leaves the draws to vLLM, which goes on without this package.
        draws = None
        _LOG.warning("vLLM draws its own tokens: %s", error)
    _DRAWS[runner] = draws
    return draws


def _check_runner(runner):
    from vllm.v1.worker.gpu.sample.sampler import Sampler as EngineSampler

    sampler = runner.sampler
    if type(sampler) is not EngineSampler:
        raise Unsupported(f"the sampler is a {type(sampler).__name__}")
    check_names("Sampler", vars(sampler).keys() ^ set(_SAMPLER))
    check_names("SamplingStates", vars(sampler.sampling_states).keys() ^ set(_STATES))
    processors = [type(processor).__name__ for processor in sampler.logits_processors]
    reasons = {
        f"the device is {runner.device.type}, not a GPU of NVIDIA": not is_nvidia(runner.device),
        "the batch is sharded for sampling": runner.batch_sharder is not None,
        "speculative decoding is on": runner.rejection_sampler is not None,
        "LoRA is enabled": bool(runner.lora_config),
        f"the logits processors are {', '.join(processors)}": processors != _PROCESSORS,
        "the sampling mask is returned": sampler.return_sampling_mask,
        "NaNs are counted": sampler.compute_nans,
        "the noise is in float64": sampler.use_fp64_gumbel,
        "tokens are replayed": sampler.trace_replay_state is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(reason)
    check_names("LogitBiasState", vars(sampler.logits_processors[0]).keys() ^ set(_BIASES))


def _supported_rows(sampler, vocab_size, batch, grammar_output):
    """Returns the indices of the rows that this package draws. Reads the copies of their parameters on the CPU."""
    slots = batch.idx_mapping_np
    if batch.num_draft_tokens or batch.logits_indices.shape[0] != len(slots):
        return []
    bias, penalties, bad_words = sampler.logits_processors
    states, top_k = sampler.sampling_states, sampler.sampling_states.top_k.np[slots]
    unsupported = (
        (states.num_logprobs[slots] != -1)
        | (sampler.logprob_token_ids_state.num_token_ids.np[slots] > 0)
        | (bias.restore_when_all_masked.np[slots] != 0)
        | penalties.use_penalty[slots]
        | (bad_words.num_bad_words.np[slots] > 0)
        | ((top_k > TOP_K_MAX) & (top_k < vocab_size))
    )
    if sampler.thinking_budget_state.enabled:
        unsupported |= sampler.thinking_budget_state.use_thinking_budget[slots]
    if grammar_output is not None:
        grammars = set(grammar_output.structured_output_request_ids)
        unsupported |= numpy.array([name in grammars for name in batch.req_ids], dtype=bool)
    return numpy.flatnonzero(~unsupported)


def _output(sampler, batch, tokens):
    """Returns the output that vLLM's sampler would return, for a batch in which this package drew all rows."""
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    num_sampled, num_rejected = get_num_sampled_and_rejected(
        batch.seq_lens.new_ones(batch.num_reqs),
        batch.seq_lens,
        batch.cu_num_logits,
        batch.idx_mapping,
        sampler.req_states.prefill_len.gpu,
    )
    return SamplerOutput(
        sampled_token_ids=tokens.view(-1, 1),
        logprobs_tensors=None,
        num_nans=None,
        num_sampled=num_sampled,
        num_rejected=num_rejected,
    )


class _Draws:
    """The draws of this package from the head of a model."""

    def __init__(self, runner: Any, hidden: Tensor) -> None:
        example = torch.linspace(-1, 1, hidden.shape[-1], device=hidden.device, dtype=hidden.dtype)[None]
        self.model = runner.model
        self.processor, self.head = _head(self.model, example)
        self.description = self._describe()
        processor, self.vocab_size = self.processor, self.processor.org_vocab_size
        head = Head(
            self.head.weight.detach(), soft_cap=processor.soft_cap, scale=processor.scale, vocab_size=self.vocab_size
        )
        biases = runner.sampler.logits_processors[0]
        max_adjusted = biases.logit_bias_token_ids.gpu.shape[1] + biases.stop_token_ids.gpu.shape[1]
        self.sampler = Sampler(head, runner.max_num_reqs, max_adjusted=max_adjusted)
        self.failed_rows = FailedRows(_LOG)
        # These draws load the kernels for all parameters, so that no later draw does.
        ones = {name: torch.ones(1, device=hidden.device) for name in ("temperature", "top_p", "min_p")}
        zero = torch.zeros(1, dtype=torch.int64, device=hidden.device)
        filters = {"top_k": zero.int(), **ones}
        lists = {"mask": _mask(zero.int()[None], zero, self.vocab_size)}
        lists |= _lists("banned", zero.int()[None], zero, zero)
        for parameters in (filters, lists, filters | lists):
            self.sampler.enqueue(example, zero.clone(), seed=zero, position=zero, **parameters)

    def _describe(self):
        """Returns the properties of the head on which the sampler depends."""
        weight, processor = self.head.weight, self.processor
        return weight.data_ptr(), weight.shape, weight.dtype, processor.soft_cap, processor.scale

    def is_current(self, runner: Any) -> bool:
        """Whether the head has not changed. A reload of the weights may move the head in memory."""
        return runner.model is self.model and self.description == self._describe()

    def draw(self, engine: Any, hidden: Tensor, batch: Any, rows: numpy.ndarray, index: Tensor | None) -> Tensor:
        """Draws the tokens of rows without waiting: [rows] int64.

        rows: the indices of the rows in the batch. index: the same indices on the GPU, or None for all rows.
        """
        at, slots = batch.logits_indices, batch.expanded_idx_mapping
        if index is not None:
            at, slots = at[index], slots[index]
        states, slots_np = engine.sampling_states, batch.idx_mapping_np[rows]
        columns = {"temperature": states.temperature, "seed": states.seeds}
        for name, off in (("top_k", states.vocab_size), ("top_p", 1), ("min_p", 0)):
            if (getattr(states, name).np[slots_np] != off).any():
                columns[name] = getattr(states, name)
        # The sampler gets copies, because vLLM moves these tensors in each step.
        columns = {name: column.gpu[slots] for name, column in columns.items()}
        position = batch.positions[at] + 1
        columns |= self._biases(engine.logits_processors[0], slots, slots_np, position)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=hidden.device)
        statuses = torch.empty(len(rows), dtype=torch.int32, device=hidden.device)
        self.sampler.enqueue(hidden[at], tokens, position=position, statuses=statuses, **columns)
        self.failed_rows.check(statuses, [batch.req_ids[row] for row in rows])
        return tokens.clamp_(min=0)

    def _biases(self, state: Any, slots: Tensor, slots_np: numpy.ndarray, position: Tensor) -> dict[str, Tensor]:
        """Returns the allowed tokens, biases and banned stop tokens of rows, as arguments of `Sampler.enqueue`.

        The sampler reads vLLM's own tensors. vLLM writes to them in the same stream, so no write is concurrent.
        """
        arguments = {}
        if state.num_logit_bias.np[slots_np].any():
            counts = state.num_logit_bias.gpu[slots]
            arguments |= _lists("bias", state.logit_bias_token_ids.gpu, slots, counts)
            arguments["bias_values"] = state.logit_bias.gpu.view(-1)
        if state.num_stop_token_ids.np[slots_np].any():
            is_short = position < state.min_lens.gpu[slots]
            counts = torch.where(is_short, state.num_stop_token_ids.gpu[slots], 0)
            arguments |= _lists("banned", state.stop_token_ids.gpu, slots, counts)
        if state.num_allowed_token_ids.np[slots_np].any():
            counts = state.num_allowed_token_ids.gpu[slots]
            arguments["mask"] = _mask(state.allowed_token_ids.gpu[slots], counts, self.vocab_size)
        return arguments


def _lists(name, tokens, slots, counts):
    """Returns the first `counts` tokens of the slot of each row, as the lists `name` of `Sampler.enqueue`.

    tokens: [all slots, n] int32. slots, counts: [rows].
    """
    begin = slots.long() * tokens.shape[1]
    return {f"{name}_begin": begin, f"{name}_end": begin + counts, f"{name}_tokens": tokens.view(-1)}


def _mask(tokens, counts, vocab_size):
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


def _head(model, example):
    """Returns the logits processor and the head of a model, found by computing logits.

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
    # The model's code may change hidden states or logits, so its logits are compared with those of the head.
    ours = torch.nn.functional.linear(example, head.weight[: processor.org_vocab_size]).float()
    if processor.soft_cap is not None:
        ours = processor.soft_cap * torch.tanh(ours / processor.soft_cap)
    ours *= processor.scale
    tolerance = 1e-4 + 4 * torch.finfo(example.dtype).eps  # vLLM rounds to the model's type after each operation.
    if ours.shape != logits.shape or not (ours - logits.float()).abs().max() <= tolerance * ours.abs().max():
        raise Unsupported(f"the logits of {type(model).__name__} are not those of its head")
    return processor, head
