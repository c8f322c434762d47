"""Draws release the GIL, and threads may share a sampler and histories."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
from conftest import Problem
from test_package import run
from test_quantised import CHECKPOINTS

from flash_sampling import Head, History, Sampler, SamplingParams


def test_other_threads_run_during_a_draw():
    sampler = Sampler(Head(numpy.ones((100_000, 512), dtype=numpy.float32)), threads=1)
    hidden = numpy.ones((64, 512), dtype=numpy.float32)
    ticks, end = [], threading.Event()

    def tick():
        while not end.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    sampler(hidden, seed=range(64), position=0)
    stop = time.perf_counter()
    end.set()
    thread.join()
    # With the GIL, a thread that wakes during the draw would wait for its end.
    inside = [at for at in ticks if start + 0.1 * (stop - start) < at < stop - 0.1 * (stop - start)]
    assert len(inside) >= 2, (len(inside), stop - start)


def test_threads_share_a_sampler():
    problem = Problem(rows=16)
    sampler = Sampler(Head(problem.weight))
    want = problem.argmax_with_noise()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(sampler, problem.hidden, **problem.keys) for _ in range(64)]
        assert all(numpy.array_equal(call.result(), want) for call in calls)


# A child of `fork` has no threads of its parent. An alarm ends a child that waits for them.
FORK = """if True:
    import os, signal
    import numpy
    from flash_sampling import FlashSamplingError, Head, Sampler, from_logits

    head, hidden = Head(numpy.ones((2000, 64), "float32")), numpy.ones((2, 64), "float32")
    draw = lambda sampler: sampler(hidden, seed=[1, 2], position=0).tolist()
    {setup}
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    else:
        signal.alarm(30)
        try:
            result = {call}
        except FlashSamplingError as error:
            result = f"{{error.knob}}: {{error}}"
        print(result, flush=True)
        os._exit(0)
"""
POOL, NONE = "one, two, pool = (Sampler(head, threads=n) for n in (1, 2, None)); want = draw(pool)", "pass"
GGUF = CHECKPOINTS / "llama.gguf"
LOGITS = "from_logits(hidden, seed=[1, 2], position=0)"


@pytest.mark.parametrize(
    ("setup", "call", "is_refused"),
    [
        (POOL, "draw(pool)", True),
        (POOL, "draw(Sampler(head))", True),
        (POOL, "draw(two)", True),
        (POOL, "Sampler(head, threads=1, shadow=True)", True),
        (LOGITS, LOGITS, True),
        (POOL, "draw(one) == draw(Sampler(head, threads=2)) == draw(Sampler(head, backend='reference')) == want", False),
        (NONE, "draw(Sampler(head)) == draw(Sampler(head, threads=1))", False),
        # On some processors, the construction computes the norms of a weight in blocks.
        (POOL, f"Sampler(Head.from_gguf({str(GGUF)!r}), threads=1).vocab_size > 0", False),
    ],
)
def test_a_fork_has_no_threads_of_its_parent(setup, call, is_refused):
    child, status = run(FORK.format(setup=setup, call=call)).splitlines()
    refused = 'threads: this process was forked, and the threads exist only in its parent: use the start method "spawn", or threads=1'
    assert (child, status) == (refused if is_refused else "True", "0")


def test_threads_share_a_history():
    problem = Problem(rows=1)
    sampler = Sampler(Head(problem.weight))
    history = History([1, 2, 3])
    params = SamplingParams(presence_penalty=0.5, seed=1)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(sampler.sample, problem.hidden, params, [history]) for _ in range(32)]
        pushes = [pool.submit(history.push, token) for token in range(32)]
        assert all(call.result()[0].token < 1000 for call in calls)
        [push.result() for push in pushes]
    assert sorted(history.output) == list(range(32))
