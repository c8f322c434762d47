"""vLLM's own code on the CPU, from the folder of vLLM's package that the environment variable VLLM_SOURCE names.

vLLM's modules cannot be imported without a GPU. So this module executes their definitions alone. Triton interprets
vLLM's kernels on the CPU, if TRITON_INTERPRET was 1 when it was loaded. Stubs replace vLLM's buffers and its draw.
"""

import __future__

import ast
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import stub_vllm as stub
import torch
import triton

_GPU = "v1/worker/gpu"
# The definitions of each file. Later ones use earlier ones.
_DEFINITIONS = {
    "utils/torch_utils.py": "async_tensor_h2d",
    "v1/outputs.py": "LogprobsTensors",
    "v1/core/sched/output.py": "GrammarOutput",
    f"{_GPU}/input_batch.py": "InputBatch get_num_sampled_and_rejected _get_num_sampled_and_rejected_kernel",
    f"{_GPU}/states.py": "RequestState",
    f"{_GPU}/sample/output.py": "SamplerOutput",
    f"{_GPU}/sample/logits_processor/interface.py": "LogitsProcRequestState LogitsContext LogitsProcessor",
    f"{_GPU}/sample/gumbel.py": "_temperature_kernel apply_temperature",
    f"{_GPU}/sample/min_p.py": "_min_p_kernel apply_min_p",
    "v1/sample/ops/topk_topp_sampler.py": "apply_top_k_top_p apply_top_k_top_p_pytorch apply_top_k_only",
    f"{_GPU}/sample/states.py": "NO_LOGPROBS _NP_INT64_MIN _NP_INT64_MAX SamplingStates",
    f"{_GPU}/sample/logit_bias.py": (
        "MAX_NUM_ALLOWED_TOKEN_IDS MAX_NUM_LOGIT_BIAS_TOKENS MAX_NUM_STOP_TOKEN_IDS LogitBiasState _bias_kernel "
        "apply_logit_bias"
    ),
    f"{_GPU}/sample/penalties.py": (
        "PENALTIES_BLOCK_SIZE PenaltiesState _penalties_kernel apply_penalties _bincount_kernel bincount use_penalty"
    ),
    f"{_GPU}/sample/bad_words.py": "BadWordsState _bad_words_kernel apply_bad_words",
    f"{_GPU}/sample/thinking_budget.py": "ThinkingBudgetState",
    f"{_GPU}/sample/logprob.py": (
        "_MAX_TOPK_BLOCK _topk_log_softmax_kernel _ranks_kernel compute_token_logprobs compute_topk_scores "
        "_fill_logprob_token_ids_kernel LogprobTokenIdsState"
    ),
    f"{_GPU}/sample/sampler.py": "Sampler",
    f"{_GPU}/structured_outputs.py": "grammar_invalid_drafts",
    f"{_GPU}/model_runner.py": "GPUModelRunner",
    "model_executor/layers/logits_processor.py": "LogitsProcessor",
}
# The methods of classes whose other methods need the whole engine.
_METHODS = {
    "GPUModelRunner": ["sample"],
    "LogitsProcessor": ["__init__", "forward", "_get_logits", "_apply_head"],
}


class UvaBackedTensor(stub.UvaBackedTensor):
    def __init__(self, size, dtype, max_concurrency=None):
        super().__init__(size, dtype, "cpu")


class StagedWriteTensor(stub.StagedWriteTensor):
    def __init__(self, size, dtype, device, max_concurrency=None, uva_instead_of_gpu=False):
        super().__init__(size, dtype, device)

    def stage_write(self, slot, start, values):
        assert start == 0
        self.write(slot, [*values])

    def stage_write_elem(self, slot, value):
        self.gpu[slot] = value

    def apply_write(self):
        pass


class Layer(torch.nn.Module):
    @staticmethod
    def register(name):
        return lambda layer: layer


