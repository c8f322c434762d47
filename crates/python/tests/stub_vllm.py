"""The parts of vLLM 0.33.0 that the plugin uses. Its sampler draws the same token for every row."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy
import torch

ENGINE_TOKEN = 3


class UvaBackedTensor:
    def __init__(self, size, dtype, device):
        self.device = device
        self.np = torch.zeros(size, dtype=dtype).numpy()
        self.copy_to_uva()

    def copy_to_uva(self, n=None):
        self.gpu = torch.from_numpy(self.np[:n].copy()).to(self.device)
        return self.gpu


class SamplingStates:
    def __init__(self, max_num_reqs, vocab_size, device):
        self.max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        self.temperature = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.top_k = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.top_p = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.min_p = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.seeds = UvaBackedTensor(max_num_reqs, torch.int64, device)
        self.seeds_set = numpy.zeros(max_num_reqs, dtype=bool)
        self.num_logprobs = numpy.full(max_num_reqs, -1, dtype=numpy.int32)
        self.temperature.np.fill(1)
        self.top_k.np.fill(vocab_size)
        self.top_p.np.fill(1)
        self.apply_staged_writes()

    def apply_staged_writes(self):
        for column in (self.temperature, self.top_p, self.top_k, self.min_p, self.seeds):
            column.copy_to_uva()


class StagedWriteTensor:
    def __init__(self, size, dtype, device):
        self.gpu = torch.zeros(size, dtype=dtype, device=device)

    def write(self, slot, values):
        """Writes the first elements of a row. Later elements keep their values."""
        self.gpu[slot, : len(values)] = torch.tensor(values, dtype=self.gpu.dtype)


class RequestState:
    def __init__(self, max_num_reqs, max_model_len, device):
        self.all_token_ids = StagedWriteTensor((max_num_reqs, max_model_len), torch.int32, device)
        self.prompt_len = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.prefill_len = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.total_len = StagedWriteTensor(max_num_reqs, torch.int32, device)


class LogitBiasState:
    def __init__(self, max_num_reqs, device):
        self.prompt_len_np = numpy.zeros(max_num_reqs, dtype=numpy.int32)
        self.num_allowed_token_ids = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.allowed_token_ids = StagedWriteTensor((max_num_reqs, 1024), torch.int32, device)
        self.num_logit_bias = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.logit_bias_token_ids = StagedWriteTensor((max_num_reqs, 1024), torch.int32, device)
        self.logit_bias = StagedWriteTensor((max_num_reqs, 1024), torch.float32, device)
        self.min_lens = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.num_stop_token_ids = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.restore_when_all_masked = UvaBackedTensor(max_num_reqs, torch.int32, device)
        self.stop_token_ids = StagedWriteTensor((max_num_reqs, 128), torch.int32, device)
        self.use_logit_bias = numpy.zeros(max_num_reqs, dtype=bool)

    def add_request(self, slot, prompt_len, allowed=(), bias={}, min_tokens=0, stop=()):
        lists = [
            (self.num_allowed_token_ids, [(self.allowed_token_ids, list(allowed))]),
            (self.num_logit_bias, [(self.logit_bias_token_ids, list(bias)), (self.logit_bias, list(bias.values()))]),
            (self.num_stop_token_ids, [(self.stop_token_ids, list(stop) if min_tokens else [])]),
        ]
        for count, tensors in lists:
            for tensor, values in tensors:
                count.np[slot] = len(values)
                tensor.write(slot, values)
            count.copy_to_uva()
        self.min_lens.np[slot] = prompt_len + min_tokens
        self.min_lens.copy_to_uva()
        self.use_logit_bias[slot] = bool(allowed or bias or min_tokens and stop)


class PenaltiesState:
    def __init__(self, max_num_reqs, vocab_size, req_states, device):
        self.req_states = req_states
        self.device = device
        self.repetition_penalty = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.frequency_penalty = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.presence_penalty = UvaBackedTensor(max_num_reqs, torch.float32, device)
        self.use_penalty = numpy.zeros(max_num_reqs, dtype=bool)
        self.repetition_penalty.np.fill(1)
        self.repetition_penalty.copy_to_uva()
        self.prompt_bin_mask = torch.zeros(max_num_reqs, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.output_bin_counts = torch.zeros(max_num_reqs, vocab_size, dtype=torch.int32, device=device)
        self._new_penalties_reqs = []

    def add_request(self, slot, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0):
        values = (repetition_penalty, frequency_penalty, presence_penalty)
        for column, value in zip((self.repetition_penalty, self.frequency_penalty, self.presence_penalty), values):
            column.np[slot] = value
            column.copy_to_uva()
        self.use_penalty[slot] = values != (1, 0, 0)


class BadWordsState:
    def __init__(self, max_num_reqs, req_states, device):
        self.req_states = req_states
        self.bad_word_token_ids = StagedWriteTensor((max_num_reqs, 1024), torch.int32, device)
        self.bad_word_offsets = StagedWriteTensor((max_num_reqs, 129), torch.int32, device)
        self.num_bad_words = UvaBackedTensor(max_num_reqs, torch.int32, device)

    def add_request(self, slot, words):
        self.num_bad_words.np[slot] = len(words)
        self.num_bad_words.copy_to_uva()
        if words:
            self.bad_word_token_ids.write(slot, sum(words, []))
            self.bad_word_offsets.write(slot, [0, *numpy.cumsum([len(word) for word in words]).tolist()])


class LogprobTokenIdsState:
    def __init__(self, max_num_reqs, device):
        self.num_token_ids = UvaBackedTensor(max_num_reqs, torch.int32, device)


class LogprobsTensors(NamedTuple):
    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor
    cu_num_generated_tokens: list | None = None
    cu_num_generated_tokens_tensor: torch.Tensor | None = None


@dataclass
class SamplerOutput:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: object
    num_nans: torch.Tensor | None
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    sampling_mask_tensors: object = None


@dataclass
class GrammarOutput:
    structured_output_request_ids: list
    grammar_bitmask: object
    num_acceptable_drafts: object = None


@dataclass
class InputBatch:
    req_ids: list
    num_reqs: int
    idx_mapping: torch.Tensor
    idx_mapping_np: numpy.ndarray
    expanded_idx_mapping: torch.Tensor
    num_tokens: int
    num_draft_tokens: int
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    has_prefill: bool
    logits_indices: torch.Tensor
    cu_num_logits: torch.Tensor


def get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
    num_sampled = torch.where(seq_lens[: len(idx_mapping)] < prefill_len[idx_mapping], 0, num_sampled)
    return num_sampled, torch.zeros_like(num_sampled)


def async_tensor_h2d(data, device=None, dtype=None, out=None):
    tensor = torch.as_tensor(data, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Sampler:
    def __init__(self, max_num_reqs, vocab_size, max_model_len, device):
        self.logprobs_mode = "raw_logprobs"
        self.compute_nans = False
        self.use_fp64_gumbel = False
        self.req_states = requests = RequestState(max_num_reqs, max_model_len, device)
        self.sampling_states = SamplingStates(max_num_reqs, vocab_size, device)
        self.penalties_state = PenaltiesState(max_num_reqs, vocab_size, requests, device)
        bad_words = BadWordsState(max_num_reqs, requests, device)
        self.logits_processors = [LogitBiasState(max_num_reqs, device), self.penalties_state, bad_words]
        self.logprob_token_ids_state = LogprobTokenIdsState(max_num_reqs, device)
        self.thinking_budget_state = SimpleNamespace(enabled=False)
        self.trace_replay_state = None
        self.needs_logits_processing = numpy.zeros(max_num_reqs, dtype=bool)
        self.num_speculative_tokens = 1
        self.return_sampling_mask = False
        self.use_flashinfer = False
        self.use_xpu_sampler = False

    def add_request(self, req_idx, sampling_params):
        pass

    def __call__(self, logits, input_batch):
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        tokens = torch.full((logits.shape[0], 1), ENGINE_TOKEN, device=logits.device)
        slots = input_batch.idx_mapping_np
        num_token_ids = self.logprob_token_ids_state.num_token_ids.np[slots].max()
        top_n = max(self.sampling_states.num_logprobs[slots].max(), num_token_ids or -1)
        logprobs = None
        if top_n >= 0:
            ids = tokens.repeat(1, 1 + top_n)
            logprobs = LogprobsTensors(ids, torch.full_like(ids, -7, dtype=torch.float32), ids[:, 0].clone())
        return SamplerOutput(tokens, logprobs, None, num_sampled, num_rejected)


class UnquantizedEmbeddingMethod:
    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight, bias)


class ParallelLMHead(torch.nn.Module):
    def __init__(self, weight, tp_size=1):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.tp_size = tp_size
        self.quant_method = UnquantizedEmbeddingMethod()


class LogitsProcessor(torch.nn.Module):
    def __init__(self, vocab_size, org_vocab_size=None, scale=1.0, logits_as_input=False, soft_cap=None):
        super().__init__()
        self.scale = scale
        self.logits_as_input = logits_as_input
        self.org_vocab_size = org_vocab_size or vocab_size
        self.soft_cap = soft_cap
        self.head_dtype = None

    def forward(self, lm_head, hidden_states, embedding_bias=None, skip_gather=False):
        logits = torch.nn.functional.linear(hidden_states, lm_head.weight, embedding_bias)[:, : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits * self.scale


class GPUModelRunner:
    def __init__(self, model, max_num_reqs, vocab_size, max_model_len, device):
        self.model = model
        self.max_num_reqs = max_num_reqs
        self.device = torch.device("cuda")  # also where the tensors are on the CPU
        self.lora_config = None
        self.batch_sharder = None
        self.rejection_sampler = None
        self.sampler = Sampler(max_num_reqs, vocab_size, max_model_len, device)

    def sample(self, hidden_states, input_batch, grammar_output):
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        output = self.sampler(logits, input_batch)
        return output, output.num_sampled, output.num_rejected


_PLACES = {
    "vllm.utils.torch_utils": [async_tensor_h2d],
    "vllm.model_executor.layers.logits_processor": [LogitsProcessor],
    "vllm.v1.core.sched.output": [GrammarOutput],
    "vllm.v1.outputs": [LogprobsTensors],
    "vllm.v1.worker.gpu.input_batch": [InputBatch, get_num_sampled_and_rejected],
    "vllm.v1.worker.gpu.model_runner": [GPUModelRunner],
    "vllm.v1.worker.gpu.sample.output": [SamplerOutput],
    "vllm.v1.worker.gpu.sample.sampler": [Sampler],
}


def install(monkeypatch, places=_PLACES):
    """Makes the stubs, or other members of modules, importable as vLLM."""
    modules = {}
    for place, members in places.items():
        parts = place.split(".")
        for name in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
            module = modules.setdefault(name, ModuleType(name))
        vars(module).update({member.__name__: member for member in members})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    # Restored after the test.
    [runner], [sampler] = places["vllm.v1.worker.gpu.model_runner"], places["vllm.v1.worker.gpu.sample.sampler"]
    monkeypatch.setattr(runner, "sample", runner.sample)
    monkeypatch.setattr(sampler, "add_request", sampler.add_request)
