"""Replays a step: when each operation begins and ends, what it waited for, and the critical
path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardgrad.explain.step import COLLECTIVES, Op

__all__ = ["Replay", "replay"]

_HOST = -1


@dataclass(frozen=True)
class Replay:
    """A replayed step. Positions are those of the operations; times are in seconds.

    Attributes:
        ops: the operations.
        begins: begin of each.
        ends: end of each.
        causes: for each, the operation whose end let it begin; -1 if it was its launch by the host.
        seconds: end of the last one.
    """

    ops: tuple[Op, ...]
    begins: tuple[float, ...]
    ends: tuple[float, ...]
    causes: tuple[int, ...]
    seconds: float

    def critical_path(self) -> list[int]:
        """Returns the operations, first to last, that each let the next one begin.

        Before the first of them, the host launches.
        """
        path: list[int] = []
        current = max(range(len(self.ops)), key=lambda number: self.ends[number], default=_HOST)
        while current != _HOST:
            path.append(current)
            current = self.causes[current]
        return path[::-1]

    def on_critical_path(self) -> dict[str, float]:
        """Returns the seconds of the critical path by kind; "host" is what launches take of it."""
        sums: dict[str, float] = {}
        path = self.critical_path()
        for number in path:
            kind = self.ops[number].kind
            sums[kind] = sums.get(kind, 0.0) + self.ends[number] - self.begins[number]
        waited = self.seconds - sum(sums.values())
        if waited > 1e-9 * self.seconds:  # more than a rounding
            sums["host"] = waited
        return sums

    def bubbles(self) -> dict[str, float]:
        """Returns the seconds in which the busiest compute lane is idle, by what it waits for.

        A gap counts for the operation whose end ends it: a collective ("all-gather"), the host, or
        another lane's copy or compute.
        """
        lane = self.compute_lane()
        sums: dict[str, float] = {}
        free = 0.0
        for number in sorted(range(len(self.ops)), key=lambda number: self.begins[number]):
            if self.ops[number].lane != lane:
                continue
            gap = self.begins[number] - free
            if gap > 0:
                cause = self.causes[number]
                what = "host" if cause == _HOST else str(self.ops[cause].kind)
                sums[what] = sums.get(what, 0.0) + gap
            free = max(free, self.ends[number])
        if self.seconds > free:
            last = max(range(len(self.ops)), key=lambda number: self.ends[number])
            kind = str(self.ops[last].kind)
            sums[kind] = sums.get(kind, 0.0) + self.seconds - free
        return sums

    def compute_lane(self) -> str:
        """Returns the lane with the most compute."""
        sums: dict[str, float] = {}
        for op in self.ops:
            sums[op.lane] = sums.get(op.lane, 0.0) + (op.seconds if op.kind == "compute" else 0.0)
        return max(sums, key=lambda lane: sums[lane], default="")

    def exposed(self) -> tuple[float, float]:
        """Returns the seconds of all collectives, and those in which no compute runs."""
        compute = _union([(self.begins[n], self.ends[n]) for n in self._of("compute")])
        moved = _union([(self.begins[n], self.ends[n]) for n in self._of(*COLLECTIVES)])
        total = sum(end - begin for begin, end in moved)
        return total, total - _overlap(moved, compute)

    def _of(self, *kinds: str) -> list[int]:
        return [number for number, op in enumerate(self.ops) if op.kind in kinds]


def replay(ops: Sequence[Op]) -> Replay:
    """Replays operations: launched in order, each begins when all that it waits for has ended."""
    begins: list[float] = []
    ends: list[float] = []
    causes: list[int] = []
    host_s = 0.0
    latest: dict[tuple[str, str], int] = {}  # the last operation of a lane or link
    for number, op in enumerate(ops):
        host_s = max([host_s, *(ends[other] for other in op.host_after)]) + op.launch_s
        begin, cause = host_s, _HOST
        before = [*op.after]
        before += [latest["lane", op.lane]] if ("lane", op.lane) in latest else []
        before += [latest["link", op.link]] if op.link and ("link", op.link) in latest else []
        for other in before:
            if ends[other] > begin:
                begin, cause = ends[other], other
        if cause == _HOST and op.host_after:
            slowest = max(op.host_after, key=lambda other: ends[other])
            if ends[slowest] + op.launch_s >= begin:
                cause = slowest
        begins.append(begin)
        ends.append(begin + op.seconds)
        causes.append(cause)
        latest["lane", op.lane] = number
        if op.link:
            latest["link", op.link] = number
    return Replay(tuple(ops), tuple(begins), tuple(ends), tuple(causes), max(ends, default=0.0))


def _overlap(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Returns the length that two sorted lists of disjoint intervals share."""
    shared, place = 0.0, 0
    for begin, end in first:
        while place < len(second) and second[place][1] <= begin:
            place += 1
        number = place
        while number < len(second) and second[number][0] < end:
            shared += min(end, second[number][1]) - max(begin, second[number][0])
            number += 1
    return shared


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged
