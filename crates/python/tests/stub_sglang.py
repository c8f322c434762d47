"""The parts of SGLang 0.5.23 that the plugin uses. Its sampler draws the same token for every row."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import torch

ENGINE_TOKEN = 3
TOP_K_ALL = 1 << 30
SGLANG_RETURN_ORIGINAL_LOGPROB = False
_CUSTOM_SAMPLER_FACTORIES = {}


@dataclasses.dataclass
class SamplingBatchInfo:
    temperatures: object
    top_ps: object
    top_ks: object
    min_ps: object
    is_all_greedy: bool
    is_any_greedy: bool
    need_top_p_sampling: bool
    need_top_k_sampling: bool
    need_min_p_sampling: bool
    vocab_size: int
    grammars: object = None
    rids_int: object = None
    bootstrap_room_ids_int: object = None
    grammar_mask: object = None
    penalizer_orchestrator: object = None
    acc_additive_penalties: object = None
    acc_scaling_penalties: object = None
    has_custom_logit_processor: bool = False
    custom_params: object = None
    custom_logit_processor: object = None
    sampling_seed: object = None
    return_sampling_masks: object = None
    return_sampling_support_logprobs: object = None
    sampling_mask_batch_indices: object = None
    sampling_support_logprobs_capture_indices: object = None
    sampling_mask_top_ks: object = None
    watermark_keys: object = None
    watermark_context_windows: object = None
    watermark_enabled: object = None
    watermark_candidates_host: object = None
    has_watermark_candidates: bool = False
    device: str = "cuda"
    logit_bias: object = None
    npu_top_k_top_p_eligible: bool = False
    max_top_k: object = None


class OutputLogprobProcessor:
    def compute_logprobs(self, logprobs, top_logprobs_nums, token_ids_logprobs, batch_next_token_ids):
        values = logprobs.gather(1, batch_next_token_ids[:, None]).flatten()

        def write_output_to(logits_output):
            logits_output.next_token_logprobs = values

        return SimpleNamespace(write_output_to=write_output_to)


class Sampler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rl_on_policy_target = None
        self.output_logprob_processor = OutputLogprobProcessor()

    def _preprocess_logits(self, logits, sampling_info):
        if sampling_info.has_custom_logit_processor:
            logits[:, sampling_info.custom_params] = -float("inf")
        return logits

    def forward(
        self,
        logits_output,
        sampling_info,
        return_logprob,
        top_logprobs_nums,
        token_ids_logprobs,
        positions,
        *,
        logprob_logits=None,
    ):
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        tokens, _ = self._sample_from_probs(logits, sampling_info, positions, True)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    def _sample_from_probs(self, probs, sampling_info, positions, simple_sampling_case):
        return torch.full((len(probs),), ENGINE_TOKEN, dtype=torch.int32, device=probs.device), None

    def _sync_token_ids_across_tp(self, batch_next_token_ids, sampling_info):
        self.synced = batch_next_token_ids


def register_sampler_backend(backend, factory):
    _CUSTOM_SAMPLER_FACTORIES[backend] = factory


def create_sampler(backend=None):
    return _CUSTOM_SAMPLER_FACTORIES[backend]() if backend in _CUSTOM_SAMPLER_FACTORIES else Sampler()


_PLACES = {
    "sglang.srt.layers.logprob_processor": ["OutputLogprobProcessor"],
    "sglang.srt.layers.sampler": [
        "SGLANG_RETURN_ORIGINAL_LOGPROB", "Sampler", "_CUSTOM_SAMPLER_FACTORIES", "register_sampler_backend",
    ],
    "sglang.srt.sampling.sampling_batch_info": ["SamplingBatchInfo"],
}


def install(monkeypatch):
    """Makes the stubs importable as SGLang."""
    _CUSTOM_SAMPLER_FACTORIES.clear()
    modules = {}
    for place, members in _PLACES.items():
        parts = place.split(".")
        for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            module = modules.setdefault(name, ModuleType(name))
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        vars(module).update({member: globals()[member] for member in members})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
