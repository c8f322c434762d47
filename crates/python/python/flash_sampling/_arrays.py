"""Arrays of the caller's library. torch and CuPy are used only if the caller has imported them."""

import sys
from array import array

_CODES = {"int64": "q", "float32": "f", "int32": "i"}


def deliver(like, data: bytearray, dtype: str, out=None):
    """Copies ``data`` to ``out`` and returns it, or returns ``data`` as an array of the library of ``like``."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(out if out is not None else like, torch.Tensor):
        kind = getattr(torch, dtype)
        values = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
        if out is None:
            return values.to(like.device)
        _check(out, values.shape, out.dtype == kind, dtype)
        return out.copy_(values)
    try:
        import numpy
    except ImportError:
        values = array(_CODES[dtype], bytes(data)).tolist()
        if out is not None:
            out[:] = values
            return out
        return values
    values = numpy.frombuffer(data, dtype=dtype)
    if type(out if out is not None else like).__module__.partition(".")[0] == "cupy":
        values = sys.modules["cupy"].asarray(values)
    if out is None:
        return values
    if not hasattr(out, "dtype") or not hasattr(out, "__setitem__"):
        raise TypeError(f"out must be a tensor, not {type(out).__name__}")
    _check(out, values.shape, out.dtype == dtype, dtype)
    try:
        out[...] = values
    except (TypeError, ValueError) as fault:
        raise _invalid(f"out cannot be written: {fault}") from fault
    return out


def _check(out, shape, is_kind, dtype):
    if tuple(out.shape) != tuple(shape) or not is_kind:
        raise _invalid(f"out has shape {list(out.shape)} and type {out.dtype}, but must be {list(shape)} {dtype}")


def _invalid(text):
    from ._lib import FlashSamplingError

    error = FlashSamplingError(text)
    error.knob = "out"
    return error


def backend_of(tensor) -> str:
    """The backend of a sampler that reads the tensor in place: "cpu", or for example "cuda:0"."""
    try:
        kind, number = tensor.__dlpack_device__()
    except Exception:  # The sampler's error names the argument.
        return "cpu"
    return f"cuda:{number}" if kind in (2, 13) else "cpu"


def current_stream(tensor) -> int:
    """The address of the library's current stream, for a tensor on a GPU; 0 is the default stream."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return torch.cuda.current_stream(tensor.device).cuda_stream
    if type(tensor).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream(tensor.device.id).ptr
    return 0


def export(tensor, **options):
    """The DLPack capsule of a tensor. torch exports only tensors of its current GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            return tensor.__dlpack__(**options)
    return tensor.__dlpack__(**options)
