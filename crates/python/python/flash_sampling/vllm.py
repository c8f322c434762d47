"""A general plugin for vLLM. With the plugin, vLLM's model runner V2 draws tokens from hidden states instead of logits.

vLLM calls ``register`` in each of its processes. The environment variable ``FLASH_SAMPLING_VLLM=0`` turns the plugin
off.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from ._engines import Unsupported, check_names, check_signatures, is_nvidia
from ._vllm_draws import LOG, Draws
from ._vllm_logprobs import replace_rows
from ._vllm_requests import forgetting, rows_of

__all__ = ["register"]

_GPU = "vllm.v1.worker.gpu"
# The parameters of the functions that the plugin replaces or calls.
_SIGNATURES = {
    f"{_GPU}.model_runner:GPUModelRunner.sample": "self hidden_states input_batch grammar_output",
    f"{_GPU}.sample.sampler:Sampler.__call__": "self logits input_batch",
    f"{_GPU}.sample.sampler:Sampler.add_request": "self req_idx sampling_params",
    f"{_GPU}.sample.output:SamplerOutput": (
        "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected sampling_mask_tensors"
    ),
    "vllm.v1.outputs:LogprobsTensors": (
        "logprob_token_ids logprobs selected_token_ranks cu_num_generated_tokens cu_num_generated_tokens_tensor"
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
    "req_ids num_reqs idx_mapping idx_mapping_np expanded_idx_mapping num_tokens num_draft_tokens seq_lens "
    "seq_lens_cpu_upper_bound has_prefill logits_indices cu_num_logits"
).split()
# All attributes of Sampler, and further below of SamplingStates and of the logits processors. If there is another
# attribute, vLLM's own sampler draws, because this attribute may hold a parameter of requests.
_SAMPLER = (
    "logprobs_mode compute_nans use_fp64_gumbel req_states sampling_states penalties_state logits_processors "
    "logprob_token_ids_state thinking_budget_state trace_replay_state needs_logits_processing num_speculative_tokens "
    "return_sampling_mask use_flashinfer use_xpu_sampler"
).split()
# The attributes of RequestState that the plugin reads.
_REQUEST_STATE = "all_token_ids prompt_len prefill_len total_len".split()
_STATES = "max_num_reqs vocab_size temperature top_k top_p min_p seeds seeds_set num_logprobs".split()
_PROCESSORS = ["LogitBiasState", "PenaltiesState", "BadWordsState"]
_BIASES = (
    "prompt_len_np num_allowed_token_ids allowed_token_ids num_logit_bias logit_bias_token_ids logit_bias min_lens "
    "num_stop_token_ids restore_when_all_masked stop_token_ids use_logit_bias"
).split()
_PENALTIES = (
    "req_states device repetition_penalty frequency_penalty presence_penalty use_penalty prompt_bin_mask "
    "output_bin_counts _new_penalties_reqs"
).split()
_BAD_WORDS = "req_states bad_word_token_ids bad_word_offsets num_bad_words".split()

# The Draws of each model runner, or None if vLLM's own sampler draws.
_DRAWS: "weakref.WeakKeyDictionary[Any, Draws | None]" = weakref.WeakKeyDictionary()


def register() -> None:
    """Makes vLLM's model runner V2 draw with this package. A second call changes nothing.

    If vLLM has unknown interfaces, a warning names the difference, and this function leaves vLLM unchanged.
    """
    if os.environ.get("FLASH_SAMPLING_VLLM") == "0":
        return
    try:
        _check_interfaces()
    except Exception as error:  # The imports may fail in any way on platforms without this model runner.
        LOG.warning("vLLM draws its own tokens: %s", error)
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler as EngineSampler

    if not hasattr(GPUModelRunner.sample, "is_flash_sampling"):
        GPUModelRunner.sample = _patched(GPUModelRunner.sample)
        EngineSampler.add_request = forgetting(EngineSampler.add_request)


def _check_interfaces():
    check_signatures(_SIGNATURES)
    from vllm.v1.worker.gpu.input_batch import InputBatch

    check_names("InputBatch", set(_BATCH) - set(InputBatch.__dataclass_fields__))


def _patched(original):
    @functools.wraps(original)
    def sample(self, hidden_states, input_batch, grammar_output):
        draws = _draws(self, hidden_states, input_batch)
        rows = None if draws is None else rows_of(draws, self.sampler, input_batch, grammar_output)
        if rows is None:
            return original(self, hidden_states, input_batch, grammar_output)
        if rows.at is None:
            output = _output(self.sampler, input_batch, rows, *draws.draw(hidden_states, input_batch, rows))
            return output, output.num_sampled, output.num_rejected
        output, num_sampled, num_rejected = original(self, hidden_states, input_batch, grammar_output)
        tokens, logprobs = draws.draw(hidden_states, input_batch, rows)
        output.sampled_token_ids[rows.at, 0] = tokens
        if logprobs is not None:
            replace_rows(output.logprobs_tensors, rows.at, logprobs)
        return output, num_sampled, num_rejected

    sample.is_flash_sampling = True
    return sample


def _draws(runner, hidden, batch):
    """Returns the Draws of a model runner, or None if vLLM's own sampler draws.

    The first step of the runner constructs the Draws. The first step after a change of the head constructs new Draws.
    """
    draws = _DRAWS.get(runner)
    if runner in _DRAWS and (draws is None or draws.is_current(runner)):
        return draws
    try:
        _check_runner(runner)
        draws = Draws(runner, hidden)
        rows_of(draws, runner.sampler, batch, None)  # fails if an attribute is missing
        text = "flash_sampling draws the tokens of %s, with up to %d tokens with a penalty"
        LOG.info(text, type(runner.model).__name__, draws.max_penalised)
    except Exception as error:  # After any error, vLLM's own sampler draws the tokens of this runner.
        draws = None
        LOG.warning("vLLM draws its own tokens: %s", error)
    _DRAWS[runner] = draws
    return draws


def _check_runner(runner):
    from vllm.v1.worker.gpu.sample.sampler import Sampler as EngineSampler

    sampler = runner.sampler
    if type(sampler) is not EngineSampler:
        raise Unsupported(f"the sampler is a {type(sampler).__name__}")
    check_names("Sampler", vars(sampler).keys() ^ set(_SAMPLER))
    check_names("SamplingStates", vars(sampler.sampling_states).keys() ^ set(_STATES))
    check_names("RequestState", set(_REQUEST_STATE) - vars(sampler.req_states).keys())
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
    for processor, names in zip(sampler.logits_processors, (_BIASES, _PENALTIES, _BAD_WORDS)):
        check_names(type(processor).__name__, vars(processor).keys() ^ set(names))


def _output(sampler, batch, rows, tokens, logprobs):
    """Returns the output that vLLM's sampler would return, for a batch in which this package drew all rows."""
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    num_sampled, num_rejected = rows.counts
    if batch.has_prefill:
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected

        num_sampled, num_rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
    return SamplerOutput(
        sampled_token_ids=tokens.view(-1, 1),
        logprobs_tensors=logprobs,
        num_nans=None,
        num_sampled=num_sampled,
        num_rejected=num_rejected,
    )
