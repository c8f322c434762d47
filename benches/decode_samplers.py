"""The samplers that decode.py and decode_ranks.py time. `draw` writes a token for each row of hidden states to `out`.
`keys` has the seeds and positions of the rows. `filters` has `top_p` with or without `top_k`, or is empty."""

import importlib.util
import os
import sys
import types
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import linear

import flash_sampling

DEVICE = "cuda"


class Ours:
    has_seeds = True  # a seed for each row

    def __init__(self, lm_head: Tensor, rows: int):
        self.sampler = flash_sampling.Sampler(flash_sampling.Head(lm_head), max_rows=rows)

    def draw(self, hidden: Tensor, out: Tensor, keys: dict[str, Tensor], filters: dict[str, Tensor]):
        self.sampler.enqueue(hidden, out, **keys, **filters)


class Matmul:
    """The base of the samplers that draw from the logits of a plain matmul."""

    has_seeds = True

    def __init__(self, lm_head: Tensor, rows: int):
        self.lm_head = lm_head

    def multiply(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.lm_head)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.multiply(hidden).float()


class Torch(Matmul):
    has_seeds = False

    def draw(self, hidden: Tensor, out: Tensor, keys: dict[str, Tensor], filters: dict[str, Tensor]):
        logits = self.logits(hidden)
        if filters:
            logits, tokens = logits.sort(-1, descending=True)
            if "top_k" in filters:
                ranks = torch.arange(logits.shape[1], device=logits.device)
                logits = logits.masked_fill(ranks >= filters["top_k"][:, None], float("-inf"))
            probs = logits.softmax(-1)
            probs = probs.masked_fill(probs.cumsum(-1) - probs >= filters["top_p"][:, None], 0)
            out.copy_(tokens.gather(1, probs.multinomial(1))[:, 0])
        else:
            out.copy_(logits.softmax(-1).multinomial(1)[:, 0])


class FlashInfer(Matmul):
    def __init__(self, lm_head: Tensor, rows: int):
        super().__init__(lm_head, rows)
        import flashinfer.sampling as sampling

        self.sampling = sampling

    def draw(self, hidden: Tensor, out: Tensor, keys: dict[str, Tensor], filters: dict[str, Tensor]):
        logits, sampling = self.logits(hidden), self.sampling
        seeds = {"seed": keys["seed"], "offset": keys["position"]}
        if "top_k" in filters:
            tokens = sampling.top_k_top_p_sampling_from_logits(logits, filters["top_k"], filters["top_p"], **seeds)
        elif filters:
            tokens = sampling.top_p_sampling_from_probs(logits.softmax(-1), filters["top_p"], **seeds)
        else:
            tokens = sampling.sampling_from_logits(logits, **seeds)
        out.copy_(tokens)


class Vllm(Matmul):
    def __init__(self, lm_head: Tensor, rows: int):
        super().__init__(lm_head, rows)
        self.sample, self.filter = vllm_kernels()
        self.rows = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        self.temperature = torch.ones(rows, device=DEVICE)

    def draw(self, hidden: Tensor, out: Tensor, keys: dict[str, Tensor], filters: dict[str, Tensor]):
        logits = self.multiply(hidden)  # Without filters, vLLM's kernel reads the logits in the model's type.
        if filters:
            with_top_k = {"has_topp_only_rows": False} if "top_k" in filters else {}
            logits = self.filter(logits.float(), filters.get("top_k"), filters["top_p"], **with_top_k)
        keys = {"seed": keys["seed"], "pos": keys["position"], "temperature": self.temperature}
        out.copy_(self.sample(logits, self.rows, **keys, apply_temperature=True, is_drafting=False))


def vllm_kernels():
    """Loads vLLM's `gumbel_sample` and `apply_top_k_top_p_triton`. Stubs replace the other modules of vLLM."""
    import triton

    # Replaces vLLM's decorator, which launches `kernel` with the grid and constants that the function `spec` returns.
    def launcher(kernel, **_):
        def wrap(spec):
            def launch(*values):
                given = dict(zip(spec.__code__.co_varnames, values))
                grid, chosen = spec(*values)
                for name in kernel.arg_names:
                    if name not in chosen:
                        source, _, dim = name.lower().partition("_stride_")
                        chosen[name] = given[source].stride(int(dim)) if dim else given[source]
                kernel[grid](**chosen)

            return launch

        return wrap

    units = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    absent = types.SimpleNamespace(is_cuda_alike=lambda: True)
    for name, content in {
        "triton_utils": {"tl": triton.language, "triton": triton},
        "model_executor.warmup.jit_warmup": {"WarmupChoices": tuple, "WarmupIntRange": range, "_when": bool},
        "model_executor.warmup.jit_warmup_triton_helper": {
            "DispatchSpec": tuple,
            "TritonWarmupTensor": tuple,
            "triton_kernel_dispatcher_with_warmup": launcher,
        },
        "platforms": {"current_platform": absent},
        "utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
        "utils.math_utils": {"next_power_of_2": triton.next_power_of_2},
        "utils.platform_utils": {"num_compute_units": lambda device=0: units},
    }.items():
        path = ""
        for part in ["vllm", *name.split(".")]:
            path = f"{path}.{part}".strip(".")
            sys.modules.setdefault(path, types.ModuleType(path))
        vars(sys.modules[path]).update(content)

    def load(name: str, path: str):
        spec = importlib.util.spec_from_file_location(name, os.path.join(os.environ["VLLM_SOURCE"], path))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    gumbel = load("gumbel", "v1/worker/gpu/sample/gumbel.py")
    return gumbel.gumbel_sample, load("topk_topp", "v1/sample/ops/topk_topp_triton.py").apply_top_k_top_p_triton


SAMPLERS = {"ours": Ours, "torch": Torch, "flashinfer": FlashInfer, "vllm": Vllm}
