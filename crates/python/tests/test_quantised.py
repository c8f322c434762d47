"""Weights of 8 bits with scales, and heads of GGUF files, draw the tokens of the same real weights in float32."""

import gc
import json
import struct
import subprocess
from pathlib import Path

import numpy
import pytest
from conftest import bf16_bits, jax_array, library
from test_errors import fails
from test_tensors import OnGpu

from flash_sampling import FlashSamplingError, Head, Sampler, SamplingParams, reference

CHECKPOINTS = Path(__file__).parents[2] / "cli" / "tests" / "checkpoints" / "gguf"


# ---- Elements of 8 bits ----


def e4m3(codes):
    """The values of the codes of float8_e4m3fn, from its definition."""
    exponent, fraction = codes >> 3 & 15, (codes & 7) / 8
    size = numpy.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent.astype(float) - 7))
    return numpy.where(codes > 127, -size, size).astype(numpy.float32)


def e4m3_codes(values):
    """The codes of values that float8_e4m3fn has."""
    codes = numpy.array([code for code in range(256) if code & 127 != 127 and code != 128], dtype=numpy.uint8)
    order = codes[numpy.argsort(e4m3(codes))]
    found = order[numpy.searchsorted(e4m3(order), values)]
    assert numpy.array_equal(e4m3(found), values)
    return found


class Named:
    """An array of bytes that describes itself as those of the package ml_dtypes do."""

    def __init__(self, codes, name):
        self.codes, self.dtype = codes, type("Type", (), {"name": name})
        self.__array_interface__ = codes.__array_interface__ | {"typestr": "<V1"}


# Each makes a tensor from an array of integers of float32.
ELEMENTS = {
    "numpy int8": lambda values: values.astype(numpy.int8),
    "torch int8": lambda values: library("torch").from_numpy(values.astype(numpy.int8)),
    "jax int8": lambda values: jax_array(values, "int8"),
    "bytes of float8": lambda values: Named(e4m3_codes(values), "float8_e4m3fn"),
    "ml_dtypes float8": lambda values: values.astype(library("ml_dtypes").float8_e4m3fn),
    "torch float8": lambda values: library("torch").from_numpy(values).to(library("torch").float8_e4m3fn),
    "jax float8": lambda values: jax_array(values, "float8_e4m3fn"),
}


@pytest.mark.parametrize("form", ELEMENTS)
def test_every_library_and_type_of_8_bits_draws_the_same_tokens(problem, form):
    weight = ELEMENTS[form](2 * problem.weight)
    head = Head(weight, weight_scale=0.5)
    del weight
    gc.collect()
    assert (head.shape, head.device) == ((1000, 32), "the CPU")
    for options in [{}, {"canonical": True}, {"variant": "sharded:3"}, {"backend": "reference"}]:
        tokens = Sampler(head, **options)(problem.hidden, **problem.keys)
        assert numpy.array_equal(tokens, problem.argmax_with_noise())


def test_rows_of_8_bits_may_have_a_distance(problem):
    wide = numpy.full((1000, 50), 127, dtype=numpy.int8)
    wide[:, 5:37] = 2 * problem.weight
    tokens = Sampler(Head(wide[:, 5:37], weight_scale=0.5))(problem.hidden, **problem.keys)
    assert numpy.array_equal(tokens, problem.argmax_with_noise())


class Scaled:
    """A weight [300, 160] of 8 bits. Products with scales of bfloat16 are exact in float32."""

    def __init__(self):
        numbers = numpy.random.default_rng(11)
        self.hidden = numbers.normal(size=(64, 160)).astype(numpy.float32)
        self.int8 = numbers.integers(-127, 128, (300, 160)).astype(numpy.int8)
        codes = numbers.integers(0, 126, (300, 160)) + 128 * numbers.integers(0, 2, (300, 160))
        self.float8 = Named(codes.astype(numpy.uint8), "float8_e4m3fn")
        self.values = {"int8": self.int8.astype(numpy.float32), "float8": e4m3(codes)}

    @staticmethod
    def scale(shape):
        """Positive scales that bfloat16 and float16 have."""
        return numpy.random.default_rng(12).integers(1, 32, shape).astype(numpy.float32) / 2**12

    def draw(self, head):
        """Canonical plans draw the same tokens from the same real weights in any type."""
        return Sampler(head, canonical=True)(self.hidden, seed=range(64), position=5).tolist()


