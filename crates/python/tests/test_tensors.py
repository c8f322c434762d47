"""Tensors of every library are borrowed, whatever their type and layout, and results have the caller's kind."""

import ctypes
import gc
import sys
import weakref

import numpy
import pytest
from conftest import bf16_bits, jax_array, library

import flash_sampling
from flash_sampling import FlashSamplingError, Head, Sampler, from_logits, noise


def test_every_library_and_type_draws_the_same_tokens(problem, tensor):
    sampler = Sampler(Head(tensor(problem.weight)))
    want = problem.argmax_with_noise()
    assert numpy.array_equal(sampler(tensor(problem.hidden), **problem.keys), want)
    # Any pair of types.
    assert numpy.array_equal(sampler(problem.hidden, **problem.keys), want)
    assert numpy.array_equal(from_logits(problem.logits, **problem.keys), want)


def test_logits_of_every_library_and_type(problem, tensor):
    # Logits that bfloat16 holds.
    logits = numpy.clip(problem.logits, -16, 16)
    want = from_logits(logits, **problem.keys)
    assert numpy.array_equal(from_logits(tensor(logits), **problem.keys), want)


def test_rows_may_have_a_distance(problem):
    wide = numpy.full((1000, 50), numpy.nan, dtype=numpy.float32)
    wide[:, 5:37] = problem.weight
    hidden = numpy.full((8, 40), numpy.nan, dtype=numpy.float32)
    hidden[::2, :32] = problem.hidden
    sampler = Sampler(Head(wide[:, 5:37]))
    assert numpy.array_equal(sampler(hidden[::2, :32], **problem.keys), problem.argmax_with_noise())
    torch = library("torch")
    sampler = Sampler(Head(torch.from_numpy(wide)[:, 5:37]))
    tokens = sampler(torch.from_numpy(hidden)[::2, :32], **problem.keys)
    assert numpy.array_equal(tokens, problem.argmax_with_noise())


def test_read_only_and_unaligned_arrays(problem):
    bytes_of = bytearray(1) + problem.weight.tobytes()
    weight = numpy.frombuffer(bytes(bytes_of), dtype=numpy.float32, count=32000, offset=1).reshape(1000, 32)
    assert not weight.flags.writeable and not weight.flags.aligned
    problem.hidden.flags.writeable = False
    tokens = Sampler(Head(weight))(problem.hidden, **problem.keys)
    assert numpy.array_equal(tokens, problem.argmax_with_noise())


def test_parameters_of_torch_modules_need_no_detach(problem):
    torch = library("torch")
    layer = torch.nn.Linear(32, 1000)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(problem.weight))
        layer.bias.zero_()
        layer.bias[7] = 1000
    assert layer.weight.requires_grad
    tokens = Sampler(Head(layer.weight, bias=layer.bias))(problem.hidden, **problem.keys)
    assert tokens.tolist() == [7] * 4


def test_a_bias_of_float64_is_rounded(problem):
    bias = numpy.full(1000, 1e-60)
    bias[7] = 1000
    assert Sampler(Head(problem.weight, bias=bias))(problem.hidden, **problem.keys).tolist() == [7] * 4


def test_a_head_keeps_the_weight_alive_and_a_sampler_keeps_the_head(problem, tensor):
    weight = tensor(problem.weight)
    head = Head(weight)
    sampler = Sampler(head)
    del weight, head
    gc.collect()
    [numpy.ones(32000, dtype=numpy.float32) for _ in range(10)]  # would reuse freed memory
    assert numpy.array_equal(sampler(problem.hidden, **problem.keys), problem.argmax_with_noise())


def test_memory_is_given_back(problem):
    class Array(numpy.ndarray):
        """An array with weak references."""

    weight = problem.weight.view(Array)
    gone = weakref.ref(weight)
    sampler = Sampler(Head(weight))
    sampler(problem.hidden, **problem.keys)
    del weight
    assert gone() is not None
    del sampler
    gc.collect()
    assert gone() is None
    before = sys.getrefcount(problem.hidden)
    sampler = Sampler(Head(problem.weight))
    for _ in range(10):
        sampler(problem.hidden, **problem.keys)
    after = sys.getrefcount(problem.hidden)
    assert after == before


