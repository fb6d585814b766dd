"""Compiles the simulated accelerator with g++, once for each set of sources and version of torch.

Needs g++ and torch's headers, nothing else. The result is kept in `build/simulated/` (git ignores
it); a lock keeps processes that start together from building it twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.ops.host_kernels import compile_library

MODULE = "simulated_accelerator"
_SOURCES = Path(__file__).with_name("csrc")
_CACHE = Path(__file__).parents[3] / "build" / "simulated"
# -O1: the kernels are torch's own, and compiling takes half the time.
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]


def _digest() -> str:
    state = hashlib.sha256()
    state.update(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for path in sorted(_SOURCES.iterdir()):
        state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()[:16]


def _build(library: Path) -> None:
    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    where = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    compile_library(
        library,
        sorted(_SOURCES.glob("*.cpp")),
        [*_FLAGS, *(flag for path in includes for flag in ("-isystem", path))],
        [*where, "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"],
    )


def build() -> Path:
    """Returns the library, compiling it if these sources have not been compiled for this torch
    yet.
    """
    folder = _CACHE / _digest()
    library = folder / f"{MODULE}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return library


def load() -> ModuleType:
    """Returns the compiled module. It registers the device with torch, for good: see
    `device.install`.
    """
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(build()))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
