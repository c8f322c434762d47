"""Warnings about rows without a token: the statuses of several steps share one copy to the CPU."""

import logging

import numpy
import pytest
from conftest import library

torch = library("torch")
from engines import Event, warnings  # noqa: E402

from flash_sampling import _engines  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def failed_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return _engines.FailedRows(logging.getLogger("test"))


def test_each_failure_has_one_warning(failed_rows, caplog):
    """Also if steps have other numbers of rows, and if the memory of a copied step has later statuses."""
    numbers, want = numpy.random.default_rng(5), []
    for step in range(500):
        rows = int(numbers.integers(0, 9))
        statuses = failed_rows.statuses(rows, CPU, [f"r{step}.{row}" for row in range(rows)])
        assert statuses.shape == (rows,) and statuses.dtype == torch.int32 and statuses.is_contiguous()
        statuses.copy_(torch.from_numpy(numbers.choice([0, 2], rows, p=[0.95, 0.05])))
        if statuses.any():
            first = int(statuses.nonzero()[0])
            want.append(f"{int(statuses.count_nonzero())} of {rows} rows have token 0 instead of a draw. ")
            want[-1] += f"The first is request r{step}.{first}: a logit is NaN"
    found = warnings(caplog)
    assert found == want[: len(found)] and len(want) > len(found) > 50
    # The last two copies are not complete, or not enqueued.
    for _ in range(3 * _engines._STEPS):
        failed_rows.statuses(8, CPU).zero_()
    assert warnings(caplog) == want


def test_steps_share_a_copy(failed_rows, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: made.append(1) or Event())
    for _ in range(10 * _engines._STEPS + 1):
        failed_rows.statuses(4, CPU).zero_()
    assert len(made) == 10
