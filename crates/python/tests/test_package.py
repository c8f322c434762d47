"""The package: its stubs name what is there, and it needs no other package."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import library, skip

import flash_sampling
from flash_sampling import _lib, _nvidia

FOLDER = Path(flash_sampling.__file__).parent


def run(code):
    """Runs a program in a new interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_stubs_name_what_the_module_has():
    assert (FOLDER / "py.typed").exists()
    stubs = ast.parse((FOLDER / "_lib.pyi").read_text())
    public = lambda names: {name for name in names if not name.startswith("_")}
    named = {node.name: node for node in stubs.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert public(named) == public(dir(_lib))
    for name, node in named.items():
        if isinstance(node, ast.ClassDef) and name != "FlashSamplingError" and not name.startswith("_"):
            members = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
            assert public(members) == public(vars(getattr(_lib, name))), name
    params = next(member for member in named["SamplingParams"].body if getattr(member, "name", "") == "__new__")
    arguments = {argument.arg for argument in params.args.kwonlyargs}
    assert arguments == set(flash_sampling.SamplingParams().to_dict())


def test_the_arguments_of_enqueue_are_those_of_its_stub():
    stubs = ast.parse((FOLDER / "_lib.pyi").read_text())
    sampler = next(node for node in stubs.body if getattr(node, "name", "") == "Sampler")
    enqueue = next(member for member in sampler.body if getattr(member, "name", "") == "enqueue")
    names = [argument.arg for argument in enqueue.args.kwonlyargs]
    assert list(inspect.signature(flash_sampling.Sampler.enqueue).parameters) == ["self", "input", "out", *names]


def test_everything_public_has_a_docstring():
    for name in flash_sampling.__all__:
        thing = getattr(flash_sampling, name)
        assert name == "__version__" or thing.__doc__, name
        for member in [] if name == "FlashSamplingError" else vars(thing) if isinstance(thing, type) else []:
            assert member.startswith("_") or getattr(thing, member).__doc__ or name in ("Draw", "RowSample", "Kept"), member


def test_docstrings_name_the_arguments():
    """The texts of the classes, because `help` shows neither the arguments of a call nor the parameters of a request."""
    named = lambda text: set(re.findall(r"\w+", " ".join(re.findall(r"^([\w, ]+): ", text, re.MULTILINE))))
    sampler = next(node for node in ast.parse((FOLDER / "_lib.pyi").read_text()).body if getattr(node, "name", "") == "Sampler")
    for name in ("__new__", "__call__"):
        method = next(member for member in sampler.body if getattr(member, "name", "") == name)
        assert {argument.arg for argument in method.args.kwonlyargs} <= named(flash_sampling.Sampler.__doc__), name
    assert set(flash_sampling.SamplingParams().to_dict()) <= named(flash_sampling.SamplingParams.__doc__)


def scripts():
    """The scripts of the README."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    return [part.partition("```")[0] for part in text.split("```python\n")[1:]]


def test_the_script_of_the_readme_runs():
    library("torch")
    script = scripts()[0]
    assert len(script.splitlines()) == 12
    assert run(script).startswith("tensor(")


def test_the_script_of_all_results_runs():
    token, logprob = run(scripts()[1]).split()[:2]
    assert 0 <= int(token) < 500 and float(logprob) < 0


def test_it_needs_no_other_package():
    code = """if True:
        import sys
        for name in ["numpy", "torch", "jax", "cupy"]:
            sys.modules[name] = None  # an import fails
        import array, ctypes
        import flash_sampling

        class Tensor:
            def __init__(self, values, *shape):
                self.values = array.array("f", values)
                data = self.values.buffer_info()[0], False
                self.__array_interface__ = {"typestr": "<f4", "shape": shape, "data": data, "version": 3}

        sampler = flash_sampling.Sampler(flash_sampling.Head(Tensor([1, 2, 3, 4], 4, 1)))
        print(sampler(Tensor([1, 1], 2, 1), seed=[1, 2], position=0, temperature=0), flash_sampling.noise(1, 2, 3, [4])[0] < 9)
    """
    assert run(code) == "[3, 3] True"


def test_it_imports_no_other_package():
    loaded = run("import sys, flash_sampling; print([n for n in ['numpy', 'torch', 'jax', 'cupy'] if n in sys.modules])")
    assert loaded == "[]"


def test_nvidias_compiler_is_found_in_site_packages():
    if not _nvidia.libraries():
        skip("nvrtc", "no package of NVIDIA's compiler is installed")
    assert run("from flash_sampling import _lib, _nvidia; _nvidia.preload(); print(_lib.cuda_compiler() is not None)") == "True"


def test_a_gpu_that_is_absent_is_an_error():
    if _lib.cuda_compiler() is not None and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    weight = __import__("numpy").ones((4, 4), dtype="float32")
    with pytest.raises(flash_sampling.FlashSamplingError, match="libcuda|GPU"):
        flash_sampling.Sampler(flash_sampling.Head(weight), backend="cuda")
