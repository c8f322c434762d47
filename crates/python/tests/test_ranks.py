"""Ranks that each have a shard of the vocabulary draw the tokens of one head."""

import os
import socket
import threading
import time

import numpy
import pytest
from conftest import Problem, library, skip

from flash_sampling import FlashSamplingError, Head, Sampler, SamplingParams

STARTS = [0, 300, 704, 1000]  # of three shards


class ThreadGroup:
    """Ranks in threads of one process."""

    def __init__(self, rank, world, shared):
        self.rank, self.world, self.time_limit, self.shared = rank, world, 20.0, shared

    def all_gather(self, message, time_limit):
        messages, barrier = self.shared
        messages[self.rank] = message
        barrier.wait(time_limit)
        gathered = list(messages)
        barrier.wait(time_limit)  # before the next message
        return gathered


def in_threads(world, run):
    """Calls run(group) in one thread for each rank, and returns the results, or raises the first error."""
    shared, results = ([b""] * world, threading.Barrier(world)), [None] * world

    def thread(rank):
        try:
            results[rank] = run(ThreadGroup(rank, world, shared))
        except BaseException as error:
            results[rank] = error
            shared[1].abort()

    threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(world)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise errors[0] from errors[-1]
    return results


def shard(problem, rank, starts=STARTS, to=numpy.asarray):
    """The head of a rank."""
    weight = to(problem.weight[starts[rank] : starts[rank + 1]])
    return Head(weight, first_token=starts[rank], vocab_size=1000)


PARAMS = [
    {},
    {"temperature": [0.5, 1, 2, 0]},
    {"top_k": 20, "top_p": 0.9},
    {"top_p": [1, 0.7, 0.5, 0.9], "temperature": 2},
    {"min_p": 0.05},
    {"mask": numpy.full((4, 32), 0x5EEDBEE, dtype=numpy.int32)},
]


def test_ranks_draw_the_tokens_of_one_head(problem):
    def run(group):
        sampler = Sampler(shard(problem, group.rank), group=group, max_logprobs=3)
        assert sampler.vocab_size == 1000 and sampler.is_pathwise
        params = [SamplingParams(logprobs=3, top_p=p, kept=True) for p in [1.0, 0.9, 0.5, 0.2]]
        rows = sampler.sample(problem.hidden, params, seed=problem.seeds, position=problem.positions)
        tokens = [sampler(problem.hidden, **problem.keys, **params).tolist() for params in PARAMS]
        return tokens, [(row.token, row.score, row.top, row.kept and row.kept.token_ids) for row in rows]

    results = in_threads(3, run)
    whole = Sampler(Head(problem.weight), max_logprobs=3)
    params = [SamplingParams(logprobs=3, top_p=p, kept=True) for p in [1.0, 0.9, 0.5, 0.2]]
    rows = whole.sample(problem.hidden, params, seed=problem.seeds, position=problem.positions)
    want = [whole(problem.hidden, **problem.keys, **params).tolist() for params in PARAMS]
    assert results == [(want, [(row.token, row.score, row.top, row.kept and row.kept.token_ids) for row in rows])] * 3
    # The negative control: a shard alone.
    alone = Sampler(shard(problem, 0))(problem.hidden, **problem.keys).tolist()
    assert alone != want[0]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ranks_with_a_shadow_draw_the_tokens_of_one_head_without(problem, backend):
    """Rank 1 has no shadow. Every processor draws calls of one row from a shadow."""
    keys = {rows: {name: values[:rows] for name, values in problem.keys.items()} for rows in (1, 4)}
    filters = [{}, {"temperature": 0}, {"min_p": 0.05}, {"top_k": 20}, {"top_p": 0.9}]

    def draws(sampler):
        calls = [(rows, params) for rows in keys for params in filters]
        return [sampler(problem.hidden[:rows], **keys[rows], **params).tolist() for rows, params in calls]

    def run(group):
        sampler = Sampler(shard(problem, group.rank), group=group, backend=backend, shadow=group.rank != 1)
        drawn, fallbacks = draws(sampler), []
        for params in [{}, {"top_p": 0.9}]:
            sampler(problem.hidden[:1], **keys[1], **params)
            fallbacks.append(sampler.fallback_rows)
        return sampler.shadow, drawn, fallbacks

    want = draws(Sampler(Head(problem.weight)))
    # Each rank counts the rows of its own shard. A top-p that comes first needs all logits.
    assert in_threads(3, run) == [(True, want, [0, 1]), (False, want, [0, 0]), (True, want, [0, 1])]


