"""What the tests share: small problems with exact dot products, tensors of every library, and skips with a reason."""

import importlib
import os
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest

import flash_sampling

REQUIRED = os.environ.get("FLASH_SAMPLING_REQUIRE", "").split(",")


def skip(name, reason):
    """Skips a test, or fails if FLASH_SAMPLING_REQUIRE names what it needs."""
    if name in REQUIRED:
        pytest.fail(f"{reason}, but FLASH_SAMPLING_REQUIRE names {name}")
    pytest.skip(reason, allow_module_level=True)


def library(name):
    """A library that is optional."""
    try:
        return importlib.import_module(name)
    except ImportError:
        skip(name, f"{name} is not installed")


@pytest.fixture
def gpu():
    if not library("torch").cuda.is_available():
        skip("cuda", "torch has no GPU")


@contextmanager
def no_waits():
    """Fails a statement that waits for the GPU."""
    torch = library("torch")
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Problem:
    """A head and hidden states of small integers, so no dot product rounds in any order or element type."""

    def __init__(self, rows=4, vocab=1000, hidden=32):
        numbers = numpy.random.default_rng(7)
        self.weight = numbers.integers(-2, 3, (vocab, hidden)).astype(numpy.float32)
        self.hidden = numbers.integers(-1, 2, (rows, hidden)).astype(numpy.float32)
        self.logits = self.hidden @ self.weight.T
        self.seeds = [100 + row for row in range(rows)]
        self.positions = [3 * row for row in range(rows)]
        self.keys = {"seed": self.seeds, "position": self.positions}

    def argmax_with_noise(self, temperature=1.0):
        """The definition of the draw: the argmax of logits plus noise, in float32."""
        scores = []
        for row, logits in enumerate(self.logits):
            noise = flash_sampling.noise(self.seeds[row], self.positions[row], 0, range(len(logits)))
            scores.append(logits * numpy.float32(1 / temperature) + noise)
        return numpy.argmax(scores, axis=1)


@pytest.fixture
def problem():
    return Problem()


@pytest.fixture
def command():
    """The command `flash-sampling`."""
    build = Path(__file__).parents[3] / "target" / "release" / "flash-sampling"
    program = Path(os.environ.get("FLASH_SAMPLING_PROGRAM", build))
    if not program.exists():
        skip("command", f"there is no command at {program}: cargo build --release makes it")
    return program


def bf16_bits(values):
    """The bits of float32 values in bfloat16, which numpy lacks. The values must need no rounding."""
    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    assert not numpy.any(bits & 0xFFFF)
    return (bits >> 16).astype(numpy.uint16)


def _numpy_float16(values):
    return values.astype(numpy.float16)


def _torch(values, dtype, device="cpu"):
    torch = library("torch")
    return torch.tensor(values, dtype=getattr(torch, dtype), device=device)


def jax_array(values, dtype=None, kind="cpu"):
    """An array on the first device of a kind. Without a device, JAX prefers a GPU."""
    jax = library("jax")
    with jax.default_device(jax.devices(kind)[0]):
        return jax.numpy.asarray(values, dtype=dtype)


def _ml_dtypes(values):
    return values.astype(library("ml_dtypes").bfloat16)


# Each makes a tensor from an array of float32.
TENSORS = {
    "numpy float32": numpy.asarray,
    "numpy float16": _numpy_float16,
    "numpy bits of bfloat16": bf16_bits,
    "numpy ml_dtypes bfloat16": _ml_dtypes,
    "torch float32": lambda values: _torch(values, "float32"),
    "torch float16": lambda values: _torch(values, "float16"),
    "torch bfloat16": lambda values: _torch(values, "bfloat16"),
    "jax float32": lambda values: jax_array(values, "float32"),
    "jax bfloat16": lambda values: jax_array(values, "bfloat16"),
}


@pytest.fixture(params=TENSORS)
def tensor(request):
    return TENSORS[request.param]
