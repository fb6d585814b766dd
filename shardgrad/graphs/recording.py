"""What a step issued, and how two steps differ. A graph repeats operations, numbers and addresses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from shardgrad.graphs.obstacles import Obstacle

__all__ = ["Issued", "Operand", "Recording", "differences"]


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation took or gave.

    Attributes:
        address: of its first element if its memory was there before the step and has not moved; else None.
        name: such as "gradient of layers.0.weight"; "" if it belongs to no module.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Issued:
    """One operation.

    Attributes:
        op: such as "aten.mul_.Scalar".
        numbers: Python numbers among its arguments, with the arguments' names.
        tensors: what it took, then what it gave.
        module, place: as in `Obstacle`.
    """

    op: str
    numbers: tuple[tuple[str, Any], ...]
    tensors: tuple[Operand, ...]
    module: str
    place: str

    def obstacle(self, kind: str, what: str, fix: str) -> Obstacle:
        """Returns an obstacle at this operation's place."""
        return Obstacle(kind, what, self.module, self.place, fix)


@dataclass(frozen=True)
class Recording:
    """What a watched step did.

    Attributes:
        obstacles: in the order in which they were met, one of a kind for each line and module.
        issued: every operation, in order.
    """

    obstacles: tuple[Obstacle, ...]
    issued: tuple[Issued, ...]


def differences(first: Recording, second: Recording) -> list[Obstacle]:
    """Returns what a graph of one step would get wrong in the next, in the order of the steps.

    Numbers that changed and memory that moved are all reported. After an operation or a shape that differs,
    nothing can be compared any more, and that is the last one.

    Args:
        first: of a step in which nothing was made for the first time: the second of a program, or later.
        second: of the step after it.
    """
    found: dict[Any, Obstacle] = {}
    for a, b in zip_longest(first.issued, second.issued):
        course = _another_course(a, b)
        if course is not None:
            found.setdefault(None, course)
            break
        for key, obstacle in (*_changed_numbers(a, b), *_moved_tensors(a, b)):
            found.setdefault(key, obstacle)
    return list(found.values())


def _another_course(a: Issued | None, b: Issued | None) -> Obstacle | None:
    """Compares operations and shapes; either side is None if that step has ended."""
    if a is None or b is None or a.op != b.op:
        one, other = (_in_words(side) for side in (a, b))
        return (b or a or _NOTHING).obstacle(
            "another operation",
            f"where the first step had {one}, the second had {other}",
            "let tensors on the device decide (torch.where), or make each course a step of its own",
        )
    if [(t.shape, t.dtype) for t in a.tensors] == [(t.shape, t.dtype) for t in b.tensors]:
        return None
    pairs = zip_longest(a.tensors, b.tensors)
    one, other = next((str(x), str(y)) for x, y in pairs if str(x) != str(y))
    return b.obstacle(
        "another shape",
        f"{b.op} had a tensor {one} in the first step and {other} in the second",
        "give tensors a fixed size (pad, mask, or a fixed capacity for each expert), or pass what sets the "
        "size as an input, so that each size has a graph",
    )


_NOTHING = Issued("", (), (), "", "")


def _in_words(issued: Issued | None) -> str:
    if issued is None:
        return "ended"
    return f"{issued.op} at {issued.place}" if issued.place else issued.op


Found = Iterator[tuple[Any, Obstacle]]


def _changed_numbers(a: Issued, b: Issued) -> Found:
    before = dict(a.numbers)
    for name, y in b.numbers:
        x = before.get(name)
        if repr(x) != repr(y):  # two NaNs are the same number to a graph
            yield (
                (b.op, name, b.module, b.place),
                b.obstacle(
                    "changed number",
                    f"{name} of {b.op} was {x!r} in the first step and {y!r} in the second",
                    "keep it in a tensor on the device and write that between steps; the optimizers of "
                    "shardgrad.optim keep theirs there",
                ),
            )


def _moved_tensors(a: Issued, b: Issued) -> Found:
    for x, y in zip(a.tensors, b.tensors, strict=True):
        if x.address is not None and y.address is not None and x.address != y.address:
            name = x.name or y.name
            yield (
                name or (x.address, y.address),
                b.obstacle(
                    "moved tensor",
                    f"{b.op} used {name or f'a tensor {y}'} at another address than in the step before",
                    "write into the tensor that is there: x.copy_(new) instead of x = new, "
                    "zero_grad(set_to_none=False) if you keep gradients between steps",
                ),
            )
