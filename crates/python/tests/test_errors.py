"""Bad input is an exception that names the row and the knob, and the other rows keep their results."""

import numpy
import pytest
from conftest import library

from flash_sampling import FlashSamplingError, Head, History, Sampler, SamplingParams, from_logits, noise, reference


@pytest.fixture
def sampler(problem):
    return Sampler(Head(problem.weight))


class Traced:
    """A stub of an array inside jax.jit, which has neither memory nor a device."""

    __module__, shape = "jax._src.interpreters.partial_eval", (4, 32)

    def __dlpack__(self, **options):
        raise AttributeError("no memory")

    def __dlpack_device__(self):
        raise AttributeError("no device")


def fails(call, match, row=None, knob=None):
    with pytest.raises(FlashSamplingError, match=match) as error:
        call()
    assert isinstance(error.value, ValueError)
    assert (error.value.row, error.value.knob) == (row, knob)
    return error.value


@pytest.mark.parametrize(
    ("params", "match", "knob"),
    [
        ({"temperature": [1, -1, 1, 1]}, "row 1: temperature is -1", "temperature"),
        ({"temperature": [1, float("nan"), 1, 1]}, "row 1: temperature is NaN", "temperature"),
        ({"top_p": [1, 0, 1, 1]}, "row 1: top_p is 0", "top_p"),
        ({"min_p": [0, 2, 0, 0]}, "row 1: min_p is 2", "min_p"),
        ({"top_k": [0, -2, 0, 0]}, r"row 1: top_k is -2, but must be -1 to 2\^31 - 1", "top_k"),
        ({"top_k": [0, 1.5, 0, 0]}, "row 1: top_k is 1.5, but must be an integer", "top_k"),
        ({"top_k": [0, 2**40, 0, 0]}, "row 1: top_k is 1099511627776", "top_k"),
        ({"min_p": [0, 1e-60, 0, 0]}, "row 1: min_p is 1e-60, which rounds to 0", "min_p"),
        ({"seed": [0, -1, 0, 0]}, r"row 1: seed is -1, but must be 0 to 2\^64 - 1", "seed"),
        ({"seed": [0, 2**64, 0, 0]}, "row 1: seed is 18446744073709551616", "seed"),
        ({"position": [0, 2**56, 0, 0]}, "row 1: position is 72057594037927936", "position"),
        ({"mask": numpy.array([[-1] * 32, [0] * 32, [-1] * 32, [-1] * 32], dtype="int32")}, "row 1: no token", None),
    ],
    ids=str,
)
def test_a_bad_parameter_of_a_row_names_row_and_knob(problem, sampler, params, match, knob):
    fails(lambda: sampler(problem.hidden, **{**problem.keys, **params}), match, 1, knob)


def test_the_other_rows_keep_their_tokens(problem, sampler):
    out = numpy.zeros(4, dtype=numpy.int64)
    call = lambda: sampler(problem.hidden, top_p=[1, 0, 1, 2], out=out, **problem.keys)
    error = fails(call, "row 1: top_p is 0", 1, "top_p")
    want = problem.argmax_with_noise()
    want[[1, 3]] = -1
    assert error.results is out and numpy.array_equal(out, want)
    assert {row: (one.row, one.knob) for row, one in error.errors.items()} == {1: (1, "top_p"), 3: (3, "top_p")}
    # The next call is unaffected.
    assert numpy.array_equal(sampler(problem.hidden, **problem.keys), problem.argmax_with_noise())


def test_the_other_rows_keep_their_results(problem, sampler):
    problem.hidden[2, 0] = numpy.nan
    params = [SamplingParams(), SamplingParams(n=2), SamplingParams(), SamplingParams(logprobs=1)]
    error = fails(lambda: sampler.sample(problem.hidden, params, **problem.keys), "n is 2, but .* max_draws=1", 1, "n")
    assert [result and result.token for result in error.results[1:]] == [None, None, None]
    assert error.results[0].token == problem.argmax_with_noise()[0]
    assert str(error.errors[2]).startswith("row 2: the logit of token 0 is NaN") and error.errors[2].row == 2
    assert str(error.errors[3]) == "row 3: logprobs needs Sampler(max_logprobs=...), which is None"