# What the definitions use of other modules.
_GIVEN = {
    **dict.fromkeys(("flashinfer_sampler_supported", "xpu_sampler_supported"), lambda: False),
    **{name: globals()[name] for name in ("ABC", "abstractmethod", "dataclass", "NamedTuple", "torch", "triton")},
    "np": numpy,
    "tl": triton.language,
    "UvaBackedTensor": UvaBackedTensor,
    "StagedWriteTensor": StagedWriteTensor,
    "PIN_MEMORY": False,
    "cdiv": lambda a, b: -(-a // b),
    "envs": SimpleNamespace(
        VLLM_COMPUTE_NANS_IN_LOGITS=False, VLLM_MAX_BAD_WORDS_TOTAL_TOKENS=1024, VLLM_MAX_NUM_BAD_WORDS=128
    ),
    "MAX_LOGPROB_TOKEN_IDS": 128,
    "PROCESSED_LOGPROBS_MODES": ("processed_logits", "processed_logprobs"),
    "gumbel_sample": lambda logits, *others, **options: torch.full((len(logits),), stub.ENGINE_TOKEN),
    "LoRAModelRunnerMixin": object,
    "PluggableLayer": Layer,
    "HAS_TRITON": False,
    "current_platform": SimpleNamespace(use_all_gather=lambda: False, is_cpu=lambda: True),
    "get_current_vllm_config": lambda: SimpleNamespace(model_config=None),
}


def load(folder):
    """The definitions of vLLM, by file and name."""
    space, found = {**_GIVEN}, {}
    for path, names in _DEFINITIONS.items():
        body = []
        for node in ast.parse((folder / path).read_text()).body:
            assigned = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
            if not {getattr(node, "name", None), *assigned} & {*names.split()}:
                continue
            methods = _METHODS.get(getattr(node, "name", None)) if "interface" not in path else None
            if methods:
                node.body = [part for part in node.body if getattr(part, "name", None) in methods]
            body.append(node)
        # Triton reads the source of kernels again.
        code = compile(ast.Module(body, []), str(folder / path), "exec", flags=__future__.annotations.compiler_flag)
        # The module's name must exist, because dataclasses look it up.
        space["__name__"] = __name__
        exec(code, space)
        found[path] = {name: space[name] for name in names.split()}
    return found


class Engine:
    """The parts of vLLM that a test server uses, as the module stub_vllm has them."""

    def __init__(self):
        self.found = load(Path(os.environ["VLLM_SOURCE"]))
        self.names = {name: value for names in self.found.values() for name, value in names.items()}
        self.ParallelLMHead, self.LogitsProcessor = stub.ParallelLMHead, self.names["LogitsProcessor"]

    def install(self, monkeypatch):
        """Makes the definitions importable as vLLM."""
        callables = {path: [value for value in names.values() if callable(value)] for path, names in self.found.items()}
        stub.install(monkeypatch, {f"vllm.{path[:-3].replace('/', '.')}": found for path, found in callables.items()})

    def InputBatch(self, **given):
        rows, of = given["num_reqs"], self.names["InputBatch"]
        given["cu_num_logits_np"] = numpy.arange(rows + 1)
        last = given["seq_lens"][:rows].long() - 1
        given["positions"] = torch.stack([last - 1, last], 1)[:, -given["num_tokens"] // rows :].flatten()
        given["expanded_local_pos"] = torch.zeros(rows, dtype=torch.int32)
        given["input_ids"] = torch.zeros(2 * rows, dtype=torch.int32)
        return of(**{field.name: given.get(field.name) for field in fields(of)})

    def GPUModelRunner(self, model, max_num_reqs, vocab_size, max_model_len, device):
        requests = self.names["RequestState"](max_num_reqs, max_model_len, 64, 0, vocab_size, device)
        config = SimpleNamespace(reasoning_config=None)
        runner = self.names["GPUModelRunner"]()
        runner.model, runner.max_num_reqs, runner.device = model, max_num_reqs, torch.device("cuda")
        runner.lora_config = runner.batch_sharder = runner.rejection_sampler = None
        runner.req_states = requests
        runner.sampler = self.names["Sampler"](config, max_num_reqs, vocab_size, device, requests)
        return runner