def test_a_rank_with_other_rows_is_named_and_the_group_continues(problem):
    def run(group):
        sampler = Sampler(shard(problem, group.rank, [0, 512, 1000]), group=group)
        seeds = [100, 101 + group.rank, 102, 103]
        with pytest.raises(FlashSamplingError, match="row 1: rank [01] was called with other parameters: seed") as error:
            sampler(problem.hidden, seed=seeds, position=problem.positions)
        assert (error.value.row, error.value.knob) == (1, "seed")
        with pytest.raises(FlashSamplingError, match="shard [01] has row count [23], but shard [01] has [23]"):
            sampler(problem.hidden[: 2 + group.rank], seed=seeds[: 2 + group.rank], position=1)
        return sampler(problem.hidden, **problem.keys).tolist()

    assert in_threads(2, run) == [problem.argmax_with_noise().tolist()] * 2


def test_shards_that_do_not_make_a_vocabulary_are_named(problem):
    def run(group):
        with pytest.raises(FlashSamplingError, match=r"no shard covers the tokens 512..600 before shard 1"):
            Sampler(Head(problem.weight[:512], vocab_size=1000) if group.rank == 0 else shard(problem, 1, [0, 600, 1000]), group=group)

    in_threads(2, run)


def test_a_group_that_fails_is_an_error(problem):
    class Fails:
        rank, world, time_limit, calls = 0, 1, 1.0, 0

        def all_gather(self, message, time_limit):
            self.calls += 1
            if self.calls == 2:
                raise TimeoutError("a rank is late")
            return [message] * (1 if self.calls < 4 else 2)

    group = Fails()
    head = Head(problem.weight)
    sampler = Sampler(head, group=group)
    for fault in ["the transport failed: TimeoutError: a rank is late", "an earlier exchange of this group failed"]:
        with pytest.raises(FlashSamplingError, match=fault):
            sampler(problem.hidden, **problem.keys)
    assert group.calls == 2
    sampler = Sampler(head, group=group)
    with pytest.raises(FlashSamplingError, match="the transport gave 2 messages for 1 ranks"):
        sampler(problem.hidden, **problem.keys)
    for name, value, fault in [("rank", 1, "rank 1 of 1"), ("time_limit", -1.0, "time_limit -1.0")]:
        wrong = Fails()
        setattr(wrong, name, value)
        with pytest.raises(FlashSamplingError, match=fault) as error:
            Sampler(head, group=wrong)
        assert error.value.knob == "group"
    interrupted = Fails()
    sampler = Sampler(head, group=interrupted)

    def interrupt(message, time_limit):
        raise KeyboardInterrupt

    interrupted.all_gather = interrupt
    with pytest.raises(KeyboardInterrupt):
        sampler(problem.hidden, **problem.keys)
    parts = {"rank": 0, "world": 1, "time_limit": 1.0, "all_gather": lambda self, message, time_limit: [message]}
    for name in parts:
        lacking = type("Group", (), {part: value for part, value in parts.items() if part != name})()
        with pytest.raises(FlashSamplingError, match=f"group has no attribute {name}") as error:
            Sampler(head, group=lacking)
        assert error.value.knob == "group"


def test_a_rank_does_not_enqueue(problem):
    class Alone:
        rank, world, time_limit = 0, 1, 1.0

        def all_gather(self, message, time_limit):
            return [message]

    keys = {name: numpy.array(values) for name, values in problem.keys.items()}
    sampler = Sampler(Head(problem.weight), group=Alone())
    with pytest.raises(FlashSamplingError, match="must be on a GPU, and the sampler on the same GPU") as error:
        sampler.enqueue(problem.hidden, numpy.zeros(4, dtype=numpy.int64), **keys)
    assert error.value.knob == "hidden"


