"""The compiled ops with a change in their C++: built apart, and loaded in place of
`shardgrad/_C.so`.

Without optimisation beyond -O1: the results are the same to the bit, and compiling takes a third.
Objects of sources that did not change are kept in `build/mutants/`.
"""

from __future__ import annotations

import ast
import hashlib
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from tests.mutants.mutant import ROOT, Mutant

_KEPT = ROOT / "build" / "mutants"
_CSRC = ROOT / "csrc"


class CompileError(RuntimeError):
    """The changed source is not C++."""


@cache
def _flags() -> tuple[str, ...]:
    """Returns the flags of `setup.py`, with -O1."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    flags, defined = [], ""
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "CXX_FLAGS":
            flags += ast.literal_eval(node.value)  # type: ignore[attr-defined]
        elif isinstance(target, ast.Name) and target.id == "STABLE_ABI":
            defined = ast.literal_eval(node.value)  # type: ignore[attr-defined]
    assert flags
    assert defined
    include = Path(torch.__file__).parent / "include"
    common = [f"-DTORCH_TARGET_VERSION={defined}", "-isystem", str(include), "-fPIC", "-w"]
    return (*(flag for flag in flags if not flag.startswith("-O")), "-O1", *common)


def _compile(source: Path, into: Path) -> Path:
    command = ["g++", *_flags(), "-c", str(source), "-o", str(into)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr[-1500:])
    return into


def _object(root: Path, source: Path) -> Path:
    """Returns the object of an unchanged source; compiles it once for each state of the sources."""
    state = hashlib.sha256(repr(_flags()).encode())
    for path in sorted([*root.rglob("*.h"), root / source]):
        state.update(path.read_bytes())
    kept = _KEPT / f"{source.stem}-{state.hexdigest()[:16]}.o"
    if not kept.exists():
        _KEPT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            made = _compile(root / source, Path(folder, "made.o"))
            shutil.move(made, kept.with_suffix(".partial"))
            kept.with_suffix(".partial").rename(kept)
    return kept


def loading(mutant: Mutant, folder: Path) -> Mutant:
    """Builds the library with a change; returns the change of the package that loads it.

    Args:
        mutant: of a file in `csrc/`.
        folder: where the library goes.

    Raises:
        CompileError: the changed source is not C++.
    """
    sources = [
        path.relative_to(_CSRC) for path in sorted([*_CSRC.glob("*.cpp"), *_CSRC.glob("cpu/*.cpp")])
    ]
    changed = Path(mutant.path).relative_to("csrc")
    copy = folder / "csrc"
    shutil.copytree(_CSRC, copy)
    (copy / changed).write_text(mutant.applied(mutant.source()), encoding="utf-8")
    affected = [changed] if changed.suffix == ".cpp" else sources
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(_compile, copy / source, folder / f"{source.stem}.o")
            if source in affected
            else pool.submit(_object, _CSRC, source)
            for source in sources
        ]
        objects = [str(each.result()) for each in made]
    library, lib = folder / "changed.so", Path(torch.__file__).parent / "lib"
    link = [
        "g++",
        "-shared",
        *objects,
        f"-L{lib}",
        "-ltorch_cpu",
        f"-Wl,-rpath,{lib}",
        "-o",
        str(library),
    ]
    subprocess.run(link, check=True)
    before = 'Path(__file__).parents[1] / "_C.so"'
    return Mutant(mutant.name, "ops/library.py", "", before, f"Path({str(library)!r})")
