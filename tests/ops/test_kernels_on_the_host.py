"""The CUDA kernels, compiled for the host, do what the compiled ops of the CPU do: all tests of the ops."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardgrad import ops

ROOT = Path(__file__).parents[2]


@pytest.mark.long  # compiles the kernels
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
@pytest.mark.skipif(ops.backend() != "compiled", reason="shardgrad/_C.so was not built")
@pytest.mark.parametrize("tests", ["test_float8.py", "test_movement.py", "test_norm.py", "test_update.py"])
def test_the_cuda_kernels_pass_the_tests_of_the_ops(tests: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.ops.on_host", f"tests/ops/{tests}"]
    command += ["-k", "not on_the_host"]  # the host does not read what lies on a device
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " skipped" not in done.stdout
