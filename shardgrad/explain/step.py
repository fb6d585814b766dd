"""A step as a graph of events: operations in the host's order, on lanes, with what each waits
for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["COLLECTIVES", "Kind", "Op", "Step"]

Kind = Literal["compute", "copy", "all-gather", "reduce-scatter", "all-reduce", "exchange"]
COLLECTIVES: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "exchange")


@dataclass(frozen=True, slots=True)
class Op:
    """An operation.

    Attributes:
        name: name, as in the trace.
        lane: stream that runs it; operations of one lane run one after the other.
        kind: what it does; "copy" is the engine's work on memory.
        seconds: duration.
        launch_s: seconds that the host takes from the launch before to this one.
        after: positions of operations, on other lanes, that have to end before it begins.
        host_after: positions of operations that have to end before the host launches it.
        link: collectives of one link run one after the other; None for others.
        dtype: dtype of a collective's elements, such as "fp32"; "" if it is not known.
    """

    name: str
    lane: str
    kind: Kind
    seconds: float
    launch_s: float = 0.0
    after: tuple[int, ...] = ()
    host_after: tuple[int, ...] = ()
    link: str | None = None
    dtype: str = ""


@dataclass(frozen=True)
class Step:
    """A step that was recorded.

    Attributes:
        ops: operations, in the order of launches.
        seconds: how long the step took; None if it is not known.
        note: how it was read, for the report.
    """

    ops: tuple[Op, ...]
    seconds: float | None = None
    note: str = ""
