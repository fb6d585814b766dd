"""Runs the CUDA kernels of csrc/cuda on the host, in the place of the CPU's: a pytest plugin.

    python -m pytest -p tests.ops.on_host tests/ops

Under AddressSanitizer and UBSan:

    export ON_HOST_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0
    export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
    python -m pytest -p tests.ops.on_host tests/ops

The sources are compiled as C++, with a `cuda_runtime.h` of the tests, and registered for the CPU.
So every test that compares the compiled ops with torch, bit for bit, compares these. Blocks and
their threads run in an order that is drawn from ON_HOST_SEED, and a few blocks at once, so that
what has no order has wrong values. What this says nothing about: time, memory that another block
writes and this one has cached, and powers, which are the host's here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.host_kernels import CSRC, FLAGS, HERE, compile_library, copy_sources


def kernels() -> Path:
    """Compiles the kernels, once for each state of the sources; returns the library."""
    root = Path(torch.__file__).parent
    options = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-isystem", str(root / "include")]
    link = [f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    if sanitizers := os.environ.get("ON_HOST_SANITIZE"):
        options += ["-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined"]
    state = hashlib.sha256(f"{torch.__version__}{FLAGS}{options}".encode())
    built_by = HERE.parent / "host_kernels.py"
    for path in sorted((*CSRC.rglob("*.*"), *HERE.glob("*.cpp"), *HERE.glob("*.h"), built_by)):
        state.update(path.read_bytes())
    folder = Path(tempfile.gettempdir(), f"shardgrad-kernels-{state.hexdigest()[:16]}")
    library = folder / "kernels.so"
    if library.exists():
        return library
    copies = folder / "csrc"
    copy_sources(copies)
    for path in copies.glob("cuda/*ops.cpp"):
        path.write_text(
            path.read_text().replace(
                "LIBRARY_IMPL(shardgrad, CUDA,", "LIBRARY_IMPL(shardgrad, CPU,"
            )
        )
    (copies / "cuda/binding.h").write_text((HERE / "binding.h").read_text())
    compile_library(library, [*copies.rglob("*.cpp"), HERE / "control.cpp"], options, link)
    return library


def pytest_configure(config: pytest.Config) -> None:
    """Has `import shardgrad` load these kernels."""
    load, library = torch.ops.load_library, kernels()

    def load_kernels(path: Any) -> None:
        load(library if Path(path).name == "_C.so" else path)

    torch.ops.load_library = load_kernels


def only_blocks(blocks: Sequence[int]) -> None:
    """Has only these blocks of each row of a grid run, or all if there are none."""
    machine().on_host_only_blocks(
        (ctypes.c_uint * len(blocks))(*blocks), ctypes.c_size_t(len(blocks))
    )


def processors(count: int) -> None:
    """Sets how many blocks of an update are resident, before the first update."""
    machine().on_host_processors(count)


def machine() -> ctypes.CDLL:
    """Returns the library, which is loaded."""
    return ctypes.CDLL(str(kernels()))
