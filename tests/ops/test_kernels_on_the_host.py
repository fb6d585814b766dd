"""The CUDA kernels, compiled for the host, do what the compiled ops of the CPU do: all tests of the
ops.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardgrad import ops

ROOT = Path(__file__).parents[2]
TESTS = ["test_contract.py", "test_movement.py", "test_norm.py", "test_update.py"]

pytestmark = [
    pytest.mark.long,  # compiles the kernels
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH"),
    pytest.mark.skipif(ops.backend() != "compiled", reason="shardgrad/_C.so was not built"),
]


def require_passed(tests: str, but: str = "on_the_host", **environment: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.ops.on_host",
        f"tests/ops/{tests}",
    ]
    command += ["-k", f"not ({but})"]  # the host does not read what lies on a device
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert " skipped" not in done.stdout


def library(name: str) -> str:
    command = ["g++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("tests", TESTS)
def test_the_cuda_kernels_pass_the_tests_of_the_ops(tests: str) -> None:
    require_passed(tests)


def test_the_cuda_kernels_index_more_than_2_to_31_elements() -> None:
    require_passed("on_host/far_elements.py")


@pytest.mark.parametrize("tests", TESTS)
def test_the_cuda_kernels_stay_in_the_memory_of_their_arguments(tests: str) -> None:
    require_passed(
        tests,
        "on_the_host or whatever_the_threads or between_tiles",  # large tensors are slow there
        ON_HOST_SANITIZE="address,undefined",
        ON_HOST_SEED="1",
        ASAN_OPTIONS="detect_leaks=0",
        LD_PRELOAD=f"{library('libasan.so')} {library('libubsan.so')}",
    )