# The shape of the scales, and how they become one for each element of [300, 160].
SCALES = {
    "weight": ((1, 1), lambda scale: scale),
    "rows": ((300, 1), lambda scale: scale),
    "blocks of 128 x 128": ((3, 2), lambda scale: numpy.kron(scale, numpy.ones((128, 128), "float32"))[:300, :160]),
    "groups of 32 columns": ((300, 5), lambda scale: scale.repeat(32, axis=1)),
}


@pytest.mark.parametrize("element", ["int8", "float8"])
def test_every_form_of_scales_gives_the_draws_of_the_same_real_weights(element):
    scaled, seen = Scaled(), set()
    weight = getattr(scaled, element)
    for shape, spread in SCALES.values():
        scale = scaled.scale(shape)
        want = scaled.draw(Head(scaled.values[element] * spread(scale)))
        assert scaled.draw(Head(weight, weight_scale=scale)) == want
        seen.add(tuple(want))
        others = [scale.astype(numpy.float16), bf16_bits(scale)]
        if shape[1] == 1:
            others.append(scale[:, 0])
        if shape == (1, 1):
            others += [scale.reshape(()), float(scale[0, 0]), bf16_bits(scale).reshape(()), numpy.float32(scale[0, 0])]
        for other in others:
            assert scaled.draw(Head(weight, weight_scale=other)) == want
    assert len(seen) == len(SCALES)  # the scales matter


def test_scales_may_be_tensors_of_torch():
    torch, scaled = library("torch"), Scaled()
    weight, scale = torch.from_numpy(scaled.int8), torch.from_numpy(scaled.scale((300, 1)))
    want = scaled.draw(Head(scaled.int8 * scale.numpy()))
    for given in [scale, scale.to(torch.bfloat16), scale[:, 0], torch.nn.Parameter(scale)]:
        assert scaled.draw(Head(weight, weight_scale=given)) == want
    assert scaled.draw(Head(weight, weight_scale=torch.tensor(0.0625))) == scaled.draw(Head(scaled.int8 / numpy.float32(16)))


def test_a_shard_of_8_bits_draws_from_its_rows():
    scaled = Scaled()
    scale = scaled.scale((300, 1))
    options = {"vocab_size": 350, "first_token": 100, "bias": numpy.linspace(0, 2, 300)}
    want = scaled.draw(Head(scaled.int8 * scale, **options))
    assert scaled.draw(Head(scaled.int8, weight_scale=scale, **options)) == want
    assert min(want) >= 100


@pytest.mark.parametrize(
    ("weight", "scale", "match", "knob"),
    [
        ("int8", None, "weight has elements of int8, which need weight_scale", "weight_scale"),
        ("float8", None, "weight has elements of float8_e4m3fn, which need weight_scale", "weight_scale"),
        ("uint8", 1.0, "weight has elements of uint8, but must have .*float32, float8_e4m3fn or int8", "weight"),
        ("float32", 1.0, "weight_scale needs a weight of .* but weight has elements of float32", "weight_scale"),
        ("int8", numpy.ones((2, 3), "float32"), r"weight_scale has shape \[2, 3\], but a weight \[300, 160\] needs", "weight_scale"),
        ("int8", numpy.ones((300, 7), "float32"), r"\[3, 2\] for blocks of 128 x 128, or \[300, n\] for groups", "weight_scale"),
        ("int8", numpy.ones((0,), "float32"), r"shape \[0\]", "weight_scale"),
        ("int8", numpy.ones((160, 300), "float32").T, r"has strides \[1, 300\]: make it contiguous", "weight_scale"),
        ("int8", numpy.ones(300), "weight_scale has elements of float64, but must have bfloat16", "weight_scale"),
        ("int8", numpy.array([1, 2, numpy.nan] * 100, "float32"), "weight_scale has NaN at index 2, but must be finite", "weight_scale"),
        ("int8", float("inf"), "weight_scale has inf at index 0", "weight_scale"),
    ],
)
def test_wrong_scales_are_refused(weight, scale, match, knob):
    scaled = Scaled()
    weight = scaled.float8 if weight == "float8" else scaled.int8.astype(weight)
    fails(lambda: Head(weight, weight_scale=scale), match, knob=knob)


