"""Tensors on a GPU draw the tokens of the CPU, on the caller's stream."""

from pathlib import Path

import numpy
import pytest
from conftest import Problem, jax_array, library

from flash_sampling import FlashSamplingError, Head, Sampler, SamplingParams, from_logits

torch = library("torch")
pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tokens_are_those_of_the_cpu(dtype):
    problem = Problem(rows=64)
    weight, hidden = (torch.tensor(values, dtype=dtype, device="cuda") for values in (problem.weight, problem.hidden))
    tokens = Sampler(Head(weight))(hidden, **problem.keys)
    assert tokens.device == hidden.device and tokens.dtype == torch.int64
    assert numpy.array_equal(tokens.cpu(), problem.argmax_with_noise())


def test_parameters_and_masks_may_be_on_the_gpu(problem):
    hidden = torch.tensor(problem.hidden, device="cuda")
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    params = {"temperature": [0.5, 1, 2, 0], "top_k": [0, 10, 0, 0], "top_p": [1, 1, 0.7, 1], **problem.keys}
    on_gpu = {name: torch.tensor(values, device="cuda") for name, values in params.items()}
    mask = torch.full((4, 32), -2, dtype=torch.int32, device="cuda")
    want = Sampler(Head(problem.weight))(problem.hidden, mask=mask.cpu(), **params)
    assert numpy.array_equal(sampler(hidden, mask=mask, **on_gpu).cpu(), want)


def test_bias_soft_cap_scale_and_padding(problem):
    bias = numpy.arange(1000, dtype=numpy.float32) % 3
    options = {"soft_cap": 8.0, "scale": 2.0, "vocab_size": 900}
    want = Sampler(Head(problem.weight, bias=bias, **options))(problem.hidden, **problem.keys)
    head = Head(torch.tensor(problem.weight, device="cuda"), bias=torch.tensor(bias, device="cuda"), **options)
    assert numpy.array_equal(Sampler(head)(torch.tensor(problem.hidden, device="cuda"), **problem.keys).cpu(), want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(), (1000, 1), (8, 1), (1000, 2)], ids=str)
def test_weights_of_8_bits_draw_the_tokens_of_the_cpu(problem, dtype, shape):
    # Factors of two, so that no product rounds.
    scale = torch.tensor(2.0 ** numpy.random.default_rng(5).integers(-2, 1, shape), dtype=torch.float32)
    weight = torch.from_numpy(problem.weight).to(dtype)
    want = Sampler(Head(weight, weight_scale=scale))(problem.hidden, **problem.keys)
    hidden = torch.tensor(problem.hidden, device="cuda")
    on_gpu = Sampler(Head(weight.cuda(), weight_scale=scale.cuda()))
    copied = Sampler(Head(weight, weight_scale=scale), backend="cuda:0")
    assert numpy.array_equal(on_gpu(hidden, **problem.keys).cpu(), want)
    assert numpy.array_equal(on_gpu(hidden.bfloat16(), **problem.keys).cpu(), want)
    assert numpy.array_equal(copied(problem.hidden, **problem.keys), want)
    scale_of_cpu = Sampler(Head(weight.cuda(), weight_scale=scale if shape else scale.item()))
    assert numpy.array_equal(scale_of_cpu(hidden, **problem.keys).cpu(), want)
    expected = "weight_scale must be a number, a tensor on the CPU, or contiguous float32 on cuda:0"
    with pytest.raises(FlashSamplingError, match=expected):
        Head(weight.cuda(), weight_scale=scale.cuda().bfloat16())


def test_the_head_of_a_gguf_file_draws_the_tokens_of_the_cpu():
    head = Head.from_gguf(Path(__file__).parents[2] / "cli/tests/checkpoints/gguf/stories.gguf")
    hidden = numpy.random.default_rng(3).integers(-1, 2, (8, 128)).astype(numpy.float32)
    keys = {"seed": range(8), "position": 5}
    want = Sampler(head)(hidden, **keys)
    assert numpy.array_equal(Sampler(head, backend="cuda:0")(hidden, **keys), want)


