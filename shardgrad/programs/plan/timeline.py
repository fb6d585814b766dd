"""Simulates the time of the recorded events.

The host launches in the recorded order; a stream runs one operation after another; a wait for an
event ends when the other stream has reached it; and collectives on one link run one after another
in the order of launches, as those of one communicator do. On a CPU the host computes, and only
exchanges that it does not wait for overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardgrad.programs.plan.cost import CostModel
from shardgrad.programs.plan.recording import Event, Kernel, Marked, Transfer

__all__ = ["Span", "Timeline", "play"]


@dataclass(frozen=True, slots=True)
class Span:
    """The time interval of an operation or a collective.

    Attributes:
        event: number of the event.
        lane: "compute", "copies", or the link of a collective.
        begin_s: start, in seconds since the start of the step.
        end_s: end, in seconds since the start of the step.
    """

    event: int
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

    spans: tuple[Span, ...]
    step_s: float
    host_s: float
    compute_s: float
    exposed_s: float
    transfers_s: float


def play(events: Sequence[Event], cost: CostModel) -> Timeline:
    """Returns the start and end of each event."""
    clock = _Clock(cost)
    for number, event in enumerate(events):
        if isinstance(event, Kernel):
            clock.run(number, event)
        elif isinstance(event, Transfer):
            clock.move(number, event)
        elif isinstance(event, Marked):
            clock.marks[event.mark] = clock.free(event.stream)
        elif event.stream is None:
            clock.await_transfer(event.mark)
        else:
            clock.streams[event.stream] = max(
                clock.free(event.stream), clock.marks.get(event.mark, 0.0)
            )
    spans = tuple(clock.spans)
    step_s = max([clock.host_s, *(span.end_s for span in spans)])
    busy = [(span.begin_s, span.end_s) for span in spans if span.lane == "compute"]
    moved = [(s.begin_s, s.end_s) for s in spans if s.lane not in ("compute", "copies")]
    compute_s, transfers_s = (sum(end - begin for begin, end in each) for each in (busy, moved))
    exposed_s = _covered_s([*busy, *moved]) - _covered_s(busy)
    return Timeline(spans, step_s, clock.host_s, compute_s, exposed_s, transfers_s)


def _covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds that lie in one of the intervals, or in several."""
    covered_s, until = 0.0, 0.0
    for begin, end in sorted(intervals):
        covered_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered_s


class _Clock:
    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._is_synchronous = cost.machine.device.is_synchronous
        self.host_s = 0.0
        self.streams: dict[str, float] = {}
        self.marks: dict[int, float] = {}
        self.spans: list[Span] = []
        self._links: dict[str, float] = {}
        self._ends: dict[int, float] = {}

    def free(self, stream: str) -> float:
        """Returns the time at which a stream has finished its work."""
        return self.streams.get(stream, 0.0)

    def run(self, number: int, kernel: Kernel) -> None:
        self.host_s += self._cost.machine.launch_s
        seconds = self._cost.kernel_s(kernel)
        begin = max(self.free(kernel.stream), self.host_s)
        lane = "compute" if kernel.stream == "compute" else "copies"
        self.spans.append(Span(number, lane, begin, begin + seconds))
        self.streams[kernel.stream] = begin + seconds
        if self._is_synchronous:
            self.host_s = begin + seconds

    def move(self, number: int, transfer: Transfer) -> None:
        self.host_s += self._cost.machine.launch_s
        link = self._cost.links_of(transfer)
        begin = max(self.free(transfer.stream), self.host_s, self._links.get(link, 0.0))
        end = begin + self._cost.transfer_s(transfer)
        self.spans.append(Span(number, link, begin, end))
        self._links[link] = self._ends[number] = end
        if not self._is_synchronous:
            self.streams[transfer.stream] = end

    def await_transfer(self, number: int) -> None:
        """Waits on the host for a transfer; no effect on an accelerator, where streams wait."""
        if self._is_synchronous:
            self.host_s = max(self.host_s, self._ends[number])