def in_processes(target, *args):
    """Runs target(rank, queue, *args) in two processes of a gloo group, and returns what each puts into the queue."""
    multiprocessing = library("torch").multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = multiprocessing.Queue()
    processes = [multiprocessing.Process(target=process, args=(target, rank, port, queue, *args)) for rank in range(2)]
    [each.start() for each in processes]
    [each.join(300) for each in processes]
    alive = [rank for rank, each in enumerate(processes) if each.is_alive()]
    [processes[rank].kill() for rank in alive]
    assert not alive, f"ranks {alive} hang"
    return dict(queue.get(timeout=5) for each in processes if each.exitcode == 0)


def process(target, rank, port, queue, *args):
    import torch.distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    queue.put((rank, target(rank, *args)))
    # Without this, the end of a process may abort in gloo's threads.
    torch.distributed.destroy_process_group()


def draw_then_die(rank):
    """Draws on two ranks, in a call whose messages are longer than the first exchange. Then rank 1 ends."""
    from flash_sampling.torch import group

    problem = Problem(rows=64)
    sampler = Sampler(shard(problem, rank, [0, 512, 1000]), group=group(time_limit=15), max_logprobs=20)
    tokens = sampler(problem.hidden, **problem.keys).tolist()
    rows = sampler.sample(problem.hidden, SamplingParams(logprobs=20, top_p=0.9), **{"seed": problem.seeds, "position": 0})
    if rank == 1:
        os._exit(3)
    begin = time.monotonic()
    with pytest.raises(FlashSamplingError, match="the transport failed") as error:
        sampler(problem.hidden, **problem.keys)
    return tokens, [row.token for row in rows], time.monotonic() - begin, str(error.value)


def test_processes_draw_the_tokens_of_one_head_and_a_dead_process_is_an_error():
    library("torch")
    results = in_processes(draw_then_die)
    problem = Problem(rows=64)
    whole = Sampler(Head(problem.weight), max_logprobs=20)
    rows = whole.sample(problem.hidden, SamplingParams(logprobs=20, top_p=0.9), seed=problem.seeds, position=0)
    tokens, with_filters, seconds, _ = results[0]
    assert tokens == problem.argmax_with_noise().tolist() and with_filters == [row.token for row in rows]
    assert seconds < 15.5


def draw_late(rank):
    """Rank 1 does not make the second call within the time limit of 5 seconds."""
    from flash_sampling.torch import group

    problem = Problem()
    sampler = Sampler(shard(problem, rank, [0, 512, 1000]), group=group(time_limit=5))
    tokens = sampler(problem.hidden, **problem.keys).tolist()
    if rank == 1:
        time.sleep(9)
        return tokens
    begin = time.monotonic()
    with pytest.raises(FlashSamplingError, match="TimeoutError: not all ranks came to the exchange"):
        sampler(problem.hidden, **problem.keys)
    seconds = time.monotonic() - begin
    with pytest.raises(FlashSamplingError, match="an earlier exchange of this group failed"):
        sampler(problem.hidden, **problem.keys)
    assert 4.9 < seconds < 7, seconds
    return tokens


def test_a_late_process_is_an_error_within_the_time_limit():
    library("torch")
    assert in_processes(draw_late) == dict.fromkeys(range(2), Problem().argmax_with_noise().tolist())


