"""A token is the argmax of logits plus noise, whatever the batch, the variant or the threads."""

import json
import subprocess
from pathlib import Path

import numpy
import pytest
from conftest import Problem

from flash_sampling import Head, Sampler, SamplingParams, from_logits, noise, reference


def test_tokens_are_the_argmax_of_logits_plus_noise():
    problem = Problem(rows=64)
    sampler = Sampler(Head(problem.weight))
    for temperature in [0.5, 1.0, 4.0]:
        tokens = sampler(problem.hidden, temperature=temperature, **problem.keys)
        assert numpy.array_equal(tokens, problem.argmax_with_noise(temperature))


def test_noise_is_a_function_of_seed_position_draw_and_token():
    base = noise(1, 2, 3, range(64))
    assert base.dtype == numpy.float32 and numpy.array_equal(base, noise(1, 2, 3, numpy.arange(64)))
    assert numpy.array_equal(base[::-1], noise(1, 2, 3, range(63, -1, -1)))
    for other in [(0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 2 + 2**32, 3), (1 + 2**63, 2, 3)]:
        assert not numpy.any(base == noise(*other, range(64)))


def test_noise_has_the_known_answers_of_every_backend():
    vectors = (Path(__file__).parents[3] / "tests" / "vectors" / "noise.txt").read_text().splitlines()
    lines = [line.split() for line in vectors if line and not line.startswith("#")]
    assert len(lines) > 32
    for seed, position, draw, token, bits in ([int(word, 0) for word in line] for line in lines):
        assert noise(seed, position, draw, [token]).view(numpy.uint32)[0] == bits


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 1},
        {"threads": 3},
        {"variant": "sharded:3"},
        {"backend": "cpu:portable"},
        {"backend": "reference"},
        {"canonical": True},
        {"shadow": True},
        {"max_draws": 4, "max_logprobs": 5},
    ],
    ids=str,
)
def test_variants_threads_and_plans_draw_the_same_tokens(problem, options):
    sampler = Sampler(Head(problem.weight), **options)
    assert sampler.is_pathwise
    assert numpy.array_equal(sampler(problem.hidden, **problem.keys), problem.argmax_with_noise())


def test_a_sampler_counts_the_rows_that_fall_back_from_its_shadow(problem):
    for backend in ["cpu", "reference"]:
        sampler, plain = (Sampler(Head(problem.weight), backend=backend, shadow=shadow) for shadow in (True, False))
        assert (sampler.shadow, plain.shadow) == (True, False)
        one = {name: values[:1] for name, values in problem.keys.items() if not isinstance(values, int)}
        keys = {**problem.keys, **one}
        for params, rows in [({}, 0), ({"top_p": 0.9}, 1), ({}, 0)]:
            assert sampler(problem.hidden[:1], **keys, **params) == plain(problem.hidden[:1], **keys, **params)
            assert (sampler.fallback_rows, plain.fallback_rows) == (rows, 0)


@pytest.mark.parametrize("variant", ["grouped:64", "online:64", "sharded:3:log-mass"])
def test_variants_exact_in_distribution_draw_the_tokens_of_the_reference(problem, variant):
    of_backend = {}
    for backend in ["cpu", "reference"]:
        sampler = Sampler(Head(problem.weight), variant=variant, backend=backend)
        assert not sampler.is_pathwise
        of_backend[backend] = sampler(problem.hidden, **problem.keys)
    assert numpy.array_equal(of_backend["cpu"], of_backend["reference"])


def test_heads_logits_and_the_reference_draw_the_same_tokens(problem):
    head = Head(problem.weight)
    params = {"temperature": [0.5, 1, 2, 0], "top_k": [0, 10, 0, 0], "top_p": [1, 1, 0.7, 1], **problem.keys}
    tokens = Sampler(head)(problem.hidden, **params)
    assert numpy.array_equal(from_logits(problem.logits, **params), tokens)
    assert numpy.array_equal(reference(head, problem.hidden, **params), tokens)
    assert tokens[3] == numpy.argmax(problem.logits[3])


def test_shards_of_a_vocabulary_draw_as_the_whole(problem):
    """Heads with `first_token` draw their tokens' part; the largest score of the parts is the whole's draw."""
    parts = []
    for start, end in [(0, 300), (300, 1000)]:
        head = Head(problem.weight[start:end], vocab_size=1000, first_token=start)
        parts.append(Sampler(head).sample(problem.hidden, SamplingParams(), **problem.keys))
    best = [max(rows, key=lambda row: row.score).token for rows in zip(*parts)]
    assert best == problem.argmax_with_noise().tolist()


@pytest.mark.parametrize("flags", [[], ["--top-k", "20", "--temperature", "0.7"], ["--soft-cap", "15", "--scale", "0.5"]])
def test_tokens_are_those_of_the_command(problem, command, tmp_path, flags):
    weight, hidden = tmp_path / "weight.npy", tmp_path / "hidden.npy"
    numpy.save(weight, problem.weight)
    numpy.save(hidden, problem.hidden)
    seeds = ",".join(map(str, problem.seeds))
    call = [command, "sample", "--weight", weight, "--hidden", hidden, "--seeds", seeds, "--position", "9"]
    output = subprocess.run([*call, "--format", "json", *flags], capture_output=True, text=True, check=True).stdout
    values = {name: float(value) for name, value in zip(flags[::2], flags[1::2])}
    head = Head(problem.weight, soft_cap=values.get("--soft-cap"), scale=values.get("--scale", 1.0))
    params = SamplingParams(top_k=int(values.get("--top-k", 0)), temperature=values.get("--temperature", 1.0))
    rows = Sampler(head).sample(problem.hidden, params, seed=problem.seeds, position=9)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["tokens"] for line in lines] == [[row.token] for row in rows]
    assert [numpy.float32(line["scores"][0]) for line in lines] == [numpy.float32(row.score) for row in rows]
