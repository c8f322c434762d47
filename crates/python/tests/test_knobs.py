"""The parameters of requests: each has its effect, with the names of vLLM."""

import copy
import math
import pickle

import grammars
import numpy
import pytest
from conftest import Problem

from flash_sampling import Head, History, Sampler, SamplingParams


@pytest.fixture
def sampler(problem):
    return Sampler(Head(problem.weight), max_draws=8, max_logprobs=1000)


def softmax(logits):
    weights = numpy.exp(logits.astype(numpy.float64) - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("shared", [False, True], ids=["one mask a row", "one mask"])
def test_masks_and_allowed_tokens_both_restrict(problem, sampler, shared):
    numbers = numpy.random.default_rng(5)
    mask = numbers.integers(0, 2**32, (4, 32), dtype=numpy.uint32)
    mask = mask[0] if shared else mask
    allowed = [numbers.permutation(1000)[:400].tolist() for _ in range(3)]
    params = [*(SamplingParams(allowed_token_ids=tokens) for tokens in allowed), SamplingParams()]
    rows = sampler.sample(problem.hidden, params, mask=mask, **problem.keys)
    both = numpy.broadcast_to(mask, (4, 32)).copy()
    for row, tokens in enumerate(allowed):
        bits = numpy.zeros(32, dtype=numpy.uint32)
        for token in tokens:
            bits[token // 32] |= numpy.uint32(1 << token % 32)
        both[row] &= bits
    assert [row.token for row in rows] == sampler(problem.hidden, mask=both, **problem.keys).tolist()


@pytest.mark.parametrize("engine", grammars.ENGINES)
def test_the_bitmask_of_a_grammar_engine_is_a_mask(engine):
    """The words of the engine, unchanged. The definition selects the same tokens by booleans."""
    mask, allowed = grammars.bitmask(engine)
    rows, vocab = allowed.shape
    problem, of_other_texts = Problem(rows, vocab), mask[[*range(1, rows), 0]]
    sampler, differ = Sampler(Head(problem.weight)), 0
    problem.logits = numpy.where(allowed, problem.logits, numpy.float32(-numpy.inf))
    for position in range(40):
        problem.positions = [position] * rows
        keys = {"seed": problem.seeds, "position": problem.positions}
        want = problem.argmax_with_noise()
        assert numpy.array_equal(sampler(problem.hidden, mask=mask, **keys), want)
        # The negative control: each row has the mask of another text.
        differ += (sampler(problem.hidden, mask=of_other_texts, **keys) != want).sum()
    assert differ > 20 * rows


def test_log_probabilities_are_those_of_the_softmax(problem, sampler):
    params = SamplingParams(temperature=2.0, logprobs=3, logprob_token_ids=[5, 999], ranks=True)
    for row, logits in zip(sampler.sample(problem.hidden, params, **problem.keys), problem.logits):
        law = softmax(logits / 2)
        assert repr(row) == f"RowSample(tokens=[{row.token}], logprobs=[{row.logprob!r}])"
        assert math.isclose(row.logprob, math.log(law[row.token]), abs_tol=1e-5)
        order = numpy.argsort(-law, kind="stable")
        assert [token for token, _ in row.top] == order[:3].tolist() and order[row.rank - 1] == row.token
        assert [token for token, _ in row.token_logprobs] == [5, 999]
        for token, logprob in [*row.top, *row.token_logprobs]:
            assert math.isclose(logprob, math.log(law[token]), abs_tol=1e-5)
    raw = SamplingParams(temperature=2.0, logprobs=-1, logprobs_mode="raw_logprobs")
    [row, *_] = sampler.sample(problem.hidden, raw, **problem.keys)
    assert len(row.top) == 1000 and math.isclose(sum(math.exp(logprob) for _, logprob in row.top), 1, abs_tol=1e-5)
    assert math.isclose(row.logprob, math.log(softmax(problem.logits[0])[row.token]), abs_tol=1e-5)


def test_kept_tokens_as_a_mask_give_the_same_draw(problem, sampler):
    rows = sampler.sample(problem.hidden, SamplingParams(top_p=0.6, kept=True), **problem.keys)
    mask = numpy.stack([row.kept.mask for row in rows])
    assert mask.dtype == numpy.int32 and mask.shape == (4, 32)
    assert sampler(problem.hidden, mask=mask, **problem.keys).tolist() == [row.token for row in rows]
    for row, logits in zip(rows, problem.logits):
        assert len(row.kept.token_ids) == row.kept.count and row.token in row.kept.token_ids
        law = softmax(logits)[row.kept.token_ids]
        assert law.sum() >= 0.6 > law.sum() - law.min()


def test_the_length_of_the_history_is_the_position(problem, sampler):
    histories = [History(range(length)) for length in (3, 1, 4, 1)]
    rows = sampler.sample(problem.hidden, SamplingParams(), histories, seed=problem.seeds)
    tokens = sampler(problem.hidden, seed=problem.seeds, position=[3, 1, 4, 1])
    assert [row.token for row in rows] == tokens.tolist()
    histories[0].push(rows[0].token)
    assert len(histories[0]) == 4 and histories[0].output == [rows[0].token]
    assert histories[0].tokens == [0, 1, 2, rows[0].token]


def test_a_request_has_its_own_seed(problem, sampler):
    params = [SamplingParams(seed=seed) for seed in problem.seeds]
    rows = sampler.sample(problem.hidden, params, position=problem.positions)
    assert [row.token for row in rows] == problem.argmax_with_noise().tolist()


def test_parameters_read_back():
    params = SamplingParams(temperature=0.5, logit_bias={3: float("-inf"), 7: 1}, seed=-1, top_k=-1, stop=[], logprobs=2)
    assert (params.temperature, params.logit_bias, params.seed, params.top_k) == (0.5, {3: -math.inf, 7: 1.0}, None, -1)
    assert params == SamplingParams(**params.to_dict()) and params != SamplingParams()
    assert copy.copy(params) == params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))
    assert repr(SamplingParams(top_p=0.5, seed=3)) == "SamplingParams(seed=3, top_p=0.5)"
    assert repr(SamplingParams(logprobs=-1, xtc_threshold=0.9)) == "SamplingParams(logprobs=-1, xtc_threshold=0.9)"
    every = SamplingParams(logprobs=-1, temperature=0.7, min_p=1e-40)
    assert every == SamplingParams(**every.to_dict()) and (every.logprobs, every.temperature) == (-1, 0.7)
    with pytest.raises(AttributeError, match="no parameter topp"):
        params.topp
