"""Simulates the time of the recorded events.

The host launches in the recorded order; a stream runs one operation after another; a wait for an
event ends when the other stream has reached it; and collectives on one link run one after another
in the order of launches, as those of one communicator do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardgrad.programs.plan.cost import CostModel
from shardgrad.programs.plan.recording import Event, Kernel, Marked, Waited

_Span = tuple[float, float]  # begin and end, in seconds since the start of the step


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step.

    Attributes:
        step_s: seconds from the first launch to the last end.
        host_s: seconds until the host has launched everything.
        compute_s: seconds in which the compute stream is busy.
        exposed_s: seconds in which a collective runs and the compute stream is idle.
        transfers_s: sum of the durations of all collectives in seconds.
    """

    step_s: float
    host_s: float
    compute_s: float
    exposed_s: float
    transfers_s: float


def play(events: Sequence[Event], cost: CostModel) -> Timeline:
    """Returns what the time of a step is made of."""
    host_s = 0.0
    free_s: dict[str, float] = defaultdict(float)  # when a stream or a link is free
    marks: dict[int, float] = defaultdict(float)
    busy: list[_Span] = []  # the compute stream
    moved: list[_Span] = []  # the links
    for event in events:
        if isinstance(event, Marked):
            marks[event.mark] = free_s[event.stream]
        elif isinstance(event, Waited):
            free_s[event.stream] = max(free_s[event.stream], marks[event.mark])
        else:
            host_s += cost.machine.launch_s
            if isinstance(event, Kernel):
                link, took_s = event.stream, cost.kernel_s(event)
            else:
                link, took_s = cost.links_of(event), cost.transfer_s(event)
            begin = max(host_s, free_s[event.stream], free_s[link])
            end = free_s[event.stream] = free_s[link] = begin + took_s
            if link == "compute":
                busy.append((begin, end))
            elif link != event.stream:
                moved.append((begin, end))
    return Timeline(
        step_s=max([host_s, *free_s.values()]),
        host_s=host_s,
        compute_s=sum(end - begin for begin, end in busy),
        exposed_s=_covered_s([*busy, *moved]) - _covered_s(busy),
        transfers_s=sum(end - begin for begin, end in moved),
    )


def _covered_s(spans: Iterable[_Span]) -> float:
    """Returns the seconds that lie in one of the spans, or in several."""
    covered_s, until = 0.0, 0.0
    for begin, end in sorted(spans):
        covered_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered_s
