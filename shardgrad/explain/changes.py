"""What a change would save: the same graph of events, changed and replayed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardgrad.explain.replay import replay
from shardgrad.explain.step import COLLECTIVES, Op

__all__ = ["CHANGES", "Change", "Saving", "savings"]

_REDUCTIONS = ("reduce-scatter", "all-reduce")
_LATENCY_S = 30e-6  # of a collective, at most, if the record has none that is shorter


@dataclass(frozen=True)
class Change:
    """A change of a step.

    Attributes:
        name: what changes.
        how: what to do for it; "" if it only shows a limit.
        applied: returns the changed operations.
    """

    name: str
    how: str
    applied: Callable[[Sequence[Op]], list[Op]]


@dataclass(frozen=True)
class Saving:
    """A change and the step after it.

    Attributes:
        change: the change.
        seconds: the changed step.
        share: change of the step's time, as a fraction; negative if it is faster.
    """

    change: Change
    seconds: float
    share: float


def savings(ops: Sequence[Op]) -> list[Saving]:
    """Returns what each change would save, largest first, without those that change nothing."""
    before = replay(ops).seconds
    found = []
    for change in CHANGES:
        changed = change.applied(ops)
        if changed != list(ops):
            seconds = replay(changed).seconds
            found.append(Saving(change, seconds, seconds / before - 1 if before else 0.0))
    return sorted(found, key=lambda saving: saving.seconds)


def graphed(ops: Sequence[Op]) -> list[Op]:
    """The whole step is one graph: the host launches once, and waits for nothing in between."""
    first = ops[0].launch_s if ops else 0.0
    return [
        dataclasses.replace(op, launch_s=first if number == 0 else 0.0, host_after=())
        for number, op in enumerate(ops)
    ]


def half_precision_reductions(ops: Sequence[Op]) -> list[Op]:
    """Reductions in bf16 instead of fp32: half the bytes.

    The latency stays. The shortest collective of a link shows how long it is, at most.
    """
    latency: dict[str | None, float] = {}
    for op in ops:
        if op.kind in COLLECTIVES:
            latency[op.link] = min(op.seconds, latency.get(op.link, _LATENCY_S))
    return [
        dataclasses.replace(op, seconds=(op.seconds + latency[op.link]) / 2, dtype="bf16")
        if op.kind in _REDUCTIONS and op.dtype == "fp32"
        else op
        for op in ops
    ]


def faster_links(ops: Sequence[Op], *, factor: float = 2.0) -> list[Op]:
    """Collectives take a fraction of their time."""
    return [
        dataclasses.replace(op, seconds=op.seconds / factor) if op.kind in COLLECTIVES else op
        for op in ops
    ]


def free_collectives(ops: Sequence[Op]) -> list[Op]:
    """Collectives take no time: what the other work takes alone."""
    return [dataclasses.replace(op, seconds=0.0) if op.kind in COLLECTIVES else op for op in ops]


def faster_compute(ops: Sequence[Op], *, share: float = 0.1) -> list[Op]:
    """The model's kernels take less time."""
    return [
        dataclasses.replace(op, seconds=op.seconds * (1 - share)) if op.kind == "compute" else op
        for op in ops
    ]


def one_more_prefetch(ops: Sequence[Op]) -> list[Op]:
    """Each all-gather is launched where the one before it is, and waits for what that one waits
    for.
    """
    gathers = [number for number, op in enumerate(ops) if op.kind == "all-gather"]
    if len(gathers) < 2:
        return list(ops)
    place = {number: float(number) for number in range(len(ops))}
    waits = {number: ops[number].after for number in range(len(ops))}
    for before, number in itertools.pairwise(gathers):
        place[number] = before + 0.5
        waits[number] = tuple(other for other in ops[before].after if other < before)
    order = sorted(range(len(ops)), key=lambda number: place[number])
    position = {number: new for new, number in enumerate(order)}
    changed = []
    for new, number in enumerate(order):
        after = tuple(position[other] for other in waits[number] if position[other] < new)
        host_after = tuple(
            position[other] for other in ops[number].host_after if position[other] < new
        )
        changed.append(dataclasses.replace(ops[number], after=after, host_after=host_after))
    return changed


CHANGES = (
    Change("graphed", "@shardgrad.graphed_step(model, optimizer)", graphed),
    Change(
        "reductions in bf16",
        "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16); sums round",
        half_precision_reductions,
    ),
    Change(
        "one more prefetch",
        "set_modules_to_forward_prefetch and ..._backward_prefetch",
        one_more_prefetch,
    ),
    Change(
        "links twice as fast", "another network or mesh, such as replicas of a node", faster_links
    ),
    Change("kernels 10 % faster", "torch.compile of each block, for example", faster_compute),
    Change("free communication", "", free_collectives),
)