def test_a_call_reads_what_the_current_stream_wrote(problem):
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    late = torch.tensor(problem.hidden, device="cuda")
    for stream in [torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()]:
        with torch.cuda.stream(stream):
            hidden = torch.full_like(late, float("nan"))
            torch.cuda._sleep(20_000_000)
            hidden.copy_(late)
            assert numpy.array_equal(sampler(hidden, **problem.keys).cpu(), problem.argmax_with_noise())


def test_results_and_errors_of_rows(problem):
    problem.hidden[2, 0] = numpy.nan
    hidden = torch.tensor(problem.hidden, device="cuda")
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")), max_logprobs=3)
    with pytest.raises(FlashSamplingError, match="row 2: the logit of token 0 is NaN") as error:
        sampler(hidden, **problem.keys)
    assert error.value.row == 2 and error.value.results.is_cuda and error.value.results[2] == -1
    rows = sampler.sample(hidden[:2], SamplingParams(logprobs=3), seed=problem.seeds[:2], position=problem.positions[:2])
    assert [row.token for row in rows] == error.value.results[:2].tolist() and len(rows[0].top) == 3


def test_devices_must_match(problem):
    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")))
    with pytest.raises(FlashSamplingError, match="hidden is on the CPU, but the sampler is on cuda:0"):
        sampler(problem.hidden, **problem.keys)
    with pytest.raises(FlashSamplingError, match="hidden is on cuda:0, but the sampler is on the CPU"):
        Sampler(Head(problem.weight))(torch.tensor(problem.hidden, device="cuda"), **problem.keys)
    with pytest.raises(FlashSamplingError, match="bias must be 1000 contiguous values of float32 on cuda:0"):
        Head(torch.tensor(problem.weight, device="cuda"), bias=numpy.zeros(1000, dtype=numpy.float32))


def test_torchs_current_device_stays(problem):
    last = torch.cuda.device_count() - 1
    weight = torch.tensor(problem.weight, device=f"cuda:{last}")
    torch.cuda.set_device(0)
    sampler = Sampler(Head(weight))
    tokens = sampler(torch.tensor(problem.hidden, device=weight.device), **problem.keys)
    del sampler
    assert torch.cuda.current_device() == 0 and tokens.device == weight.device
    assert torch.zeros(1, device="cuda").device.index == 0
    assert numpy.array_equal(tokens.cpu(), problem.argmax_with_noise())


def test_the_head_keeps_the_memory(problem):
    weight = torch.tensor(problem.weight, device="cuda")
    sampler = Sampler(Head(weight))
    del weight
    [torch.full((1000, 32), float("nan"), device="cuda") for _ in range(10)]  # would reuse freed memory
    tokens = sampler(torch.tensor(problem.hidden, device="cuda"), **problem.keys)
    assert numpy.array_equal(tokens.cpu(), problem.argmax_with_noise())


def test_the_operator_compiles(problem):
    from flash_sampling.torch import operator

    draw = operator(Sampler(Head(torch.tensor(problem.weight, device="cuda"))))
    keys = {name: torch.tensor(values, device="cuda") for name, values in problem.keys.items()}
    compiled = torch.compile(lambda hidden, seed, position: draw(hidden + 0, seed=seed, position=position), fullgraph=True)
    assert numpy.array_equal(compiled(torch.tensor(problem.hidden, device="cuda"), **keys).cpu(), problem.argmax_with_noise())


