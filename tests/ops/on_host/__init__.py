"""Runs the CUDA kernels of csrc/cuda on the host, in the place of the CPU's: a pytest plugin.

    python -m pytest -p tests.ops.on_host tests/ops

Under AddressSanitizer and UBSan:

    export ON_HOST_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0
    export LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
    python -m pytest -p tests.ops.on_host tests/ops

The sources are compiled as C++, with a `cuda_runtime.h` of the tests, and registered for the CPU. So every
test that compares the compiled ops with torch, bit for bit, compares these. What this says nothing about:
whether memory is aligned as a device wants it, races between blocks, and powers, which are the host's here.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "csrc"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-ffp-contract=off",
    "-pthread",
    "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
]
if SANITIZERS := os.environ.get("ON_HOST_SANITIZE"):
    FLAGS += ["-g", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=undefined"]
LAUNCH = re.compile(r"([\w:]+(?:<[^;{}]*?>)?)\s*<<<(.+?), (\w+), 0, stream>>>\((\w+)\);", re.DOTALL)


def translated(source: str) -> str:
    """Returns a .cu file as C++: launches become calls."""
    synchronises = "true" if "__syncthreads" in source or "is_last_block" in source else "false"
    return LAUNCH.sub(rf"on_host::launch(\2, \3, {synchronises}, [&] {{ \1(\4); }});", source)


def build() -> Path:
    """Compiles the kernels, once for each state of the sources; returns the library."""
    sources = sorted(
        path for path in (*CSRC.rglob("*"), *HERE.glob("*")) if path.is_file() and path.suffix != ".pyc"
    )
    state = hashlib.sha256(f"{torch.__version__}{FLAGS}".encode())
    for path in sources:
        state.update(path.read_bytes())
    folder = Path(tempfile.gettempdir(), f"shardgrad-kernels-{state.hexdigest()[:16]}")
    library = folder / "kernels.so"
    if library.exists():
        return library
    copies = folder / "csrc"
    for path in (*CSRC.glob("*"), *CSRC.glob("cuda/*")):
        if path.is_file():
            target = copies / path.relative_to(CSRC)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text()
            if path.suffix == ".cu":
                target, text = target.with_suffix(".cu.cpp"), translated(text)
            target.write_text(text.replace("LIBRARY_IMPL(shardgrad, CUDA,", "LIBRARY_IMPL(shardgrad, CPU,"))
    (copies / "cuda/binding.h").write_text((HERE / "binding.h").read_text())
    root = Path(torch.__file__).parent
    compilers = {**os.environ, "LD_PRELOAD": ""}  # a sanitizer is for the tests
    objects = {path: path.with_suffix(".o") for path in copies.rglob("*.cpp")}
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(
            lambda item: subprocess.run(
                ["g++", *FLAGS, f"-I{HERE}", "-isystem", root / "include", "-c", item[0], "-o", item[1]],
                capture_output=True,
                text=True,
                check=False,
                env=compilers,
            ),
            objects.items(),
        ):
            assert done.returncode == 0, done.stderr
    partial = folder / "partial.so"
    link = [
        "g++",
        "-shared",
        "-pthread",
        *objects.values(),
        f"-L{root}/lib",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        partial,
    ]
    subprocess.run([*link, f"-Wl,-rpath,{root}/lib"], check=True, env=compilers)
    return partial.rename(library)


def pytest_configure(config: pytest.Config) -> None:
    """Has `import shardgrad` load these kernels."""
    load, library = torch.ops.load_library, build()

    def load_kernels(path: Any) -> None:
        load(library if Path(path).name == "_C.so" else path)

    torch.ops.load_library = load_kernels
