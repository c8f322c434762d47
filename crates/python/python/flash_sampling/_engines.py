"""Functions for the plugins of inference engines: checks of interfaces, and warnings about failed rows."""

from __future__ import annotations

import importlib
import inspect
from collections import deque
from collections.abc import Collection
from logging import Logger
from operator import attrgetter
from typing import Any

import numpy
import torch

# The number of steps whose statuses one copy moves to the CPU.
_STEPS = 32
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
    """Raises `Unsupported` if a class of an engine has unknown or missing attributes. `names` lists them."""
    if names:
        raise Unsupported(f"{kind} has unknown or missing attributes: {', '.join(sorted(names))}")


class FailedRows:
    """Warnings about rows without a token. A later step logs them, so that no step waits for the GPU.

    One copy moves the statuses of several steps to the CPU.
    """

    def __init__(self, log: Logger) -> None:
        self._log = log
        # The statuses of the steps after the last copy, and for each step: begin, end, names of the requests or None.
        self._statuses = torch.empty(0, dtype=torch.int32)
        self._stream: Any = None  # the stream of these steps
        self._steps: list[tuple[int, int, list[str] | None]] = []
        self._copies: deque[tuple[Any, torch.Tensor, Any]] = deque()

    def statuses(self, rows: int, device: torch.device, requests: list[str] | None = None) -> torch.Tensor:
        """Returns the argument `statuses` of `Sampler.enqueue` for a step, and logs the failed rows of earlier steps.

        requests: the name of each row's request, or None.
        """
        while self._copies and self._copies[0][0].query():
            self._report(*self._copies.popleft()[1:])
        begin, stream = self._steps[-1][1] if self._steps else 0, None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
        if len(self._steps) == _STEPS or begin + rows > self._statuses.numel() or stream != self._stream:
            self._copy()
            # Zeros, because a step whose call fails has no statuses.
            begin, self._statuses = 0, torch.zeros(_STEPS * rows, dtype=torch.int32, device=device)
            self._stream = stream
        self._steps.append((begin, begin + rows, requests))
        return self._statuses[begin : begin + rows]

    def _copy(self) -> None:
        if self._steps:
            with torch.cuda.stream(self._stream):
                on_cpu, copied = self._statuses.to("cpu", non_blocking=True), torch.cuda.Event()
                copied.record()
            self._copies.append((copied, on_cpu, self._steps))
            self._steps = []

    def _report(self, statuses: torch.Tensor, steps: list[tuple[int, int, list[str] | None]]) -> None:
        for begin, end, requests in steps:
            self._report_step(statuses.numpy()[begin:end], requests)

    def _report_step(self, statuses: numpy.ndarray, requests: list[str] | None) -> None:
        failed = statuses.nonzero()[0]
        if len(failed) > 0:
            first = int(failed[0])
            name = f"row {first}" if requests is None else f"request {requests[first]}"
            reason = _REASONS.get(int(statuses[first]) & 255, "the status is unknown")
            text = "%d of %d rows have token 0 instead of a draw. The first is %s: %s"
            self._log.warning(text, len(failed), len(statuses), name, reason)
