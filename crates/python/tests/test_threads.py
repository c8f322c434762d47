"""Draws release the GIL, and threads may share a sampler and histories."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
from conftest import Problem

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
