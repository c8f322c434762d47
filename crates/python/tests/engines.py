"""What the tests of plugins share: a sampler that enqueues on the CPU, and operations that wait on a GPU."""

import logging

import numpy
import torch

from flash_sampling import FlashSamplingError, Sampler, SamplingParams


class Enqueued:
    """A sampler on the CPU with the checks of `Sampler.enqueue`."""

    def __init__(self, head, max_rows, max_adjusted=None):
        self.sampler = Sampler(head, max_rows)
        self.max_adjusted = max_adjusted
        self.calls = []

    def enqueue(self, hidden, out, *, seed, position, statuses=None, **columns):
        self.calls.append(sorted(columns))
        self.seeds = seed
        kinds = dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32)
        kinds |= {"seed": torch.int64, "position": torch.int64, "top_k": torch.int32}
        lists = {name: columns.pop(name) for name in list(columns) if name.startswith(("bias_", "banned_"))}
        mask = columns.pop("mask", None)
        columns |= {"seed": seed, "position": position}
        for name, column in columns.items():
            assert column.dtype == kinds[name] and column.shape == (len(hidden),) and column.is_contiguous(), name
        columns["seed"] = seed.numpy().view(numpy.uint64)
        errors = {}
        try:
            if lists:
                tokens = self.sample(hidden, lists, mask, **columns)
            else:
                tokens = self.sampler(hidden, mask=mask, **columns)
        except FlashSamplingError as error:
            tokens, errors = error.results, error.errors
        failed = torch.tensor([2 if row in errors else 0 for row in range(len(hidden))])
        if "top_k" in columns:
            top_k = columns["top_k"]
            failed[(top_k > 1024) & (top_k < self.sampler.vocab_size) & (columns["temperature"] > 0)] = 7
        out.copy_(torch.where(failed > 0, -1, torch.as_tensor(tokens)))
        if statuses is not None:
            assert statuses.dtype == torch.int32
            statuses.copy_(failed)


    def sample(self, hidden, lists, mask, *, seed, position, **columns):
        """The tokens of a call with biases or banned tokens."""
        for name, tensor in lists.items():
            kind = torch.float32 if name == "bias_values" else torch.int32 if name.endswith("_tokens") else torch.int64
            assert tensor.dtype == kind and tensor.ndim == 1 and tensor.is_contiguous(), name
        lists, columns = ({name: tensor.numpy() for name, tensor in of.items()} for of in (lists, columns))
        params = []
        for row in range(len(hidden)):
            part = lambda kind: slice(*(int(lists[f"{kind}_{end}"][row]) for end in ("begin", "end")))
            given = {name: column[row].item() for name, column in columns.items()}
            if "bias_tokens" in lists:
                at = part("bias")
                given["logit_bias"] = dict(zip(lists["bias_tokens"][at].tolist(), lists["bias_values"][at].tolist()))
            if "banned_tokens" in lists:
                given["banned_token_ids"] = lists["banned_tokens"][part("banned")].tolist()
            assert len({*given.get("logit_bias", ()), *given.get("banned_token_ids", ())}) <= self.max_adjusted
            params.append(SamplingParams(**given))
        rows = self.sampler.sample(hidden, params, seed=seed, position=position, mask=mask)
        return [row.token for row in rows]


class Event:
    """An event of a stream that has not run the last step."""

    last = None

    def record(self):
        Event.last = self

    def query(self):
        return self is not Event.last


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses operations that read values of tensors, which wait on a GPU."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return operation(*args, **(kwargs or {}))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