def test_torch_memory_is_given_back(problem):
    torch = library("torch")
    memory = problem.weight.copy().view(type("Array", (numpy.ndarray,), {}))
    gone = weakref.ref(memory)
    weight = torch.from_numpy(memory)
    del memory
    sampler = Sampler(Head(weight))
    del weight
    gc.collect()
    assert gone() is not None
    assert numpy.array_equal(sampler(problem.hidden, **problem.keys), problem.argmax_with_noise())
    del sampler
    gc.collect()
    assert gone() is None


def test_results_have_the_kind_of_the_input(problem):
    sampler = Sampler(Head(problem.weight))
    tokens = sampler(problem.hidden, **problem.keys)
    assert type(tokens) is numpy.ndarray and tokens.dtype == numpy.int64 and tokens.shape == (4,)
    out = numpy.zeros(4, dtype=numpy.int64)
    assert sampler(problem.hidden, out=out, **problem.keys) is out and numpy.array_equal(out, tokens)
    none = sampler(problem.hidden[:0], seed=[], position=[])
    assert none.shape == (0,) and none.dtype == numpy.int64
    torch = library("torch")
    hidden = torch.from_numpy(problem.hidden)
    result = sampler(hidden, **problem.keys)
    assert isinstance(result, torch.Tensor) and result.dtype == torch.int64 and result.device.type == "cpu"
    out = torch.zeros(4, dtype=torch.int64)
    assert sampler(hidden, out=out, **problem.keys) is out and torch.equal(out, result)
    assert sampler(hidden[:0], seed=[], position=[]).shape == (0,)
    assert isinstance(noise(1, 2, 0, torch.arange(4)), torch.Tensor)


@pytest.mark.parametrize("out", [numpy.zeros(3, dtype=numpy.int64), numpy.zeros(4, dtype=numpy.int32)], ids=str)
def test_a_wrong_out_is_refused(problem, out):
    with pytest.raises(FlashSamplingError, match=r"must be \[4\] int64") as error:
        Sampler(Head(problem.weight))(problem.hidden, out=out, **problem.keys)
    assert error.value.knob == "out"


@pytest.mark.parametrize("form", ["list", "numpy", "small numpy", "torch", "jax"])
def test_parameters_may_be_sequences_or_tensors(problem, form):
    lists = {"temperature": [0.5, 1, 2, 0], "top_k": [0, 10, -1, 0], "top_p": [1, 1, 0.5, 1], "min_p": [0, 0, 0, 0.25]}
    lists |= problem.keys
    convert = {
        "list": lambda values: values,
        "numpy": numpy.array,
        "small numpy": lambda values: numpy.array(values).astype({"i": "int16", "f": "float16"}[numpy.array(values).dtype.kind]),
        "torch": lambda values: library("torch").tensor(values),
        "jax": jax_array,
    }[form]
    sampler = Sampler(Head(problem.weight))
    tokens = sampler(problem.hidden, **{name: convert(values) for name, values in lists.items()})
    assert numpy.array_equal(tokens, sampler(problem.hidden, **lists))


@pytest.mark.parametrize("one", [1, 0.5, numpy.float32(0.5), numpy.int64(1), numpy.array(0.5), numpy.float16(0.5)])
def test_a_number_counts_for_all_rows(problem, one):
    sampler = Sampler(Head(problem.weight))
    each = sampler(problem.hidden, temperature=[float(one)] * 4, **problem.keys)
    assert numpy.array_equal(sampler(problem.hidden, temperature=one, **problem.keys), each)


def test_seeds_have_64_bits(problem):
    sampler = Sampler(Head(problem.weight))
    seeds = [2**64 - 1, 2**63, 2**32, 0]
    tokens = sampler(problem.hidden, seed=seeds, position=2**56 - 1)
    assert numpy.array_equal(sampler(problem.hidden, seed=numpy.array(seeds, dtype=numpy.uint64), position=2**56 - 1), tokens)
    want = [
        numpy.argmax(problem.logits[row] + noise(seed, 2**56 - 1, 0, range(1000))) for row, seed in enumerate(seeds)
    ]
    assert tokens.tolist() == want


