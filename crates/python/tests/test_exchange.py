"""Tensors are borrowed by the functions of `__dlpack_c_exchange_api__`, without a call of a Python method."""

import ctypes
import gc

import numpy
import pytest
from conftest import bf16_bits, library, skip

from flash_sampling import FlashSamplingError, Head, Sampler

CPU, CUDA, BFLOAT, FLOAT = 1, 2, 4, 2
capsule_of = ctypes.pythonapi.PyCapsule_New
capsule_of.restype, capsule_of.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Tensor(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    """`DLManagedTensorVersioned` of dlpack.h."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


class Api(ctypes.Structure):
    """`DLPackExchangeAPI` of dlpack.h."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        *((name, ctypes.c_void_p) for name in ("previous", "allocate", "export", "make", "view", "stream")),
    ]


EXPORT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
DELETE = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class Library:
    """A library whose tensors are rows of numbers. Its type of tensors, `Exported`, has the functions of DLPack."""

    def __init__(self, name=b"dlpack_exchange_api", version=1, result=0, without=(), stream_result=0, **fields):
        """fields: fields of every exported tensor."""
        self.fields, self.deleted, self.exported, self.devices, self.calls = fields, [], {}, [], []
        self.result, self.stream_result = result, stream_result
        self.functions = {"export": EXPORT(self.export), "stream": STREAM(self.stream)}
        self.delete = DELETE(self.deleted.append)
        self.api = Api(version=(version, 3))
        for function, pointer in self.functions.items():
            if function not in without:
                setattr(self.api, function, ctypes.cast(pointer, ctypes.c_void_p).value)
        self.name = name  # A capsule does not copy its name.

        class Exported:
            __dlpack_c_exchange_api__ = capsule_of(ctypes.addressof(self.api), self.name, None)

            def __init__(this, values, code=FLOAT):
                this.values, this.code = values, code

            def __dlpack_device__(this):
                return (CPU, 0)

            def __dlpack__(this, **options):
                self.calls.append(options)
                return this.values.__dlpack__(**options)

        self.Exported = Exported

    def export(self, tensor, out):
        if self.result != 0:
            return self.result
        values = tensor.values
        strides = [stride // values.itemsize for stride in values.strides]
        pairs = [(ctypes.c_int64 * values.ndim)(*of) for of in (values.shape, strides)]
        managed = Managed(version=(self.fields.get("major", 1), 0), flags=self.fields.get("flags", 0))
        managed.deleter = ctypes.cast(self.delete, ctypes.c_void_p).value
        shape, strides = (ctypes.cast(pair, ctypes.POINTER(ctypes.c_int64)) for pair in pairs)
        device, bits = (self.fields.get("device", CPU), self.fields.get("id", 0)), 8 * values.itemsize
        offset = self.fields.get("byte_offset", 0)
        managed.tensor = Tensor(
            values.ctypes.data - offset, device, values.ndim, tensor.code, bits, 1, shape, strides, offset
        )
        self.exported[ctypes.addressof(managed)] = managed, pairs, values
        out[0] = ctypes.addressof(managed)
        return 0

    def stream(self, kind, number, out):
        self.devices.append((kind, number))
        out[0] = 77
        return self.stream_result

    def are_returned(self):
        """Whether the deleter of each exported tensor was called once."""
        gc.collect()
        return sorted(self.deleted) == sorted(self.exported)


def test_torch_exports_without_methods(problem, monkeypatch):
    torch = library("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        skip("torch", "torch is older than 2.10, so its tensors have no functions of DLPack")
    calls, method = [], torch.Tensor.__dlpack__
    spy = lambda self, **options: calls.append(options) or method(self, **options)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "__dlpack__", spy)
    want = problem.argmax_with_noise().tolist()
    wide = torch.full((8, 40), torch.nan)
    wide[::2, :32] = torch.from_numpy(problem.hidden)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight = torch.nn.Parameter(torch.from_numpy(problem.weight).to(dtype))
        tokens = Sampler(Head(weight))(wide.to(dtype)[::2, :32], **problem.keys)
        assert tokens.tolist() == want and not calls
    # An export that fails: the method describes the error.
    with pytest.raises(FlashSamplingError, match="hidden cannot be read: .* layout"):
        Sampler(Head(weight))(torch.from_numpy(problem.hidden).to_sparse(), **problem.keys)
    assert len(calls) == 1
    # The negative control: without the functions, the methods export the tensors.
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    assert Sampler(Head(weight))(wide[::2, :32], **problem.keys).tolist() == want and len(calls) > 2


def test_tensors_of_any_layout_are_exported_and_returned_once(problem):
    for fields in ({}, {"byte_offset": 64}, {"flags": 1}, {"device": 3}):  # read-only; page-locked memory
        of = Library(**fields)
        wide = numpy.full((8, 40), numpy.nan, dtype=numpy.float32)
        wide[::2, :32] = problem.hidden
        sampler = Sampler(Head(of.Exported(problem.weight)))
        tokens = sampler(of.Exported(wide[::2, :32]), **problem.keys)
        assert numpy.from_dlpack(tokens).tolist() == problem.argmax_with_noise().tolist()
        assert len(of.exported) >= 2 and not of.calls and not of.devices
        assert not of.are_returned()  # The head keeps the weight.
        del sampler
        assert of.are_returned()


def test_elements_have_the_type_of_the_export(problem):
    of = Library()
    weight = of.Exported(bf16_bits(problem.weight), BFLOAT)
    sampler = Sampler(Head(weight))
    assert sampler(problem.hidden, **problem.keys).tolist() == problem.argmax_with_noise().tolist()
    with pytest.raises(TypeError, match="hidden has an unsupported element type, code 5 with 32 bits of DLPack"):
        sampler(of.Exported(problem.hidden, 5), **problem.keys)
    del sampler
    assert of.are_returned()


@pytest.mark.parametrize(
    "options",
    [{"name": b"another_api"}, {"version": 2}, {"result": -1}, {"without": ["export"]}, {"without": ["stream"]}],
    ids=str,
)
def test_the_method_exports_where_the_functions_do_not(problem, options):
    of = Library(**options)
    tokens = Sampler(Head(of.Exported(problem.weight)))(problem.hidden, **problem.keys)
    assert tokens.tolist() == problem.argmax_with_noise().tolist()
    assert len(of.calls) == 1 and not of.exported


def test_another_version_of_dlpack_is_refused(problem):
    of = Library(major=2)
    with pytest.raises(FlashSamplingError, match="weight cannot be read: DLPack 2 is not supported"):
        Head(of.Exported(problem.weight))
    assert len(of.exported) == 1 and of.are_returned()


def test_a_tensor_of_a_gpu_has_the_stream_of_its_device(problem):
    """Nothing reads the memory, because the sampler is on the CPU."""
    of, sampler = Library(device=CUDA, id=3), Sampler(Head(problem.weight))
    with pytest.raises(FlashSamplingError, match="hidden is on cuda:3, but the sampler is on the CPU"):
        sampler(of.Exported(problem.hidden), **problem.keys)
    assert set(of.devices) == {(CUDA, 3)} and of.are_returned()
    of = Library(device=CUDA, stream_result=-1)
    tokens = sampler(of.Exported(problem.hidden), **problem.keys)  # The method says that the tensor is on the CPU.
    assert numpy.from_dlpack(tokens).tolist() == problem.argmax_with_noise().tolist()
    assert of.devices and of.calls and of.are_returned()
