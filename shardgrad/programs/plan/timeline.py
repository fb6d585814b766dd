"""Simulates the time of the recorded events.

The host launches in the recorded order; a stream runs one operation after another; a wait for an
event ends when the other stream has reached it; and collectives on one link run one after another
in the order of launches, as those of one communicator do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardgrad.programs.plan.cost import CostModel
from shardgrad.programs.plan.recording import Event, Kernel, Marked, Transfer


class Span(NamedTuple):
    """The time interval of an operation or a collective.

    Attributes:
        lane: "compute", "copies", or the link of a collective.
        begin_s: start, in seconds since the start of the step.
        end_s: end, in seconds since the start of the step.
    """

    lane: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The timeline of a step.

    Attributes:
        spans: intervals in the order of launches.
        step_s: seconds from the first launch to the last end.
        host_s: seconds until the host has launched everything.
        compute_s: seconds in which the compute stream is busy.
        exposed_s: seconds in which a collective runs and the compute stream is idle.
        transfers_s: sum of the durations of all collectives in seconds.
    """

    spans: list[Span]
    step_s: float
    host_s: float
    compute_s: float
    exposed_s: float
    transfers_s: float


def play(events: Sequence[Event], cost: CostModel) -> Timeline:
    """Returns the start and end of each event."""
    host_s = 0.0
    streams: dict[str, float] = defaultdict(float)  # when each is free
    links: dict[str, float] = defaultdict(float)
    marks: dict[int, float] = defaultdict(float)
    spans: list[Span] = []
    for event in events:
        if isinstance(event, Kernel):
            host_s += cost.machine.launch_s
            begin = max(streams[event.stream], host_s)
            end = streams[event.stream] = begin + cost.kernel_s(event)
            spans.append(Span("compute" if event.stream == "compute" else "copies", begin, end))
        elif isinstance(event, Transfer):
            host_s += cost.machine.launch_s
            link = cost.links_of(event)
            begin = max(streams[event.stream], host_s, links[link])
            end = links[link] = streams[event.stream] = begin + cost.transfer_s(event)
            spans.append(Span(link, begin, end))
        elif isinstance(event, Marked):
            marks[event.mark] = streams[event.stream]
        else:
            streams[event.stream] = max(streams[event.stream], marks[event.mark])
    busy = [span for span in spans if span.lane == "compute"]
    moved = [span for span in spans if span.lane not in ("compute", "copies")]
    return Timeline(
        spans,
        step_s=max([host_s, *(span.end_s for span in spans)]),
        host_s=host_s,
        compute_s=sum(end - begin for _, begin, end in busy),
        exposed_s=_covered_s([*busy, *moved]) - _covered_s(busy),
        transfers_s=sum(end - begin for _, begin, end in moved),
    )


def _covered_s(spans: Iterable[Span]) -> float:
    """Returns the seconds that lie in one of the spans, or in several."""
    covered_s, until = 0.0, 0.0
    for _, begin, end in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        covered_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered_s
