"""How many engine functions and files one forward and one backward go through, ours and FSDP2's.

The model is two `nn.Linear` units and a root (`fully_shard` on each Linear, then on the
`nn.Sequential` around them), in fp32, on one gloo rank on the CPU. After three whole training steps
with `torch.optim.SGD`, one forward and one backward are watched with `sys.setprofile`:

- A *call* is a call of a Python function (or lambda, property, generator that goes on; on Python
  3.11 also a comprehension) whose code lies in a file of the engine. C functions, torch's other
  files and `shardgrad.ops` are not counted: operators are to shardgrad what `torch._foreach_copy_`
  is to FSDP2.
- *Files entered* are the different files of these calls.
- *Changes of file* are the neighbours in the sequence of calls that lie in different files. Returns
  are left out: a helper in another file, called once, is one change on the way in, and one more
  where the next call lies in the first file again.

The engine's files are found by the folder of its package alone, so moving them needs no change
here.

    python -m benchmarks calls            # the table
    python -m benchmarks calls --list     # and, for each engine, the calls in order and by file
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click

from benchmarks.run import Run
from benchmarks.workers import one_rank

_WARM_UP_STEPS = 3
_PHASES = ("forward", "backward")


class _Engine:
    """An engine's `fully_shard`, and which files are its own.

    Args:
        package: import name of the package whose files count.
        function: module and name of `fully_shard`.
        aside: import names of packages inside it that do not count.
    """

    def __init__(self, package: str, function: tuple[str, str], aside: Sequence[str] = ()) -> None:
        self.fully_shard: Callable[..., Any] = getattr(
            importlib.import_module(function[0]), function[1]
        )
        self.folder = _folder(package)
        self._aside = tuple(f"{_folder(name)}/" for name in aside)

    def has(self, code: CodeType) -> bool:
        """Whether a function is the engine's."""
        path = code.co_filename
        return path.startswith(f"{self.folder}/") and not path.startswith(self._aside)


def _folder(package: str) -> str:
    return next(iter(importlib.import_module(package).__path__))


def count(folder: str, calls: Sequence[CodeType]) -> dict[str, Any]:
    """What a sequence of calls amounts to.

    Args:
        folder: of the engine; files are named relative to it.
        calls: the functions called, in order.
    """
    files = [str(Path(code.co_filename).relative_to(folder)) for code in calls]
    return {
        "calls": len(calls),
        "files": len(set(files)),
        "changes_of_file": sum(one != other for one, other in itertools.pairwise(files)),
        "calls_by_file": dict(Counter(files).most_common()),
        "sequence": [f"{file}:{code.co_qualname}" for file, code in zip(files, calls, strict=True)],
    }


def watched(engine: _Engine, function: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Calls a function; returns its result, and what of the engine it called."""
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and engine.has(frame.f_code):
            calls.append(frame.f_code)

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, count(engine.folder, calls)


def measure() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns counts by engine and phase; needs a process group of one rank."""
    import torch
    from torch import nn

    engines = {
        "fsdp2": _Engine(
            "torch.distributed.fsdp._fully_shard", ("torch.distributed.fsdp", "fully_shard")
        ),
        "shardgrad": _Engine("shardgrad", ("shardgrad", "fully_shard"), aside=["shardgrad.ops"]),
    }
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, engine in engines.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            engine.fully_shard(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(2, 4)
        for _ in range(_WARM_UP_STEPS):
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        outputs, forward = watched(engine, lambda model=model, inputs=inputs: model(inputs))
        _, backward = watched(engine, outputs.sum().backward)
        found[name] = dict(zip(_PHASES, (forward, backward), strict=True))
    return found


@click.command()
@click.option(
    "--list", "is_list", is_flag=True, help="Print every call in order, and the calls by file."
)
@click.pass_obj
def main(run: Run, is_list: bool) -> None:
    """Count the engine's calls in a forward and a backward of two Linear units."""
    with one_rank():
        found = measure()
    if is_list:
        for name, of in found.items():
            for phase, one in of.items():
                click.echo(f"\n{name}, {phase}:")
                click.echo("\n".join(f"  {call}" for call in one["sequence"]))
                click.echo(
                    "\n".join(f"  {calls:4} {file}" for file, calls in one["calls_by_file"].items())
                )
    kept = ("files", "changes_of_file", "calls")
    run.finish(
        "calls",
        config={"units": 2, "ranks": 1, "warm_up_steps": _WARM_UP_STEPS},
        samples={
            phase: {name: of[phase]["sequence"] for name, of in found.items()} for phase in _PHASES
        },
        summary={
            phase: {name: {key: of[phase][key] for key in kept} for name, of in found.items()}
            for phase in _PHASES
        },
    )