def test_cupy_arrays(problem):
    cupy = library("cupy")
    tokens = Sampler(Head(cupy.asarray(problem.weight)))(cupy.asarray(problem.hidden), **problem.keys)
    assert isinstance(tokens, cupy.ndarray) and numpy.array_equal(tokens.get(), problem.argmax_with_noise())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_arrays(problem, dtype):
    on_gpu = lambda values, dtype=None: jax_array(values, dtype, kind="cuda")
    keys = {name: on_gpu(values) for name, values in problem.keys.items()}
    sampler = Sampler(Head(on_gpu(problem.weight, dtype)))
    tokens = sampler(on_gpu(problem.hidden, dtype), temperature=on_gpu([1.0] * 4), **keys)
    assert numpy.array_equal(tokens, problem.argmax_with_noise())
    # A head on the CPU takes parameters from a GPU, too.
    assert numpy.array_equal(Sampler(Head(problem.weight))(problem.hidden, **keys), tokens)


def test_log_probabilities_of_given_tokens(problem):
    from flash_sampling.torch import token_logprobs

    sampler = Sampler(Head(torch.tensor(problem.weight, device="cuda")), max_rows=3)
    tokens = torch.tensor([[5, 6], [999, 1000], [7, -1], [400, 401]], device="cuda")
    logprobs = torch.log_softmax(torch.from_numpy(problem.logits), 1)
    found = token_logprobs(sampler, torch.tensor(problem.hidden, device="cuda"), tokens).cpu()
    assert found[1, 1] == found[2, 1] == -torch.inf
    tokens[1, 1], tokens[2, 1], found[1, 1], found[2, 1] = 0, 0, logprobs[1, 0], logprobs[2, 0]
    assert torch.allclose(found, logprobs.gather(1, tokens.cpu()), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_on_a_gpu_draw_the_tokens_of_the_cpu(dtype):
    problem = Problem(rows=64)
    logits = torch.tensor(problem.logits, dtype=dtype)
    wide = torch.full((64, 1003), float("nan"), dtype=dtype, device="cuda")
    wide[:, 2:1002] = logits.cuda()
    apart = wide[:, 2:1002]  # with a stride, at another address
    params = {"top_k": [0, 10, 0, 3] * 16, "top_p": [1, 1, 0.7, 0.5] * 16, "min_p": [0.1, 0, 0, 0] * 16}
    sampler = Sampler.for_logits(1000, backend="cuda:0")
    for given in [{}, {"temperature": [0.5, 1, 2, 0] * 16}, params, {"mask": torch.full((64, 32), 0x5EEDBEE, dtype=torch.int32)}]:
        want = from_logits(logits, **problem.keys, **given)
        for on_gpu in [logits.cuda(), apart]:
            tokens = sampler(on_gpu, **problem.keys, **given)
            assert tokens.device == on_gpu.device and torch.equal(tokens.cpu(), want)
            assert torch.equal(from_logits(on_gpu, **problem.keys, **given), tokens)
    assert numpy.array_equal(sampler(apart, **problem.keys).cpu(), problem.argmax_with_noise())


def test_all_results_of_logits_on_a_gpu_are_those_of_the_cpu(problem):
    logits = torch.tensor(problem.logits)
    params = [SamplingParams(logprobs=2, top_p=top_p, kept=True, repetition_penalty=1.2) for top_p in [1.0, 0.9, 0.5, 0.2]]
    keys = {"seed": problem.seeds, "position": problem.positions}
    want = Sampler.for_logits(1000, max_logprobs=2).sample(logits, params, **keys)
    rows = Sampler.for_logits(1000, max_logprobs=2, backend="cuda:0").sample(logits.cuda(), params, **keys)
    for row, other in zip(rows, want, strict=True):
        assert (row.token, row.score, row.logprob, row.top) == (other.token, other.score, other.logprob, other.top)
        assert row.kept is None and other.kept is None or row.kept.token_ids == other.kept.token_ids


def test_a_shadow_changes_no_draw():
    torch.manual_seed(5)
    weight = torch.randn(32_000, 1024, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(96, 1024, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(32_000, device="cuda")
    seeds, out = torch.arange(96, device="cuda"), torch.empty(96, dtype=torch.int64, device="cuda")
    mask = torch.randint(-(2**31), 2**31, (96, 1000), dtype=torch.int32, device="cuda")
    plain = Sampler(Head(weight, bias, vocab_size=31_990, scale=0.5))
    shadowed = Sampler(Head(weight, bias, vocab_size=31_990, scale=0.5), shadow=True)
    assert (shadowed.shadow, plain.shadow) == (True, False)
    for rows in (1, 5, 33, 96):
        for params in [{}, {"temperature": 0.1}, {"temperature": 0}, {"mask": mask[:rows]}, {"top_k": 20}]:
            keys = {"seed": seeds[:rows], "position": 7}
            assert torch.equal(shadowed(hidden[:rows], **keys, **params), plain(hidden[:rows], **keys, **params)), params
        columns = {"seed": seeds[:rows], "position": seeds[:rows] + 3}
        call = lambda: shadowed.enqueue(hidden[:rows], out[:rows], **columns)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for _ in range(3):
            columns["position"] += 1
            graph.replay()
            assert torch.equal(out[:rows], plain(hidden[:rows], **columns))
    assert shadowed(hidden[:5], seed=seeds[:5], position=1).shape == (5,) and shadowed.fallback_rows == 0
    shadowed(hidden[:5], seed=seeds[:5], position=1, top_p=0.9)
    assert shadowed.fallback_rows == 5
    # The draws do read the shadow: after a change of the weight, which callers must not make, it selects other tokens.
    weight.neg_()
    keys = {"seed": seeds[:5], "position": 7}
    assert not torch.equal(shadowed(hidden[:5], **keys), plain(hidden[:5], **keys))


def test_a_shadow_that_the_gpu_would_not_read_is_refused():
    weight = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16)
    heads = {
        "the weight is neither bf16 nor f16": Head(weight.float()),
        "the weight's address or stride is not a multiple of 16 bytes": Head(weight[:, 1:]),
        "the head has a soft-cap": Head(weight, soft_cap=5.0),
        "the weight has numbers that are not finite, or too large": Head(weight * 1e35),
    }
    for reason, head in heads.items():
        with pytest.raises(FlashSamplingError, match=f"the shadow .* cannot be used: {reason}") as error:
            Sampler(head, shadow=True)
        assert error.value.knob == "shadow"


def test_logits_on_other_devices_and_of_other_shapes_are_errors(problem):
    sampler, logits = Sampler.for_logits(1000, 4, backend="cuda:0"), torch.tensor(problem.logits, device="cuda")
    with pytest.raises(FlashSamplingError, match="logits is on the CPU, but the sampler is on cuda:0"):
        sampler(problem.logits, **problem.keys)
    with pytest.raises(FlashSamplingError, match="logits is on cuda:0, but the sampler is on the CPU"):
        Sampler.for_logits(1000)(logits, **problem.keys)
    with pytest.raises(FlashSamplingError, match="logits has 999 columns, but the sampler has vocab_size=1000") as error:
        sampler(logits[:, 1:], **problem.keys)
    assert error.value.knob == "logits"
    with pytest.raises(FlashSamplingError, match="max_rows=4"):
        sampler(torch.cat([logits, logits]), seed=range(8), position=0)
    logits[2, 9] = float("nan")
    with pytest.raises(FlashSamplingError, match="row 2: the logit of token 9 is NaN") as error:
        sampler(logits, **problem.keys)
    assert error.value.row == 2 and error.value.results.tolist()[2] == -1
    assert "on cuda:0 by cuda" in repr(sampler)


def test_logits_that_the_current_stream_writes_are_read_after_it(problem):
    sampler, late = Sampler.for_logits(1000, backend="cuda:0"), torch.tensor(problem.logits, device="cuda")
    for stream in [torch.cuda.Stream(), torch.cuda.default_stream()]:
        with torch.cuda.stream(stream):
            logits = torch.full_like(late, float("nan"))
            torch.cuda._sleep(20_000_000)
            logits.copy_(late)
            assert numpy.array_equal(sampler(logits, **problem.keys).cpu(), problem.argmax_with_noise())