@pytest.mark.parametrize(
    ("name", "values"),
    [("top_k", [0, -2, 0, 2**40]), ("seed", [100, -1, 102, 2**64]), ("position", [0, -1, 6, 2**56]), ("min_p", [0, 2, 0, 1e-60])],
)
def test_the_other_rows_keep_their_tokens_beside_numbers_out_of_range(problem, sampler, name, values):
    error = fails(lambda: sampler(problem.hidden, **{**problem.keys, name: values}), f"row 1: {name} is", 1, name)
    assert {row: (one.row, one.knob) for row, one in error.errors.items()} == {1: (1, name), 3: (3, name)}
    want = problem.argmax_with_noise()
    want[[1, 3]] = -1
    assert error.results.tolist() == want.tolist()


def test_the_other_rows_keep_their_results_beside_unknown_tokens(problem, sampler):
    params = [SamplingParams(), SamplingParams(allowed_token_ids=[1000]), SamplingParams(), SamplingParams(seed=1)]
    match = "row 1: allowed_token_ids names token 1000"
    error = fails(lambda: sampler.sample(problem.hidden, params, **problem.keys), match, 1, "allowed_token_ids")
    want = problem.argmax_with_noise()
    assert [result and result.token for result in error.results] == [want[0], None, want[2], None]
    assert str(error.errors[3]) == "row 3: the row's SamplingParams has a seed, so the argument seed must be None"


def test_bad_rows_of_logits(problem):
    problem.logits[1, 30] = numpy.inf
    problem.logits[3, :] = -numpy.inf
    error = fails(lambda: from_logits(problem.logits, **problem.keys), r"row 1: the logit of token 30 is \+inf", 1)
    assert str(error.errors[3]).startswith("row 3: no token can be drawn") and (error.results >= 0).tolist() == [1, 0, 1, 0]


def test_one_seed_and_one_position_for_many_rows_are_refused(problem, sampler):
    params = SamplingParams(seed=1)
    calls = [
        ([1, 2, 3], lambda: sampler(problem.hidden, seed=1, position=1)),
        ([3], lambda: sampler(problem.hidden, seed=1, position=[5, 6, 7, 5])),
        ([1, 2, 3], lambda: sampler.sample(problem.hidden, params, position=1)),
        ([1, 2, 3], lambda: sampler.sample(problem.hidden, params, position=[1] * 4)),
        ([1, 2, 3], lambda: sampler.sample(problem.hidden, params, [History([5])] * 4)),
        ([1, 2, 3], lambda: sampler.sample(problem.hidden, [SamplingParams()] * 4, seed=1, position=1)),
        ([3], lambda: sampler.sample(problem.hidden, params, position=1, first_draw=[0, 1, 2, 0])),
    ]
    for rows, call in calls:
        text = f"row {rows[0]}: the row has the seed and the position of row 0, so it would have the same noise"
        error = fails(call, text, rows[0], "seed")
        assert list(error.errors) == rows and len(error.results) == 4
    sampler.sample(problem.hidden, params, position=1, first_draw=range(4))
    sampler.sample(problem.hidden, [params] * 4, position=1)
    sampler(problem.hidden, seed=1, position=range(4))
    sampler(problem.hidden[:1], seed=1, position=1)
    sampler(problem.hidden, seed=1, position=1, temperature=0)


