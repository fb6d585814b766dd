"""What a reader of the engine has to hold: its size, what a step imports, the calls of one step.

Everything is printed beside FSDP2, which is read in the installed torch.

- *Nodes* are the nodes of a file's syntax tree, without docstrings and without the markers that say
  whether a name is read or written. Comments and line breaks do not change them.
- *Imports* are the engine's modules that are loaded once a model of two `nn.Linear` units has
  trained for a step with `torch.optim.SGD`, in a process of its own.
- A *call* is a call of a Python function whose code lies in a file of the engine, in one forward or
  one backward of that model on rank 0 of two gloo ranks, after three whole steps. Operators
  (`shardgrad.ops`) are left out, as torch's are for FSDP2. *Changes of file* are neighbors in the
  sequence of calls that lie in different files.
- *Private names* are attributes with a leading underscore that the package reads and defines
  nowhere, and private modules and names that it imports from torch.

    python -m benchmarks reading            # the tables
    python -m benchmarks reading --list     # and every call in order, and the private names
"""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click

from benchmarks.records import ROOT
from benchmarks.run import Run
from benchmarks.workers import on_ranks

_RANKS = 2
_WARM_UP_STEPS = 3
_PHASES = ("forward", "backward")
_PACKAGES = {"fsdp2": "torch.distributed.fsdp._fully_shard", "shardgrad": "shardgrad"}
_FULLY_SHARD = {"fsdp2": "torch.distributed.fsdp", "shardgrad": "shardgrad"}
_CORE = ("engine", "sharding", "fully_shard.py", "module.py")

# Run in a process of its own: which of an engine's modules one training step has loaded.
_STEP = """
import sys, torch, json
from importlib import import_module
fully_shard = import_module(sys.argv[1]).fully_shard
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
for module in (*model, model):
    fully_shard(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
package = sys.argv[2]
loaded = [m for n, m in sys.modules.items() if n == package or n.startswith(package + ".")]
print(json.dumps([m.__file__ for m in loaded if str(getattr(m, "__file__", "")).endswith(".py")]))
torch.distributed.destroy_process_group()
"""


def nodes(tree: ast.AST) -> int:
    """Counts the nodes of a syntax tree, without docstrings and expression contexts."""
    count = 0
    for node in ast.walk(tree):
        count += not isinstance(node, ast.expr_context)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            count -= 2 * (ast.get_docstring(node, clean=False) is not None)
    return count


def size(files: Iterable[Path]) -> dict[str, int]:
    """Returns the size of some files."""
    texts = [file.read_text(encoding="utf-8") for file in files]
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts),
        "nodes": sum(nodes(ast.parse(text)) for text in texts),
    }


def private_names(folder: Path) -> list[str]:
    """Returns private names of torch that the package in `folder` uses; see the module."""
    used: set[str] = set()
    own: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                    is_private = any(part.startswith("_") for part in module.split("."))
                    used.update(
                        f"{module}.{each.name}"
                        for each in names
                        if is_private or each.name.startswith("_")
                    )
                case ast.Attribute(attr=name, ctx=ast.Load()) if _is_private(name):
                    used.add(name)
                case (
                    ast.Attribute(attr=name)
                    | ast.FunctionDef(name=name)
                    | ast.Name(id=name, ctx=ast.Store())
                    | ast.alias(asname=str(name))
                ):
                    own.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.ClassDef(name=name):
                    own.add(name)
    return sorted(used - own)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _folder(package: str) -> Path:
    return Path(importlib.import_module(package).__path__[0])


def imported(engine: str) -> dict[str, int]:
    """Returns how many of an engine's modules a training step loads, and their nodes."""
    command = [sys.executable, "-c", _STEP, _FULLY_SHARD[engine], _PACKAGES[engine]]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    files = [Path(file) for file in json.loads(done.stdout.splitlines()[-1])]
    found = size(files)
    return {"modules": found["files"], "nodes": found["nodes"]}


def count(folder: str, calls: Sequence[CodeType]) -> dict[str, Any]:
    """Returns what a sequence of calls amounts to.

    Args:
        folder: of the engine; files are named relative to it.
        calls: the functions called, in order.
    """
    files = [str(Path(code.co_filename).relative_to(folder)) for code in calls]
    return {
        "calls": len(calls),
        "files": len(set(files)),
        "changes_of_file": sum(one != other for one, other in itertools.pairwise(files)),
        "sequence": [f"{file}:{code.co_qualname}" for file, code in zip(files, calls, strict=True)],
    }


def watched(engine: str, function: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Calls a function; returns its result, and what of the engine it called."""
    folder = str(_folder(_PACKAGES[engine]))
    # FSDP2 calls torch there, which is not counted either: kernels, events of streams, and spans.
    aside = tuple(f"{folder}/{part}" for part in ("ops/", "engine/streams.py", "engine/tracing.py"))
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{folder}/") and not path.startswith(aside):
            calls.append(frame.f_code)

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, count(folder, calls)


def one_step(engine: str) -> dict[str, dict[str, Any]]:
    """Returns the calls of a forward and of a backward, on a rank of a process group."""
    import torch
    from torch import nn

    fully_shard = importlib.import_module(_FULLY_SHARD[engine]).fully_shard
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(2, 4)
    for _ in range(_WARM_UP_STEPS):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    outputs, forward = watched(engine, lambda: model(inputs))
    _, backward = watched(engine, outputs.sum().backward)
    return dict(zip(_PHASES, (forward, backward), strict=True))


def _files(engine: str) -> dict[str, list[Path]]:
    """Returns the files of an engine by the part that they belong to."""
    folder = _folder(_PACKAGES[engine])
    if engine == "fsdp2":
        return {"core": sorted(folder.rglob("*.py"))}
    parts = [folder / part for part in _CORE]
    core = [file for part in parts for file in ([part] if part.is_file() else part.rglob("*.py"))]
    return {"core": sorted(core), "package": sorted(folder.rglob("*.py"))}


@click.command()
@click.option("--list", "is_list", is_flag=True, help="Print every call, and private names.")
@click.pass_obj
def main(run: Run, is_list: bool) -> None:
    """Count what a reader of the engine has to hold, beside FSDP2."""
    sizes = {
        f"{engine}, {part}": size(files)
        for engine in _PACKAGES
        for part, files in _files(engine).items()
    }
    private = private_names(_folder("shardgrad"))
    imports = {engine: imported(engine) for engine in _PACKAGES}
    steps = {
        engine: on_ranks("benchmarks.reading:one_step", _RANKS, engine)[0] for engine in _PACKAGES
    }
    if is_list:
        for engine, phases in steps.items():
            for phase, one in phases.items():
                click.echo(f"\n{engine}, {phase}:")
                click.echo("\n".join(f"  {call}" for call in one["sequence"]))
        click.echo("\nprivate names of torch:")
        click.echo("\n".join(f"  {name}" for name in private))
    kept = ("calls", "files", "changes_of_file")
    run.finish(
        "reading",
        config={"units": 2, "ranks": _RANKS, "warm_up_steps": _WARM_UP_STEPS},
        samples={
            "calls": {e: {p: s["sequence"] for p, s in of.items()} for e, of in steps.items()}
        },
        summary={
            "size": sizes,
            "imports": imports,
            "private_names": {"shardgrad": {"names": len(private)}},
            **{
                phase: {e: {key: of[phase][key] for key in kept} for e, of in steps.items()}
                for phase in _PHASES
            },
        },
    )