def test_types_that_are_not_supported_are_named(problem):
    scaled = Scaled()
    with pytest.raises(TypeError, match="weight has an unsupported element type, float8_e5m2"):
        Head(Named(scaled.float8.codes, "float8_e5m2"), weight_scale=1.0)
    with pytest.raises(TypeError, match="weight_scale must be a number or a tensor, not list"):
        Head(scaled.int8, weight_scale=[1.0] * 300)
    sampler = Sampler(Head(scaled.int8, weight_scale=1.0))
    fails(lambda: sampler(scaled.float8, seed=range(300), position=0), "hidden has elements of float8_e4m3fn, but", knob="hidden")
    fails(lambda: sampler(scaled.int8, seed=range(300), position=0), "hidden has elements of int8, but", knob="hidden")
    bias = Named(numpy.zeros(1000, numpy.uint8), "float8_e4m3fn")
    fails(lambda: Head(problem.weight, bias=bias), "bias has elements of float8_e4m3fn, which only a weight", knob="bias")
    torch = library("torch")
    with pytest.raises(TypeError, match="weight has an unsupported element type, float8_e5m2"):
        Head(torch.zeros(4, 4).to(torch.float8_e5m2), weight_scale=1.0)


def test_scales_are_on_the_device_of_the_weight():
    scaled = Scaled()
    weight, scale = OnGpu(scaled.int8), OnGpu(scaled.scale((300, 1)))
    head = Head(weight, weight_scale=scale)
    assert (head.shape, head.device) == ((300, 160), "cuda:0")
    fails(lambda: Sampler(head, shadow=True), "a weight of type i8 has no shadow", knob="shadow")
    for other in [0.5, scale.tensor]:
        assert Head(weight, weight_scale=other).device == "cuda:0"
    match = "weight_scale must be a number, a tensor on the CPU, or contiguous float32 on cuda:0"
    fails(lambda: Head(weight, weight_scale=OnGpu(numpy.ones((300, 1), "float16"))), match, knob="weight_scale")
    match = "weight_scale must be a number or a tensor on the CPU"
    fails(lambda: Head(scaled.int8, weight_scale=scale), match, knob="weight_scale")


def test_a_weight_of_8_bits_has_no_shadow():
    head = Head(Scaled().int8, weight_scale=1.0)
    fails(lambda: Sampler(head, shadow=True), "a weight of type i8 has no shadow", knob="shadow")


# ---- GGUF files ----