@pytest.mark.parametrize(
    ("call", "match", "knob"),
    [
        (lambda s, p: s(p.hidden, seed=[1, 2], position=0), "seed has 2 values for 4 rows", "seed"),
        (lambda s, p: s(p.hidden, seed=[[1] * 4], position=0), None, None),
        (lambda s, p: s(p.hidden, seed=numpy.ones((4, 1), int), position=0), r"seed has shape \[4, 1\]", "seed"),
        (lambda s, p: s(p.hidden[:, :31], **p.keys), "31 columns, but the head has hidden size 32", "hidden"),
        (lambda s, p: s(p.hidden[0], **p.keys), r"hidden has shape \[32\], but must have two", "hidden"),
        (lambda s, p: s(p.hidden.T, **p.keys), "make it contiguous", "hidden"),
        (lambda s, p: s(p.hidden[::-1], **p.keys), "make it contiguous", "hidden"),
        (lambda s, p: s(p.hidden.astype("float64"), **p.keys), "hidden has elements of float64", "hidden"),
        (lambda s, p: s(p.hidden.astype(">f4"), **p.keys), "byte order", None),
        (lambda s, p: s(p.hidden.tolist(), **p.keys), "hidden must be a tensor", None),
        (lambda s, p: s(p.hidden, temperature="hot", **p.keys), "temperature must be a number", None),
        (lambda s, p: s(p.hidden, mask=numpy.ones((4, 31), "int32"), **p.keys), r"must be \[4, 32\]", "mask"),
        (lambda s, p: s(p.hidden, mask=numpy.ones((3, 32), "int32"), **p.keys), r"must be \[4, 32\]", "mask"),
        (lambda s, p: s(p.hidden, mask=numpy.ones((4, 1000), bool), **p.keys), "words of int32", "mask"),
        (lambda s, p: s(numpy.ones((300, 32), "float32"), seed=range(300), position=0), "max_rows=256", "max_rows"),
        (lambda s, p: s.sample(p.hidden, [SamplingParams()], **p.keys), "params has 1 values for 4", "params"),
        (lambda s, p: s.sample(p.hidden, {"seed": 1}, **p.keys), "params must be a SamplingParams, or a list", None),
        (lambda s, p: s.sample(p.hidden, SamplingParams(), [History()], **p.keys), "histories has 1 ", "histories"),
        (lambda s, p: s.sample(p.hidden, SamplingParams(), seed=p.seeds), "position must be given", "position"),
        (lambda s, p: from_logits(p.hidden[0], **p.keys), "two dimensions", "logits"),
        (lambda s, p: Sampler.for_logits(999)(p.logits, **p.keys), "1000 columns, but .* vocab_size=999", "logits"),
        (lambda s, p: from_logits(p.hidden.tolist(), **p.keys), "logits must be a tensor", None),
        (lambda s, p: reference(s, p.hidden, **p.keys), None, None),
        (lambda s, p: noise(0, 2**56, 0, [1]), "position is", "position"),
        (lambda s, p: noise(0, 0, 0, [2**32]), "tokens has 4294967296", "tokens"),
        (lambda s, p: noise(-1, 0, 0, [1]), "seed is -1, but must be at least 0", "seed"),
        (lambda s, p: noise(0, 0, 2**32, [1]), r"draw is 4294967296, but must be below 2\^32", "draw"),
        (lambda s, p: noise(0, 0, 0, {1}), "tokens must be a sequence or tensor, not set", None),
        (lambda s, p: noise(0, 0, 0, 1), "tokens must be a sequence or tensor of integers, not int", None),
        (lambda s, p: History([1]).push(-1), "token is -1, but must be at least 0", "token"),
        (lambda s, p: s(p.hidden, seed={1, 2, 3, 4}, position=0), "seed must be a sequence or tensor, not set", None),
        (lambda s, p: s(p.hidden, temperature=dict.fromkeys(range(4), 1.0), **p.keys), "temperature must be .* not dict", None),
        (lambda s, p: s(p.hidden, out=[0] * 4, **p.keys), "out must be a tensor, not list", None),
        (lambda s, p: s(p.hidden, out=numpy.broadcast_to(0, 4), **p.keys), "out cannot be written: .* read-only", "out"),
        (lambda s, p: Sampler(p.weight), r"head must be a Head, not ndarray: use Sampler\(Head\(weight\)\)", None),
        (lambda s, p: s.sample(p.hidden, SamplingParams(seed=1), History([1])), "histories must be a list", None),
        (lambda s, p: s(Traced(), **p.keys), "hidden cannot be read: no device; inside jax.jit, arrays have no values", "hidden"),
        (lambda s, p: s(p.hidden, seed=Traced(), position=0), "seed cannot be read: no device; inside jax.jit", "seed"),
        (lambda s, p: from_logits(Traced(), **p.keys), "logits cannot be read: no device; inside jax.jit", "logits"),
    ],
)
def test_wrong_arguments_are_named(problem, sampler, call, match, knob):
    with pytest.raises((FlashSamplingError, TypeError), match=match) as error:
        call(sampler, problem)
    assert getattr(error.value, "knob", None) == knob


def test_a_row_without_a_seed_is_named(problem, sampler):
    params = [SamplingParams(seed=1), SamplingParams()] * 2
    fails(lambda: sampler.sample(problem.hidden, params, position=0), "row 1: neither", 1, "seed")


