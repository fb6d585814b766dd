"""The operations of a step, and how two steps differ. A graph repeats operations, numbers and
addresses.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardgrad.graphs.preflight.closed_over import Place
from shardgrad.graphs.preflight.issues import Issue

__all__ = ["Operand", "StepTrace", "TracedOp", "differences"]


@dataclass(frozen=True)
class Operand:
    """An input or output tensor of an operation.

    Attributes:
        address: of its first element if its memory existed before the step and has not moved; else
            None.
        name: such as "gradient of layers.0.weight"; "" if it belongs to no module.
        closed_over: where the step found it, and its storage, if it closes over it; else None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int | None = None
    name: str = ""
    closed_over: tuple[Place, StorageWeakRef] | None = None

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class TracedOp:
    """One operation.

    Attributes:
        op: such as "aten.mul_.Scalar".
        numbers: Python numbers among its arguments, with the arguments' names.
        tensors: its inputs, then its outputs.
        module, location: as in `Issue`.
    """

    op: str
    numbers: tuple[tuple[str, Any], ...]
    tensors: tuple[Operand, ...]
    module: str
    location: str

    def issue(self, kind: str, what: str, fix: str) -> Issue:
        """Returns an issue at this operation's location."""
        return Issue(kind, what, self.module, self.location, fix)


@dataclass(frozen=True)
class StepTrace:
    """What a watched step did.

    Attributes:
        issues: in the order in which they were found, one of a kind for each line and module.
        ops: every operation, in order.
    """

    issues: tuple[Issue, ...]
    ops: tuple[TracedOp, ...]


def differences(first: StepTrace, second: StepTrace) -> list[Issue]:
    """Returns what a graph of one step would get wrong in the next, in the order of execution.

    Every changed number and every moved or replaced tensor is reported. The comparison ends at the
    first operation or shape that differs, which is the last issue.

    Args:
        first: of a step that initializes nothing: the second step of a program, or a later one.
        second: of the step after it.
    """
    found: dict[Any, Issue] = {}
    for a, b in zip_longest(first.ops, second.ops):
        divergence = _divergence(a, b)
        if divergence is not None:
            found.setdefault(None, divergence)
            break
        for key, issue in (
            *_changed_numbers(a, b),
            *_moved_tensors(a, b),
            *_replaced_tensors(a, b),
        ):
            found.setdefault(key, issue)
    return list(found.values())


def _divergence(a: TracedOp | None, b: TracedOp | None) -> Issue | None:
    """Compares operators and shapes; None stands for the end of a step."""
    if a is None or b is None or a.op != b.op:
        one, other = (_describe(side) for side in (a, b))
        return (b or a or _NO_OP).issue(
            "another operation",
            f"where the first step had {one}, the second had {other}",
            "let tensors on the device decide (torch.where), or make each case a separate step",
        )
    if [(t.shape, t.dtype) for t in a.tensors] == [(t.shape, t.dtype) for t in b.tensors]:
        return None
    pairs = zip_longest(a.tensors, b.tensors)
    one, other = next((str(x), str(y)) for x, y in pairs if str(x) != str(y))
    return b.issue(
        "another shape",
        f"{b.op} had a tensor {one} in the first step and {other} in the second",
        "give tensors a fixed size (pad, mask, or a fixed capacity for each expert), or pass what "
        "sets the "
        "size as an input, so that each size has a graph",
    )


_NO_OP = TracedOp("", (), (), "", "")


def _describe(op: TracedOp | None) -> str:
    if op is None:
        return "ended"
    return f"{op.op} at {op.location}" if op.location else op.op


Found = Iterator[tuple[Any, Issue]]  # with a key that is the same for repetitions


def _changed_numbers(a: TracedOp, b: TracedOp) -> Found:
    before = dict(a.numbers)
    for name, y in b.numbers:
        x = before.get(name)
        if repr(x) != repr(y):  # two NaNs are the same number to a graph
            yield (
                (b.op, name, b.module, b.location),
                b.issue(
                    "changed number",
                    f"{name} of {b.op} was {reprlib.repr(x)} in the first step and "
                    f"{reprlib.repr(y)} in the second",
                    "keep it in a tensor on the device and write that between steps; the "
                    "optimizers of "
                    "shardgrad.optim keep theirs there",
                ),
            )


def _moved_tensors(a: TracedOp, b: TracedOp) -> Found:
    for x, y in zip(a.tensors, b.tensors, strict=True):
        if x.address is not None and y.address is not None and x.address != y.address:
            name = x.name or y.name
            yield (
                name or (x.address, y.address),
                b.issue(
                    "moved tensor",
                    f"{b.op} used {name or f'a tensor {y}'} at another address than in the step "
                    f"before",
                    "write into the tensor that is there: x.copy_(new) instead of x = new, "
                    "zero_grad(set_to_none=False) if you keep gradients between steps",
                ),
            )


def _replaced_tensors(a: TracedOp, b: TracedOp) -> Found:
    for x, y in zip(a.tensors, b.tensors, strict=True):
        # The weak reference of the first step keeps its identity from another storage.
        if x.closed_over and y.closed_over and x.closed_over[1] != y.closed_over[1]:
            place, _ = y.closed_over
            yield (
                ("replaced", place.name),
                b.issue(
                    "replaced tensor",
                    f"{b.op} read {place.name}, which is not an argument, and was another tensor "
                    f"in the step "
                    "before",
                    "pass it as an argument, or write into the tensor that is there: x.copy_(new) "
                    "instead of "
                    "x = new",
                ),
            )
