"""A client: a program that knows nothing of this project, under a name, with the packages it needs.

It shards with whatever `torch.distributed.fsdp` and its frameworks give it, trains, and returns its
sharded model and what is to be equal under both engines: losses, norms, saved states.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.under_patch import ClientProgram, results_under_both


@dataclass(frozen=True)
class Client:
    """A program.

    Attributes:
        program: at the top of its module.
        packages: that it needs.
        options: arguments of the program.
        is_tested: it is a test, too; others are only run for the record.
    """

    program: ClientProgram
    packages: tuple[str, ...]
    options: dict[str, Any]
    is_tested: bool


CLIENTS: dict[str, Client] = {}


def client(
    name: str, /, *packages: str, is_tested: bool = True, **options: Any
) -> Callable[[ClientProgram], ClientProgram]:
    """Enters a program: whose it is, and what it does."""

    def enter(program: ClientProgram) -> ClientProgram:
        CLIENTS[name] = Client(program, packages, options, is_tested)
        return program

    return enter


def with_sources(
    sources: str, runs: Callable[..., Any], program: ClientProgram, options: dict[str, Any]
) -> Any:
    """Runs a program as `runs` does, with more packages."""
    if sources and sources not in sys.path:
        sys.path.append(sources)  # the last, as packages there may bring tests of their own
    return runs(program, **options)


def alone(program: ClientProgram, **options: Any) -> None:
    """Runs a program under FSDP2."""
    torch.manual_seed(0)
    program(**options)


def compared(program: ClientProgram, **options: Any) -> dict[str, Any]:
    """Runs a program with both engines; returns whether they end in the same bits."""
    ours, theirs = results_under_both(program, **options)
    is_same = ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    off = 0.0
    for key, expected in theirs.items():
        values = expected.double()
        distance = (ours[key].double() - values).norm() / values.norm().clamp_min(1e-30)
        off = max(off, float(distance))
    return {"verdict": "same bits" if is_same else "differs", "off": off, "values": len(theirs)}