@pytest.mark.parametrize(
    ("options", "match", "knob"),
    [
        ({"vocab_size": 0}, "vocabulary of 0 tokens", "vocab_size"),
        ({"scale": -1}, "scale is -1.0, but must be finite and above 0", "scale"),
        ({"soft_cap": float("inf")}, "soft_cap is inf, but must be finite and above 0", "soft_cap"),
        ({"bias": numpy.zeros(999)}, "bias has 999 values for 1000 rows", "bias"),
        ({"bias": numpy.full(1000, numpy.nan)}, "the bias of weight row 0 is NaN", "bias"),
        ({"first_token": 2**32}, "2", "vocab_size"),
        ({"first_token": -1}, "first_token is -1, but must be at least 0", "first_token"),
        ({"vocab_size": 2**64}, r"vocab_size is 18446744073709551616, but must be below 2\^64", "vocab_size"),
    ],
    ids=str,
)
def test_wrong_heads_are_refused(problem, options, match, knob):
    fails(lambda: Head(problem.weight, **options), match, knob=knob)


@pytest.mark.parametrize(
    ("options", "match", "knob"),
    [
        ({"variant": "tild"}, "'tild' is no variant", "variant"),
        ({"backend": "tpu"}, "'tpu' is no backend", "backend"),
        ({"threads": 0}, "threads is 0, but must be at least 1", "threads"),
        ({"max_rows": 0}, "max_rows is 0, but must be at least 1", "max_rows"),
        ({"max_draws": 0}, "max_draws is 0, but must be at least 1", "max_draws"),
        ({"max_draws": 2**32}, r"max_draws is 4294967296, but must be below 2\^32", "max_draws"),
        ({"max_rows": -1}, "max_rows is -1, but must be at least 1", "max_rows"),
        ({"max_logprobs": -1}, "max_logprobs is -1, but must be at least 0", "max_logprobs"),
        ({"threads": -1}, "threads is -1, but must be at least 1", "threads"),
        ({"backend": "cpu:bogus"}, "the instruction sets are portable, avx2, avx512, avx512bf16, amx, neon", "backend"),
        ({"backend": "reference", "threads": 2}, "threads must be None", "threads"),
        ({"variant": "online:512", "canonical": True}, "canonical", None),
    ],
    ids=str,
)
def test_wrong_samplers_are_refused(problem, options, match, knob):
    fails(lambda: Sampler(Head(problem.weight), **options), match, knob=knob)


