"""`enqueue` returns before its work runs, and graphs of several calls share a sampler."""

import json
import time

import pytest
from conftest import Problem, library
from test_enqueue import Adjusted, device_keys, draws_of

from flash_sampling import Head, Sampler

torch = library("torch")
pytestmark = pytest.mark.usefixtures("gpu")


def enqueued(sampler, given, results={}, **tensors):
    """Makes a call of `enqueue`. The call first fills the results with other values, and returns the results."""
    kinds = {"out": torch.int64, "statuses": torch.int32}
    results = {name: torch.empty(len(given), dtype=kind, device="cuda") for name, kind in kinds.items()} | results

    def call():
        for tensor in results.values():
            tensor.fill_(77)
        sampler.enqueue(given, **results, **tensors)
        return list(results.values())

    return call


def plain(rows):
    problem = Problem(rows)
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")), max_rows=rows)
    return enqueued(sampler, torch.tensor(problem.hidden, device="cuda"), **device_keys(problem.keys))


def adjusted(kind):
    problem = Problem()
    sampler, given = draws_of(kind, problem)
    top_k = torch.tensor([0, 10, -1, 3], dtype=torch.int32, device="cuda")
    mask = torch.full((4, 32), -2, dtype=torch.int32, device="cuda")
    columns = Adjusted(problem.logits).tensors()
    return enqueued(sampler, given, top_k=top_k, mask=mask, **device_keys(problem.keys), **columns)


def with_logprobs():
    problem = Problem()
    sampler, given = draws_of("head", problem)
    shapes = {
        "logprobs": ((4,), torch.float32),
        "ranks": ((4,), torch.int32),
        "log_z": ((4,), torch.float64),
        "top_tokens": ((4, 3), torch.int32),
        "top_logprobs": ((4, 3), torch.float32),
        "kept_begin": ((5,), torch.int64),
        "kept_tokens": ((4000,), torch.int32),
    }
    results = {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in shapes.items()}
    top_p = torch.tensor([1.0, 0.9, 0.7, 0.5], device="cuda")
    return enqueued(sampler, given, results, top_p=top_p, **device_keys(problem.keys))


def shadowed():
    torch.manual_seed(5)
    weight, hidden = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (32_000, 5))
    seeds = torch.arange(5, device="cuda")
    return enqueued(Sampler(Head(weight), shadow=True), hidden, seed=seeds, position=seeds + 3)


def by_operator():
    from flash_sampling.torch import operator

    problem = Problem()
    draw = operator(Sampler(Head(torch.tensor(problem.weight, device="cuda"))))
    hidden, keys = torch.tensor(problem.hidden, device="cuda"), device_keys(problem.keys)
    top_p = torch.full((4,), 0.9, device="cuda")
    return lambda: [draw(hidden, top_p=top_p, **keys)]


def of_given_tokens():
    from flash_sampling.torch import token_logprobs

    problem = Problem()
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")), max_rows=3)
    hidden, tokens = torch.tensor(problem.hidden, device="cuda"), torch.arange(8, device="cuda").view(4, 2)
    return lambda: [token_logprobs(sampler, hidden, tokens)]


# Each function makes a call. The call returns a list of its results.
CALLS = {
    "plain": lambda: plain(4),
    "300 rows": lambda: plain(300),
    "filters, penalties, bias and mask": lambda: adjusted("head"),
    "logits": lambda: adjusted("logits"),
    "log-probabilities and kept tokens": with_logprobs,
    "shadow": shadowed,
    "operator": by_operator,
    "token_logprobs": of_given_tokens,
}


@pytest.fixture(params=CALLS)
def warm_call(request):
    """A call whose kernels and memory exist, because earlier calls loaded and allocated them."""
    call = CALLS[request.param]()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    return call


@pytest.fixture
def waiting_call(problem):
    sampler, hidden = draws_of("head", problem)
    sampler(hidden, **problem.keys)
    return lambda: sampler(hidden, **problem.keys)


def behind_other_work(call):
    """Calls while the current stream has about a second of other work. Returns the results of the call, and whether the
    other work was unfinished when the call returned."""
    end = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    end.record()
    results = call()
    is_busy = not end.query()
    torch.cuda.synchronize()
    return results, is_busy


def test_a_call_returns_before_earlier_work_of_the_stream(warm_call):
    want = [result.clone() for result in warm_call()]
    results, is_busy = behind_other_work(warm_call)
    assert is_busy
    assert all(torch.equal(result, other) for result, other in zip(results, want, strict=True))


def test_a_call_that_waits_returns_after_earlier_work_of_the_stream(waiting_call, problem):
    """The negative control."""
    tokens, is_busy = behind_other_work(waiting_call)
    assert not is_busy and tokens.tolist() == problem.argmax_with_noise().tolist()


def profiled(call, path):
    """The kernels that ran, and the waits of the host during the call. Waits of the driver have the type `cuda_sync`."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    options = torch.profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    with torch.profiler.profile(activities=activities, experimental_config=options) as profile:
        time.sleep(0.01)
        with torch.profiler.record_function("the call"):
            call()
        time.sleep(0.01)  # before the wait of the profiler
    profile.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if "dur" in event]
    [span] = [event for event in events if event["name"] == "the call" and event["cat"] == "user_annotation"]
    kernels = {event["name"] for event in events if event["cat"] == "kernel"}
    during = [event for event in events if 0 <= event["ts"] - span["ts"] <= span["dur"]]
    is_wait = lambda name, kind: "Synchronize" in name or kind == "cuda_sync" and name != "Stream Wait Event"
    return kernels, [event["name"] for event in during if is_wait(event["name"], event["cat"])]


def test_the_profiler_sees_kernels_and_no_waits(warm_call, tmp_path):
    kernels, waits = profiled(warm_call, tmp_path / "trace.json")
    assert {"encode_rows", "write_tokens"} <= kernels and waits == []


def test_the_profiler_sees_the_waits_of_other_calls(waiting_call, tmp_path):
    """The negative controls: a wait by torch, and the driver's wait of a call that waits."""
    for call in (torch.cuda.synchronize, waiting_call):
        assert profiled(call, tmp_path / "trace.json")[1], call


def test_graphs_of_different_row_counts_share_a_sampler():
    torch.manual_seed(11)
    sampler = Sampler(Head(torch.tensor(Problem().weight, device="cuda")), max_rows=512)
    graphs = {}
    for rows in (1, 9, 300):
        columns = {name: torch.zeros(rows, dtype=torch.int64, device="cuda") for name in ("seed", "position")}
        columns["temperature"] = torch.ones(rows, device="cuda")
        hidden, out = torch.zeros(rows, 32, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
        sampler.enqueue(hidden, out, **columns)
        graphs[rows] = torch.cuda.CUDAGraph(), hidden, out, columns
        with torch.cuda.graph(graphs[rows][0]):
            sampler.enqueue(hidden, out, **columns)
    for order in [(300, 1, 9), (9, 300, 1), (1, 9, 300)] * 2:
        for rows in order:
            graph, hidden, out, columns = graphs[rows]
            hidden.copy_(torch.randint(-1, 2, (rows, 32)))
            columns["seed"].copy_(torch.randint(2**62, (rows,)))
            columns["position"].copy_(torch.randint(2**50, (rows,)))
            columns["temperature"].copy_(torch.rand(rows) * 2 + 0.5)
            graph.replay()
        for rows, (_, hidden, out, columns) in graphs.items():
            assert torch.equal(out, sampler(hidden, **columns)), (order, rows)
        assert len(set(graphs[300][2].tolist())) > 30