@pytest.mark.parametrize("shape", ["rows", "one row", "flat"])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "torch"])
def test_masks_are_bitmaps_of_allowed_tokens(problem, shape, dtype):
    allowed = {"rows": [[1], [31, 32], [999], [500, 501]], "one row": [[40, 41]], "flat": [[40, 41]]}[shape]
    mask = numpy.zeros((len(allowed), 32), dtype=numpy.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            mask[row, token // 32] |= numpy.uint32(1 << token % 32)
    mask = mask[0] if shape == "flat" else mask
    mask = mask.view(numpy.int32) if dtype != "uint32" else mask
    mask = library("torch").from_numpy(mask) if dtype == "torch" else mask
    tokens = Sampler(Head(problem.weight))(problem.hidden, mask=mask, **problem.keys)
    for row, token in enumerate(tokens):
        assert token in (allowed[row] if len(allowed) > 1 else allowed[0])


def test_bits_of_bfloat16_are_the_types_own(problem):
    torch = library("torch")
    bits = bf16_bits(problem.weight)
    assert numpy.array_equal(torch.from_numpy(problem.weight).to(torch.bfloat16).view(torch.uint16).numpy(), bits)


class OnGpu:
    """A tensor of torch that claims to be memory of a GPU. Nothing may read it."""

    def __init__(self, values):
        self.tensor = library("torch").tensor(values)
        self.stream = None

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None):
        self.stream = stream
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule


def test_memory_of_a_gpu_is_told_from_memory_of_the_cpu(problem):
    hidden, weight = OnGpu(problem.hidden), OnGpu(problem.weight)
    with pytest.raises(FlashSamplingError, match="hidden is on cuda:0, but the sampler is on the CPU"):
        Sampler(Head(problem.weight))(hidden, **problem.keys)
    assert hidden.stream == 1  # the default stream
    head = Head(weight, vocab_size=900)
    assert (head.device, head.shape, head.vocab_size) == ("cuda:0", (1000, 32), 900)
    for options, knob in [({"threads": 2}, "threads"), ({"backend": "cpu"}, "backend"), ({"variant": "online:64"}, "variant")]:
        with pytest.raises(FlashSamplingError) as error:
            Sampler(head, **options)
        assert error.value.knob == knob
    with pytest.raises(FlashSamplingError, match="logits is on cuda:0, but the sampler is on the CPU"):
        Sampler.for_logits(1000)(hidden, **problem.keys)
    hidden.shape = hidden.tensor.shape
    if not library("torch").cuda.is_available():
        with pytest.raises(FlashSamplingError, match="CUDA is unavailable"):
            from_logits(hidden, **problem.keys)


def test_logits_may_have_any_number_of_rows():
    """The sampler draws 1024 rows at a time. Rows and errors are those of one call."""
    rows = 2**16 + 5
    logits = numpy.random.default_rng(2).standard_normal((rows, 40), dtype=numpy.float32)
    logits[[3, 7000, rows - 1], 7] = numpy.nan
    keys = {"seed": 5, "position": range(rows), "top_p": 0.8}
    flash_sampling._sampler_of_logits.cache_clear()
    out = numpy.empty(rows, dtype=numpy.int64)
    with pytest.raises(FlashSamplingError, match="row 3: the logit of token 7 is NaN") as error:
        from_logits(logits, out=out, **keys)
    assert list(error.value.errors) == [3, 7000, rows - 1] and error.value.results is out
    assert str(error.value.errors[7000]) == "row 7000: the logit of token 7 is NaN" and error.value.errors[7000].row == 7000
    assert numpy.flatnonzero(out < 0).tolist() == [3, 7000, rows - 1]
    for part in (slice(0, 3), slice(1000, 1100), slice(2048, 3072), slice(rows - 300, rows - 1)):
        keys["position"] = range(part.start, part.stop)
        assert numpy.array_equal(from_logits(logits[part], **keys), out[part])
    assert flash_sampling._sampler_of_logits.cache_info().currsize == 2  # for 3 rows, and for all other calls
    with pytest.raises(FlashSamplingError, match="logits has 2000 rows, but the sampler has max_rows=256"):
        Sampler.for_logits(40)(logits[:2000], seed=5, position=range(2000))