@pytest.mark.parametrize(
    ("params", "match", "knob"),
    [
        ({"temprature": 1}, "unknown field `temprature`", "temprature"),
        ({"top_p": 0}, "top_p is 0.0, but must be above 0", "top_p"),
        ({"top_k": -2}, "top_k is -2", "top_k"),
        ({"n": 0}, "n is 0, but must be at least 1", "n"),
        ({"n": -1}, r"n is -1, but must be an integer from 0 to 2\^32 - 1", "n"),
        ({"temperature": "hot"}, "temperature is 'hot', but must be a number", "temperature"),
        ({"max_tokens": 16}, "max_tokens does not affect a draw: it must be None$", "max_tokens"),
        ({"allowed_token_ids": []}, "must name a token", "allowed_token_ids"),
        ({"logit_bias": {3: float("nan")}}, "NaN", "logit_bias"),
        ({"seed": -2}, "seed is -2, but must be an integer from -1", "seed"),
        ({"seed": 2**64}, r"seed is 18446744073709551616, but must be an integer from -1 to 2\^64 - 1", "seed"),
        ({"top_k": 2.5}, r"top_k is 2.5, but must be an integer from -1 to 2\^31 - 1", "top_k"),
        ({"n": True}, "n is True, but must be an integer", "n"),
        ({"kept": "yes"}, "kept is 'yes', but must be True or False", "kept"),
        ({"detokenize": False}, "detokenize does not affect a draw: it must be None or True", "detokenize"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias has the token -1, but must have token ids: an integer from 0", "logit_bias"),
        ({"logit_bias": 3}, "logit_bias is 3, but must be a dict", "logit_bias"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5, but must be a list of token ids", "stop_token_ids"),
        ({"stop_token_ids": [5, -100]}, "stop_token_ids has the token -100", "stop_token_ids"),
        ({"prompt_token_ids": [5]}, "give Sampler.sample a History", "prompt_token_ids"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused_at_once(params, match, knob):
    fails(lambda: SamplingParams(**params), match, knob=knob)


def test_tokens_beyond_the_vocabulary_name_the_row(problem, sampler):
    params = [SamplingParams(), SamplingParams(banned_token_ids=[1000]), SamplingParams(), SamplingParams()]
    match = "row 1: banned_token_ids names token 1000, but the vocabulary has size 1000"
    fails(lambda: sampler.sample(problem.hidden, params, **problem.keys), match, 1, "banned_token_ids")


def test_unsupported_knobs_are_refused_by_name(problem):
    online = Sampler(Head(problem.weight), variant="online:64")
    assert not online.is_pathwise
    fails(lambda: online(problem.hidden, top_k=3, **problem.keys), "row 0: top_k is not supported", 0, "top_k")


def test_calls_that_do_not_wait_need_a_gpu(problem):
    sampler, out = Sampler(Head(problem.weight)), numpy.zeros(4, dtype=numpy.int64)
    keys = {name: numpy.array(values, dtype=numpy.int64) for name, values in problem.keys.items()}
    with pytest.raises(FlashSamplingError, match="hidden must be on a GPU"):
        sampler.enqueue(problem.hidden, out, **keys)
    with pytest.raises(FlashSamplingError, match="out must have 4 contiguous elements of int64"):
        sampler.enqueue(problem.hidden, out[:3], **keys)
    out.flags.writeable = False
    with pytest.raises(FlashSamplingError, match="out is read-only"):
        sampler.enqueue(problem.hidden, out, **keys)
    out.flags.writeable = True
    with pytest.raises(FlashSamplingError, match=r"must be \[4, 32\] of int32"):
        sampler.enqueue(problem.hidden, out, mask=numpy.zeros((4, 31), dtype=numpy.int32), **keys)


def test_tensors_of_log_probabilities_are_checked(problem):
    sampler, out = Sampler(Head(problem.weight)), numpy.zeros(4, dtype=numpy.int64)
    keys = {name: numpy.array(values, dtype=numpy.int64) for name, values in problem.keys.items()}
    for name, value, fault in [
        ("logprobs", numpy.zeros(4), "4 contiguous elements of float32"),
        ("ranks", numpy.zeros(3, dtype=numpy.int32), "4 contiguous elements of int32"),
        ("log_z", numpy.zeros(4, dtype=numpy.float32), "4 contiguous elements of float64"),
        ("top_tokens", numpy.zeros(4, dtype=numpy.int32), r"top_tokens has shape \[4\], but must be \[4, n\]"),
        ("top_tokens", numpy.zeros((4, 5)), "4 x 5 contiguous elements of int32"),
        ("top_logprobs", numpy.zeros((5, 4), dtype=numpy.float32).T, "4 x 5 contiguous elements of float32"),
        ("logprobs_mode", "raw", "must be processed_logprobs or raw_logprobs"),
        ("kept_begin", numpy.zeros(4, dtype=numpy.int64), "5 contiguous elements of int64"),
        ("kept_tokens", numpy.zeros((2, 2), dtype=numpy.int32), "2 contiguous elements of int32"),
    ]:
        with pytest.raises(FlashSamplingError, match=fault) as error:
            sampler.enqueue(problem.hidden, out, **{**keys, name: value})
        assert error.value.knob == name
    results = {
        "logprobs": numpy.zeros(4, dtype=numpy.float32),
        "top_tokens": numpy.zeros((4, 5), dtype=numpy.int32),
        "top_logprobs": numpy.zeros((4, 5), dtype=numpy.float32),
        "kept_begin": numpy.zeros(5, dtype=numpy.int64),
        "kept_tokens": numpy.zeros(9, dtype=numpy.int32),
    }
    with pytest.raises(FlashSamplingError, match="hidden must be on a GPU"):
        sampler.enqueue(problem.hidden, out, **keys, **results)
    results["top_logprobs"] = numpy.zeros((4, 6), dtype=numpy.float32)
    with pytest.raises(FlashSamplingError, match="top_logprobs must have 4 x 5 contiguous elements"):
        sampler.enqueue(problem.hidden, out, **keys, **results)


def test_lists_of_tokens_are_checked(problem):
    sampler, out = Sampler(Head(problem.weight)), numpy.zeros(4, dtype=numpy.int64)
    keys = {name: numpy.array(values, dtype=numpy.int64) for name, values in problem.keys.items()}
    begin, ends = numpy.zeros(5, dtype=numpy.int64), numpy.zeros(4, dtype=numpy.int64)
    tokens, values = numpy.zeros(7, dtype=numpy.int32), numpy.zeros(7, dtype=numpy.float32)
    for given, name, fault in [
        ({"repetition_penalty": numpy.ones(4)}, "repetition_penalty", "4 contiguous elements of float32"),
        ({"min_tokens": numpy.ones(4)}, "min_tokens", "4 contiguous elements of int32"),
        ({"prompt_tokens": tokens}, "prompt_begin", "prompt_tokens needs prompt_begin"),
        ({"output_begin": begin}, "output_tokens", "output_begin needs output_tokens"),
        ({"banned_end": ends}, "banned_tokens", "banned_end needs banned_tokens"),
        ({"stop_begin": begin[:4], "stop_tokens": tokens}, "stop_begin", "5 contiguous elements of int64"),
        ({"stop_begin": begin, "stop_end": ends, "stop_tokens": tokens}, "stop_begin", "4 contiguous elements of int64"),
        ({"prompt_begin": begin, "prompt_tokens": tokens.astype(numpy.int64)}, "prompt_tokens", "7 contiguous elements of int32"),
        ({"bias_begin": begin, "bias_tokens": tokens}, "bias_values", "must be given together"),
        ({"bias_values": values}, "bias_values", "must be given together"),
        ({"bias_begin": begin, "bias_tokens": tokens, "bias_values": values[1:]}, "bias_values", "7 contiguous elements of float32"),
    ]:
        with pytest.raises(FlashSamplingError, match=fault) as error:
            sampler.enqueue(problem.hidden, out, **keys, **given)
        assert error.value.knob == name
    given = {"prompt_begin": ends, "prompt_end": ends, "bias_begin": begin, "bias_values": values}
    with pytest.raises(FlashSamplingError, match="hidden must be on a GPU"):
        sampler.enqueue(problem.hidden, out, prompt_tokens=tokens, bias_tokens=tokens, **keys, **given)
    with pytest.raises(TypeError, match="enqueue.. needs the keyword argument position"):
        sampler.enqueue(problem.hidden, out, seed=keys["seed"])
    with pytest.raises(TypeError, match="enqueue.. has no keyword argument bans"):
        sampler.enqueue(problem.hidden, out, bans=tokens, **keys)


def test_adjusted_tokens_are_planned_on_a_gpu_alone(problem):
    for make in [lambda **given: Sampler(Head(problem.weight), **given), lambda **given: Sampler.for_logits(1000, **given)]:
        with pytest.raises(FlashSamplingError, match="max_adjusted must be None for inputs on the CPU") as error:
            make(max_adjusted=3)
        assert error.value.knob == "max_adjusted"


def test_tensors_without_memory_are_named(problem, sampler):
    torch = library("torch")
    weight, seeds = torch.from_numpy(problem.weight), torch.tensor(problem.seeds)
    fails(lambda: Head(weight.to("meta")), "weight cannot be read: .*meta", knob="weight")
    fails(lambda: Head(weight.to_sparse()), "weight cannot be read: .*layout", knob="weight")
    fails(lambda: from_logits(weight.to("meta"), seed=1, position=0), "logits cannot be read: .*meta", knob="logits")
    fails(lambda: sampler(problem.hidden, seed=seeds.to("meta"), position=0), "seed cannot be read: .*meta", knob="seed")


def test_given_tokens_beyond_the_vocabulary_name_the_row(problem):
    torch = library("torch")
    from flash_sampling.torch import token_logprobs

    sampler, hidden = Sampler(Head(problem.weight), max_rows=2, max_logprobs=0), torch.from_numpy(problem.hidden)
    for token in (-100, 1000):
        tokens = torch.tensor([[1, 2], [3, 4], [5, 6], [7, token]])
        fails(lambda: token_logprobs(sampler, hidden, tokens), f"row 3: tokens has {token}, but the vocabulary", 3, "tokens")
