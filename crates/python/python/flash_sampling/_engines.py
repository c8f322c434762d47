"""Functions for the plugins of inference engines: checks of interfaces, and warnings about failed rows."""

from __future__ import annotations

import importlib
import inspect
from collections import deque
from collections.abc import Collection
from logging import Logger
from operator import attrgetter
from typing import Any

import torch

# The largest top_k of `Sampler.enqueue`.
TOP_K_MAX = 1024
# The reasons of failed rows, by the low byte of a status of `Sampler.enqueue`.
_REASONS = {1: "none of its logits is finite", 2: "a logit is NaN", 3: "a logit is +inf", 7: "a parameter is invalid"}


class Unsupported(Exception):
    """An engine, a model or an option that this package does not support. The engine then draws its own tokens."""


def is_nvidia(device: torch.device) -> bool:
    """Whether a device of torch is a GPU of NVIDIA."""
    return device.type == "cuda" and torch.version.hip is None


def check_signatures(known: dict[str, str]) -> None:
    """Imports functions and classes, and raises `Unsupported` if one has other parameters than the known ones.

    known: the names of the parameters of each "module:name", in order.
    """
    for place, names in known.items():
        module, name = place.split(":")
        found = list(inspect.signature(attrgetter(name)(importlib.import_module(module))).parameters)
        if found != names.split():
            raise Unsupported(f"{name} of {module} has the parameters {' '.join(found)}, instead of {names}")


def check_names(kind: str, names: Collection[str]) -> None:
    """Raises `Unsupported` if a class of an engine has unknown or missing attributes, which are `names`."""
    if names:
        raise Unsupported(f"{kind} has unknown or missing attributes: {', '.join(sorted(names))}")


class FailedRows:
    """Warnings about rows without a token. A later step logs the warning, so that no step waits for the GPU."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._pending: deque[tuple[Any, torch.Tensor, Any]] = deque()

    def check(self, statuses: torch.Tensor, requests: list[str] | None = None) -> None:
        """Logs the failed rows of earlier calls that are complete, and keeps the statuses of a new call for later.

        statuses: [rows] int32 of `Sampler.enqueue`. requests: the name of each row's request, or None.
        """
        while self._pending and self._pending[0][0].query():
            self._report(*self._pending.popleft()[1:])
        on_cpu = statuses.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._pending.append((copied, on_cpu, requests))

    def _report(self, statuses: torch.Tensor, requests: list[str] | None) -> None:
        statuses = statuses.numpy()
        failed = statuses.nonzero()[0]
        if len(failed) > 0:
            first = int(failed[0])
            name = f"row {first}" if requests is None else f"request {requests[first]}"
            reason = _REASONS.get(int(statuses[first]) & 255, "the status is unknown")
            text = "%d of %d rows have token 0 instead of a draw. The first is %s: %s"
            self._log.warning(text, len(failed), len(statuses), name, reason)
