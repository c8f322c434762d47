"""What the tests of plugins share: a sampler that enqueues on the CPU, and operations that wait on a GPU."""

import logging

import numpy
import torch

from flash_sampling import FlashSamplingError, Sampler


class Enqueued:
    """A sampler on the CPU with the checks of `Sampler.enqueue`."""

    def __init__(self, head, max_rows):
        self.sampler = Sampler(head, max_rows)
        self.calls = []

    def enqueue(self, hidden, out, *, seed, position, statuses=None, **columns):
        self.calls.append(sorted(columns))
        self.seeds = seed
        kinds = dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32)
        kinds |= {"seed": torch.int64, "position": torch.int64, "top_k": torch.int32}
        columns |= {"seed": seed, "position": position}
        for name, column in columns.items():
            assert column.dtype == kinds[name] and column.shape == (len(hidden),) and column.is_contiguous(), name
        columns["seed"] = seed.numpy().view(numpy.uint64)
        errors = {}
        try:
            tokens = self.sampler(hidden, **columns)
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
