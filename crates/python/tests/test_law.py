"""Tokens have the probabilities of the softmax, with and without filters. Each law rejects a wrong law."""

import numpy
import pytest

from flash_sampling import Head, Sampler, from_logits

VOCAB, ROWS, CALLS = 200, 256, 200
LOGITS = numpy.linspace(-3, 2, VOCAB, dtype=numpy.float32)


def softmax(logits):
    weights = numpy.exp(logits.astype(numpy.float64) - logits.max())
    return weights / weights.sum()


def frequencies(draw):
    """The number of draws of each token, over rows and calls."""
    counts = numpy.zeros(VOCAB, dtype=numpy.int64)
    for position in range(CALLS):
        counts += numpy.bincount(draw(seed=range(ROWS), position=position), minlength=VOCAB)
    return counts


def is_law_of(counts, law):
    """Pearson's test at six deviations: a false alarm has a probability below 1e-8. Seeds are fixed, so no test is random."""
    assert counts.sum() == ROWS * CALLS
    if counts[law == 0].any():
        return False
    expected = law[law > 0] * counts.sum()
    statistic = ((counts[law > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    return statistic < freedom + 6 * (2 * freedom) ** 0.5 + 6


def head_draw(**options):
    sampler = Sampler(Head(LOGITS.reshape(VOCAB, 1)), ROWS, **options)
    hidden = numpy.ones((ROWS, 1), dtype=numpy.float32)
    return lambda **params: sampler(hidden, **params)


def logits_draw():
    logits = numpy.tile(LOGITS, (ROWS, 1))
    return lambda **params: from_logits(logits, **params)


DRAWS = {
    "tiled": head_draw,
    "grouped": lambda: head_draw(variant="grouped:64"),
    "online": lambda: head_draw(variant="online:64"),
    "sharded by log-mass": lambda: head_draw(variant="sharded:3:log-mass"),
    "logits": logits_draw,
}


@pytest.mark.parametrize("name", DRAWS)
def test_frequencies_are_those_of_the_softmax(name):
    counts = frequencies(DRAWS[name]())
    assert is_law_of(counts, softmax(LOGITS))
    # The negative controls: a temperature that is 10% off, and a missing token.
    assert not is_law_of(counts, softmax(LOGITS / 1.1))
    missing = softmax(LOGITS).copy()
    missing[100] = 0
    assert not is_law_of(counts, missing / missing.sum())


@pytest.mark.parametrize("name", ["tiled", "logits"])
@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 5}, lambda p: numpy.sort(p)[::-1][:5].min()),
        ({"min_p": 0.1}, lambda p: 0.1 * p.max()),
        ({"top_p": 0.8}, lambda p: numpy.sort(p)[::-1][numpy.searchsorted(numpy.cumsum(numpy.sort(p)[::-1]), 0.8)]),
    ],
    ids=["top_k", "min_p", "top_p"],
)
def test_filters_keep_the_law_of_the_kept_tokens(name, params, kept):
    draw = DRAWS[name]()
    counts = frequencies(lambda **keys: draw(**keys, **params))
    law = softmax(LOGITS)
    filtered = numpy.where(law >= kept(law), law, 0)
    assert is_law_of(counts, filtered / filtered.sum())
    assert not is_law_of(counts, law)