def gguf(path, tensors, **keys):
    """Writes a GGUF file. A tensor is (shape, ggml's number of its type, bytes)."""
    text = lambda text: struct.pack("<Q", len(text)) + text.encode()
    value = {
        str: lambda value: struct.pack("<I", 8) + text(value),
        int: lambda value: struct.pack("<II", 4, value),
        float: lambda value: struct.pack("<If", 6, value),
    }
    keys = {"general.architecture": "test"} | {name.replace("__", "."): value for name, value in keys.items()}
    head, data = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)), b""
    for name, content in keys.items():
        head += text(name) + value[type(content)](content)
    for name, (shape, kind, content) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += content + bytes(-len(content) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def q8_0(weight):
    """A weight of small integers in blocks of 32 codes with the scale 0.5."""
    codes = (2 * weight).astype(numpy.int8).reshape(-1, 32)
    scales = numpy.full((len(codes), 1), 0.5, dtype=numpy.float16).view(numpy.int8)
    return (weight.shape, 8, numpy.hstack([scales, codes]).tobytes())


def q4_0(weight):
    """A weight of small integers in blocks of 32 codes with the scale 1."""
    codes = (weight + 8).astype(numpy.uint8).reshape(-1, 32)
    scales = numpy.ones((len(codes), 1), dtype=numpy.float16).view(numpy.uint8)
    return (weight.shape, 2, numpy.hstack([scales, codes[:, :16] | codes[:, 16:] << 4]).tobytes())


def f32(values):
    return (values.shape, 0, values.astype(numpy.float32).tobytes())


@pytest.mark.parametrize("stored", [q8_0, q4_0, f32])
def test_the_head_of_a_gguf_file_draws_the_tokens_of_its_real_weights(problem, tmp_path, stored):
    path = gguf(tmp_path / "head.gguf", {"output.weight": stored(problem.weight)})
    head = Head.from_gguf(path)
    assert (head.shape, head.vocab_size, head.device) == ((1000, 32), 1000, "the CPU")
    for options in [{}, {"canonical": True}, {"variant": "sharded:3"}, {"backend": "reference"}]:
        tokens = Sampler(head, **options)(problem.hidden, **problem.keys)
        assert numpy.array_equal(tokens, problem.argmax_with_noise())


def test_the_file_is_mapped_until_the_sampler_is_gone(problem, tmp_path):
    path = gguf(tmp_path / "head.gguf", {"output.weight": q8_0(problem.weight)})
    maps = Path("/proc/self/maps")
    sampler = Sampler(Head.from_gguf(str(path)))
    assert str(path) in maps.read_text()
    assert numpy.array_equal(sampler(problem.hidden, **problem.keys), problem.argmax_with_noise())
    del sampler
    gc.collect()
    assert str(path) not in maps.read_text()


def test_the_default_is_the_own_head_before_the_embedding(problem, tmp_path):
    embedding = q8_0(numpy.roll(problem.weight, 1, axis=0))
    both = gguf(tmp_path / "both.gguf", {"token_embd.weight": embedding, "output.weight": q8_0(problem.weight)})
    tied = gguf(tmp_path / "tied.gguf", {"output_norm.weight": f32(numpy.ones(32)), "token_embd.weight": embedding})
    draw = lambda head: Sampler(head)(problem.hidden, temperature=0, **problem.keys)
    own, other = problem.logits.argmax(axis=1), numpy.roll(problem.logits, 1, axis=1).argmax(axis=1)
    assert not numpy.array_equal(own, other)
    assert numpy.array_equal(draw(Head.from_gguf(both)), own)
    assert numpy.array_equal(draw(Head.from_gguf(both, "token_embd.weight")), other)
    assert numpy.array_equal(draw(Head.from_gguf(tied)), other)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"test__final_logit_softcapping": 2.5}, {"soft_cap": 2.5}),
        ({"general__architecture": "command-r", "command-r__logit_scale": 0.25}, {"scale": 0.25}),
        ({"general__architecture": "granite", "granite__logit_scale": 4.0}, {"scale": 0.25}),
        ({"test__vocab_size": 500}, {"vocab_size": 500}),
        ({"test__vocab_size": 5000}, {}),
        ({}, {"bias": numpy.arange(1000) % 7}),
    ],
    ids=str,
)
def test_the_file_gives_the_parameters_of_the_head(problem, tmp_path, keys, options):
    tensors = {"output.weight": q8_0(problem.weight)}
    if "bias" in options:
        tensors["output.bias"] = f32(options["bias"])
    head = Head.from_gguf(gguf(tmp_path / "head.gguf", tensors, **keys))
    draw = lambda head: Sampler(head)(numpy.repeat(problem.hidden, 16, axis=0), seed=range(64), position=9).tolist()
    assert draw(head) == draw(Head(problem.weight, **options))
    if "bias" in options:  # another tensor has no bias
        tensors["other"] = tensors["output.weight"]
        other = Head.from_gguf(gguf(tmp_path / "other.gguf", tensors, **keys), "other")
        assert draw(other) == draw(Head(problem.weight))
    assert not options or draw(head) != draw(Head(problem.weight))


