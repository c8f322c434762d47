"""A plugin for SGLang. With the plugin, SGLang's sampler backends draw from the logits with this package.

SGLang calls ``register`` in each of its processes. The environment variable ``FLASH_SAMPLING_SGLANG=0`` turns the
plugin off.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch import Tensor

from ._engines import TOP_K_MAX, FailedRows, check_names, check_signatures, is_nvidia
from ._lib import Sampler

__all__ = ["register"]

_LOG = logging.getLogger(__name__)
_MODULE = "sglang.srt.layers.sampler"
# The parameters of the functions that the plugin overrides or calls.
_SIGNATURES = {
    f"{_MODULE}:register_sampler_backend": "backend factory",
    f"{_MODULE}:Sampler.__init__": "self",
    f"{_MODULE}:Sampler.forward": (
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions logprob_logits"
    ),
    f"{_MODULE}:Sampler._preprocess_logits": "self logits sampling_info",
    f"{_MODULE}:Sampler._sample_from_probs": "self probs sampling_info positions simple_sampling_case",
    f"{_MODULE}:Sampler._sync_token_ids_across_tp": "self batch_next_token_ids sampling_info",
    "sglang.srt.layers.logprob_processor:OutputLogprobProcessor.compute_logprobs": (
        "self logprobs top_logprobs_nums token_ids_logprobs batch_next_token_ids"
    ),
}
# All fields of SamplingBatchInfo, because an unknown field may hold a parameter of requests.
_INFO = (
    "temperatures top_ps top_ks min_ps is_all_greedy is_any_greedy need_top_p_sampling need_top_k_sampling "
    "need_min_p_sampling vocab_size grammars rids_int bootstrap_room_ids_int grammar_mask penalizer_orchestrator "
    "acc_additive_penalties acc_scaling_penalties has_custom_logit_processor custom_params custom_logit_processor "
    "sampling_seed return_sampling_masks return_sampling_support_logprobs sampling_mask_batch_indices "
    "sampling_support_logprobs_capture_indices sampling_mask_top_ks watermark_keys watermark_context_windows "
    "watermark_enabled watermark_candidates_host has_watermark_candidates device logit_bias npu_top_k_top_p_eligible "
    "max_top_k"
).split()
# The attributes of SGLang's Sampler that the plugin reads.
_ATTRIBUTES = ["rl_on_policy_target", "output_logprob_processor"]
_BACKENDS = ["flashinfer", "pytorch"]


def register() -> None:
    """Makes the sampler backends ``flashinfer`` and ``pytorch`` draw with this package. A second call changes nothing.

    If SGLang has unknown interfaces, a warning names the difference, and this function leaves SGLang unchanged.
    """
    if os.environ.get("FLASH_SAMPLING_SGLANG") == "0":
        return
    try:
        _check_interfaces()
    except Exception as error:  # The imports may fail in any way.
        _LOG.warning("SGLang draws its own tokens: %s", error)
        return
    from sglang.srt.layers import sampler

    for backend in _BACKENDS:
        # The factory of another plugin is not replaced.
        if backend not in sampler._CUSTOM_SAMPLER_FACTORIES:
            sampler.register_sampler_backend(backend, _make)


def _check_interfaces():
    check_signatures(_SIGNATURES)
    from sglang.srt.layers.sampler import _CUSTOM_SAMPLER_FACTORIES, SGLANG_RETURN_ORIGINAL_LOGPROB  # noqa: F401
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    check_names("SamplingBatchInfo", SamplingBatchInfo.__dataclass_fields__.keys() ^ set(_INFO))


def _make():
    """Makes a sampler for SGLang. The class is defined here, because its base class needs the import of SGLang."""
    from sglang.srt.layers import sampler

    class FlashSampler(sampler.Sampler):
        def __init__(self) -> None:
            super().__init__()
            self.draws = _Draws()

        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[list[int]],
            positions: Tensor,
            *,
            logprob_logits: Tensor | None = None,
        ) -> Tensor:
            logits = logits_output.next_token_logits
            if not (
                _is_supported(self, logits, sampling_info, logprob_logits) and self.draws.has_sampler(logits)
            ):
                requests = (logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs)
                return super().forward(*requests, positions, logprob_logits=logprob_logits)
            logits = self._preprocess_logits(logits, sampling_info)
            tokens = self.draws.draw(logits, sampling_info, positions)
            if _may_have_large_top_k(sampling_info):
                # SGLang's own sampler draws the rows with a large top_k.
                probs = torch.softmax(logits / sampling_info.temperatures, dim=-1)
                own, _ = self._sample_from_probs(probs, sampling_info, positions, False)
                tokens = torch.where(_large_top_k(sampling_info.top_ks, logits.shape[1]), own.long(), tokens)
            if return_logprob:
                scaled = logits if sampler.SGLANG_RETURN_ORIGINAL_LOGPROB else logits / sampling_info.temperatures
                logprobs = torch.log_softmax(scaled, dim=-1)
                result = self.output_logprob_processor.compute_logprobs(
                    logprobs, top_logprobs_nums, token_ids_logprobs, tokens
                )
                result.write_output_to(logits_output)
            self._sync_token_ids_across_tp(tokens, sampling_info)
            return tokens

    made = FlashSampler()
    missing = [name for name in _ATTRIBUTES if not hasattr(made, name)]
    if missing:
        _LOG.warning("SGLang draws its own tokens: Sampler has no %s", ", ".join(missing))
        return sampler.Sampler()
    return made


def _is_supported(sampler, logits, info, logprob_logits):
    """Whether this package draws the rows of a batch."""
    return (
        is_nvidia(logits.device)
        and logits.shape[0] > 0
        and logprob_logits is None
        and sampler.rl_on_policy_target is None
        and info.sampling_mask_batch_indices is None
        and not info.has_watermark_candidates
    )


def _may_have_large_top_k(info):
    """Whether a row may have a top_k above TOP_K_MAX. SGLang has the top_k of each row only on the GPU."""
    if not info.need_top_k_sampling or (info.need_min_p_sampling and info.sampling_seed is not None):
        return False  # SGLang cannot draw batches with seeds and min-p.
    return info.max_top_k is None or info.max_top_k > TOP_K_MAX


def _large_top_k(top_ks, vocab_size):
    """Returns which rows have a top_k that this package does not support. A top_k of all tokens is no filter."""
    return (top_ks > TOP_K_MAX) & (top_ks < vocab_size)


class _Draws:
    """The draws of this package from the logits of a model."""

    def __init__(self) -> None:
        # The sampler for each vocabulary and maximum number of rows; None if SGLang's own sampler draws such batches.
        # No sampler is dropped, because enqueued kernels may still need its memory.
        self.samplers: dict[tuple[int, int], Sampler | None] = {}
        self.failed_rows = FailedRows(_LOG)

    def has_sampler(self, logits: Tensor) -> bool:
        """Whether there is a sampler for a batch. The first batch of its size makes the sampler."""
        size = vocab_size, max_rows = _size(logits)
        if size not in self.samplers:
            try:
                sampler = Sampler.for_logits(vocab_size, max_rows, backend=str(logits.device))
                # The first draw loads the kernels of all parameters.
                ones = {name: torch.ones(1, device=logits.device) for name in ("temperature", "top_p", "min_p")}
                zero = torch.zeros(1, dtype=torch.int64, device=logits.device)
                sampler.enqueue(logits[:1], zero.clone(), seed=zero, position=zero, top_k=zero.int(), **ones)
            except Exception as error:  # Any error leaves the draws to SGLang, which goes on without this package.
                sampler = None
                _LOG.warning("SGLang draws its own tokens: %s", error)
            self.samplers[size] = sampler
        return self.samplers[size] is not None

    def draw(self, logits: Tensor, info: Any, positions: Tensor) -> Tensor:
        """Draws the tokens of all rows without waiting: [rows] int64."""
        rows, vocab_size = logits.shape
        seeds = info.sampling_seed
        if seeds is None:
            # Without deterministic inference, requests of SGLang have no seeds.
            seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device=logits.device)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        statuses = self.failed_rows.statuses(rows, logits.device)
        keys = {"seed": seeds, "position": positions.to(torch.int64) + 1}
        sampler = self.samplers[_size(logits)]
        sampler.enqueue(logits, tokens, statuses=statuses, complete=True, **keys, **_columns(info, vocab_size))
        return tokens


def _size(logits):
    """Returns the vocabulary and the maximum number of rows of the sampler for these logits."""
    rows, vocab_size = logits.shape
    return vocab_size, max(256, 1 << (rows - 1).bit_length())


def _columns(info, vocab_size):
    """Returns the parameters for `Sampler.enqueue`, without filters that no row has. A greedy row has top_k 1."""
    temperature = info.temperatures.view(-1)
    if info.is_all_greedy:
        return {"temperature": torch.zeros_like(temperature)}
    columns = {"temperature": temperature}
    if info.need_top_k_sampling:
        columns["top_k"] = info.top_ks
        if _may_have_large_top_k(info):
            columns["top_k"] = torch.where(_large_top_k(info.top_ks, vocab_size), 0, info.top_ks)
    if info.need_top_p_sampling:
        columns["top_p"] = info.top_ps
    if info.need_min_p_sampling:
        columns["min_p"] = info.min_ps
    return columns
