"""The order that the engine makes, edge by edge, found by running it, and the engine with one edge
taken out.

All order between streams is made by marks (`shardgrad/engine/streams.py`) and by collectives. An
*edge* is a place that records a mark, and a place where another stream waits for it. A slot's
methods record and wait for whoever calls them, so the caller is the place. Waits on the mark's own
stream order nothing: no edges.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import shardgrad
import shardgrad.engine.streams
from tests.simulated.accelerator import collectives

_ENGINE = str(Path(shardgrad.__file__).parent)
_MarkOfAnEvent: Any = shardgrad.engine.streams._DeviceEvent
# They record and wait for their callers.
_FOR_OTHERS = (
    "SlotRing.take",
    "Slot.release",
    "Reduction._release",
    "AllGather.wait",
    "AllGather.release",
)


@dataclass(frozen=True, order=True)
class Edge:
    """Work before `recorded` comes before work after `awaited`.

    Attributes:
        recorded: "file:function", of whoever leaves the mark.
        awaited: the same, of whoever waits for it.
    """

    recorded: str
    awaited: str

    def __str__(self) -> str:
        return f"{self.recorded} -> {self.awaited}"


# The process group's own: what was launched before a collective, and what is launched after it.
BEFORE_A_COLLECTIVE = Edge("caller's stream", "process group:launch")
AFTER_A_COLLECTIVE = Edge("process group:launch", "process group:wait")
_OUTSIDE = "outside of the engine"
# Parameters that are replaced while an update runs: after the program has told of it, or before.
UPDATES_TOLD_OF = Edge(_OUTSIDE, "unit.py:RootContext.join_post_optim_event")
REPLACEMENTS = Edge("param_group.py:ParamGroup.unshard", "param_group.py:ParamGroup.unshard")
NOT_IN_THE_MATRIX = (UPDATES_TOLD_OF, REPLACEMENTS)


def _place(frame: FrameType | None) -> str:
    """Returns the innermost place in the engine that is not one of those who act for others."""
    through = ""
    while frame is not None:
        code = frame.f_code
        path = Path(code.co_filename)
        name = code.co_qualname
        if not str(path).startswith(_ENGINE) or path.name == "streams.py":
            pass
        elif name.startswith(_FOR_OTHERS):
            through = through or name
        else:
            return f"{path.name}:{name}" + (f" by {through}" if through else "")
        frame = frame.f_back
    return _OUTSIDE


class _Watch:
    """What marks report to, and which of their edges is taken out."""

    def __init__(self, removed: Edge | None) -> None:
        self.removed = removed
        self.seen: dict[Edge, int] = {}

    def passes(self, edge: Edge) -> bool:
        """Notes an edge; False if it is the one that is taken out."""
        self.seen[edge] = self.seen.get(edge, 0) + 1
        return edge != self.removed


class _WatchedMark(_MarkOfAnEvent):  # type: ignore[misc]
    """A mark that knows who recorded it; a program records its own."""

    __slots__ = ("_place",)
    watch: _Watch

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._place = _OUTSIDE

    def record(self, stream: Any) -> None:
        self._place = _place(sys._getframe(1))
        super().record(stream)

    def wait(self, stream: Any) -> None:
        if self._era != self._streams.era or self._stream == stream:
            return
        if self.watch.passes(Edge(self._place, _place(sys._getframe(1)))):
            super().wait(stream)


@contextlib.contextmanager
def watched(removed: Edge | None = None) -> Iterator[dict[Edge, int]]:
    """Yields how often each edge was made by the engines that are built in this context.

    Args:
        removed: an edge that is not made: the wait does nothing.
    """
    watch = _Watch(removed)
    marks = type("_WatchedMark", (_WatchedMark,), {"__slots__": (), "watch": watch})
    enter, wait = collectives.SimulatedGroup._enter, collectives.Work.wait

    def watched_enter(self: Any, ready: torch.Event) -> None:
        if watch.passes(BEFORE_A_COLLECTIVE):
            enter(self, ready)

    def watched_wait(self: Any, timeout: Any = None) -> bool:
        if watch.passes(AFTER_A_COLLECTIVE):
            return wait(self, timeout)
        self._tensors = []
        return True

    shardgrad.engine.streams._DeviceEvent = marks  # type: ignore[misc]
    collectives.SimulatedGroup._enter = watched_enter  # type: ignore[method-assign]
    collectives.Work.wait = watched_wait  # type: ignore[method-assign]
    try:
        yield watch.seen
    finally:
        shardgrad.engine.streams._DeviceEvent = _MarkOfAnEvent
        collectives.SimulatedGroup._enter = enter  # type: ignore[method-assign]
        collectives.Work.wait = wait  # type: ignore[method-assign]
