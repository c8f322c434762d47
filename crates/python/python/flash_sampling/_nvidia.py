"""NVIDIA's run-time compiler (libnvrtc) from PyPI packages, which are not on the loader's path."""

import ctypes
import importlib.util
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def preload() -> None:
    """Loads libnvrtc from the loader's path or from PyPI packages, so that later loads by its name succeed."""
    for name in ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"):
        if _load(name):
            return
    for path in libraries():
        if _load(str(path)):
            return


def libraries() -> "list[Path]":
    """The libnvrtc files of NVIDIA's PyPI packages, newest version first."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*/lib/libnvrtc.so.*")]
    return sorted((path for path in found if path.suffix[1:].isdigit()), key=lambda path: -int(path.suffix[1:]))


def _load(path: str) -> bool:
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