def test_heads_of_gguf_files_draw_the_tokens_of_the_command(command, tmp_path):
    hidden = numpy.random.default_rng(3).normal(size=(8, 128)).astype(numpy.float32)
    numpy.save(tmp_path / "hidden.npy", hidden)
    model = CHECKPOINTS / "stories.gguf"
    call = [command, "sample", "--model", model, "--hidden", tmp_path / "hidden.npy", "--seeds", "1,2,3,4,5,6,7,8"]
    output = subprocess.run([*call, "--position", "9", "--format", "json"], capture_output=True, text=True, check=True).stdout
    rows = Sampler(Head.from_gguf(model)).sample(hidden, SamplingParams(), seed=range(1, 9), position=9)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["tokens"] for line in lines] == [[row.token] for row in rows]
    assert [numpy.float32(line["scores"][0]) for line in lines] == [numpy.float32(row.score) for row in rows]


def test_a_weight_of_blocks_has_no_shadow():
    head = Head.from_gguf(CHECKPOINTS / "stories.gguf")
    fails(lambda: Sampler(head, shadow=True), "a weight of type q8_0 has no shadow", knob="shadow")


@pytest.mark.parametrize(
    ("tensors", "keys", "name", "match", "knob"),
    [
        (["a", "b"], {}, None, "no tensor output.weight and no tensor token_embd.weight; it has 2: a, b$", "tensor"),
        (["a", "b", "c", "d", "output.weight"], {}, "lm_head", "no tensor lm_head; it has 5: a, b, c, ...$", "tensor"),
        (["output.weight"], {"test__logit_scale": 4.0}, None, "logit_scale in this architecture", "path"),
        (["output.weight"], {"test__vocab_size": "a"}, None, "the key test.vocab_size is .*a.*, expected a size", "path"),
        (["output.weight", "output.bias"], {}, None, r"output.bias has shape \[2, 1\] .*must have shape \[2\]", "path"),
        (["output.weight", "norm"], {}, "norm", r"norm has shape \[32\], but must be \[vocab, hidden\]", "tensor"),
        (["output.weight", "k_quant"], {}, "k_quant", "the tensor k_quant has type Q2_K, which is not supported", "tensor"),
    ],
    ids=str,
)
def test_files_without_the_head_are_refused(tmp_path, tensors, keys, name, match, knob):
    others = {"norm": f32(numpy.ones(32)), "k_quant": ((2, 256), 10, bytes(168)), "output.bias": f32(numpy.ones((2, 1)))}
    path = gguf(tmp_path / "head.gguf", {name: others.get(name, f32(numpy.ones((2, 32)))) for name in tensors}, **keys)
    error = fails(lambda: Head.from_gguf(path, name), match, knob=knob)
    assert str(error).startswith(f"{path}: ")


def test_files_that_are_no_gguf_files_are_refused(problem, tmp_path):
    path = gguf(tmp_path / "head.gguf", {"output.weight": q8_0(problem.weight)})
    whole = path.read_bytes()
    for content, match in [
        (b"", "it does not begin with GGUF"),
        (b"GGML" + whole[4:], "it does not begin with GGUF"),
        (whole[:-40], "it is truncated or damaged: the tensor output.weight needs 34000 more bytes"),
    ]:
        path.write_bytes(content)
        fails(lambda: Head.from_gguf(path), f"head.gguf: not a usable GGUF file: {match}", knob="path")
    with pytest.raises(FileNotFoundError, match="No such file") as found:
        Head.from_gguf(tmp_path / "nothing.gguf")
    assert found.value.filename == str(tmp_path / "nothing.gguf")
    with pytest.raises(OSError, match="is a directory"):
        Head.from_gguf(tmp_path)
