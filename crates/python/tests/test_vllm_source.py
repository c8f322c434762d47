"""The plugin over vLLM's own code, in a process of its own: Triton must not be loaded before it interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import library, skip


@pytest.mark.parametrize("name", ["vllm_source_tests.py", "vllm_schedule_tests.py"])
def test_the_plugin_over_the_code_of_vllm(name):
    library("torch")
    library("triton")
    if "VLLM_SOURCE" not in os.environ:
        skip("vllm-source", "VLLM_SOURCE does not name the folder of vLLM's package")
    tests = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout
