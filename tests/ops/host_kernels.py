"""Compiles the sources of csrc/cuda for the host: they are C++, but for their launches and shared
memory. Needs no torch.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent / "on_host"
CSRC = HERE.parents[2] / "csrc"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-pthread"]
_LAUNCH = re.compile(
    r"([\w:]+(?:<[^;{}]*?>)?)\s*<<<(.+?), (\w+), 0, stream>>>\((\w+)\);", re.DOTALL
)
_SHARED = re.compile(r"__shared__ ([\w:]+) (\w+)((?:\[\w+\])*);")


def translated(source: str) -> str:
    """Returns a .cu or .cuh file as C++: launches become calls, and shared memory belongs to a
    block.
    """
    synchronizes = "true" if "__syncthreads" in source or "is_last_block" in source else "false"
    source = _LAUNCH.sub(rf"on_host::launch<\1, {synchronizes}>(\2, \3, \4);", source)
    return _SHARED.sub(
        r"static const char of_\2 = 0; auto& \2 = on_host::shared<\1\3>(&of_\2);",
        source,
    )


def copy_sources(folder: Path) -> list[Path]:
    """Copies csrc/ to a folder, translated; returns what came of the .cu files."""
    translations = []
    for path in (*CSRC.glob("*"), *CSRC.glob("cuda/*")):
        if not path.is_file():
            continue
        target, text = folder / path.relative_to(CSRC), path.read_text()
        if path.suffix in (".cu", ".cuh"):
            text = translated(text)
        if path.suffix == ".cu":
            target = target.with_suffix(".cu.cpp")
            translations.append(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return translations


def compile_library(
    library: Path, sources: Sequence[Path], compile_with: Sequence[str], link_with: Sequence[str]
) -> None:
    """Compiles sources, two at a time, and links them; the library appears when it is whole."""
    compilers = {**os.environ, "LD_PRELOAD": ""}  # a sanitizer is for the tests
    objects = [library.parent / f"{path.name}.o" for path in sources]

    def run(*command: str | Path) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=compilers)
        assert done.returncode == 0, done.stderr

    library.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run, "g++", *FLAGS, f"-I{HERE}", *compile_with, "-c", source, "-o", target)
            for source, target in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    partial = library.with_suffix(".partial")
    run("g++", "-shared", "-pthread", *objects, *link_with, "-o", partial)
    partial.rename(library)