def draw_on_gpus(rank, shadow):
    """Draws on two GPUs by peers, and with requests that take the transport."""
    import torch

    from flash_sampling.torch import group

    problem = Problem(rows=64)
    torch.cuda.set_device(rank)

    def to(values):
        return torch.tensor(values, dtype=torch.bfloat16, device=f"cuda:{rank}")

    options = {"group": group(time_limit=120), "max_logprobs": 3, "max_adjusted": 300, "shadow": shadow}
    sampler = Sampler(shard(problem, rank, [0, 512, 1000], to), **options)
    assert sampler.shadow == shadow
    hidden, results = to(problem.hidden), []
    for params in [{}, {"top_k": 20}, {"top_p": 0.9, "temperature": 2}, {"top_k": 50, "top_p": 0.5}]:
        tokens = sampler(hidden, **problem.keys, **params)
        assert tokens.device == hidden.device and torch.cuda.current_device() == rank
        # Ranks of GPUs decide filters by the weight.
        assert sampler.fallback_rows == (64 if shadow and params else 0)
        results.append(tokens.tolist())
    rows = sampler.sample(hidden, SamplingParams(logprobs=3), seed=problem.seeds, position=problem.positions)
    results.append([(row.token, row.top) for row in rows])
    seeds = [seed + (3 * rank if row == 5 else 0) for row, seed in enumerate(problem.seeds)]
    with pytest.raises(FlashSamplingError, match="row 5: rank [01] was called with other parameters: seed") as error:
        sampler(hidden, seed=seeds, position=problem.positions)
    assert error.value.row == 5
    results.append(enqueue_on_gpu(torch, sampler, hidden, problem))
    results.append(sampler(hidden, **problem.keys).tolist())
    return results


ENQUEUED = [{}, {"temperature": 2.0}, {"top_k": 20}, {"top_p": 0.9, "temperature": 2.0}, {"top_k": 50, "top_p": 0.5}]
# The banned tokens of 64 rows.
BANNED = numpy.random.default_rng(3).permuted(numpy.tile(numpy.arange(1000), (64, 1)), axis=1)[:, :300]


def enqueue_on_gpu(torch, sampler, hidden, problem):
    """Calls that do not wait, and a graph that is replayed with other positions: the tokens of each."""

    def array(values, dtype):
        return torch.tensor(values, dtype=dtype, device=hidden.device)

    dtypes = {"temperature": torch.float32, "top_p": torch.float32, "top_k": torch.int32}
    keys = {name: array(values, torch.int64) for name, values in problem.keys.items()}
    statuses = torch.full((64,), 9, dtype=torch.int32, device=hidden.device)
    results = []
    for params in ENQUEUED:
        params = {name: array([value] * 64, dtypes[name]) for name, value in params.items()}
        out = torch.empty(64, dtype=torch.int64, device=hidden.device)
        sampler.enqueue(hidden, out, statuses=statuses, **keys, **params)
        results.append(out.tolist())
        assert statuses.tolist() == [0] * 64
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.enqueue(hidden, out, **keys, **params)
    for later in [0, 1]:
        keys["position"] += later
        graph.replay()
        results.append(out.tolist())
    begin = torch.arange(0, 64 * 300 + 1, 300, device=hidden.device)
    sampler.enqueue(hidden, out, banned_begin=begin, banned_tokens=array(BANNED.ravel(), torch.int32), **keys)
    results.append(out.tolist())
    return results


@pytest.mark.parametrize("shadow", [False, True])
def test_two_gpus_draw_the_tokens_of_one_head(shadow):
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        skip("cuda-ranks", "there are no two GPUs")
    problem = Problem(rows=64)
    whole = Sampler(Head(problem.weight), max_logprobs=3)
    want = []
    for params in [{}, {"top_k": 20}, {"top_p": 0.9, "temperature": 2}, {"top_k": 50, "top_p": 0.5}]:
        want.append(whole(problem.hidden, **problem.keys, **params).tolist())
    rows = whole.sample(problem.hidden, SamplingParams(logprobs=3), seed=problem.seeds, position=problem.positions)
    enqueued = [whole(problem.hidden, **problem.keys, **params).tolist() for params in ENQUEUED]
    keys = {"seed": problem.seeds, "position": [1 + at for at in problem.positions]}
    later = whole(problem.hidden, **keys, **ENQUEUED[-1])
    params = [SamplingParams(banned_token_ids=tokens.tolist()) for tokens in BANNED]
    banned = [row.token for row in whole.sample(problem.hidden, params, **keys)]
    assert banned != whole(problem.hidden, **keys).tolist()
    enqueued += [enqueued[-1], later.tolist(), banned]
    want += [[(row.token, row.top) for row in rows], enqueued, want[0]]
    assert in_processes(draw_on_gpus, shadow) == dict.fromkeys(range(2), want)
