"""When everything happens: the recorded order, played on a clock.

The host launches in the order it did; a stream does one thing after another; a mark lets a stream go on when
the other has come to it; and collectives that use the same link follow each other in the order in which they
were launched, as those of one communicator do. On a CPU the host computes itself, and only exchanges that it
does not wait for go on beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardgrad.plan.cost import CostModel
from shardgrad.plan.recording import Event, Kernel, Marked, Transfer

__all__ = ["Span", "Timeline", "play"]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        event: its number among the events.
        lane: "compute", or the link of a collective.
        begin_s, end_s: since the beginning of the step.
    """

    event: int
    lane: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A step on the clock.

    Attributes:
        spans: in the order of launches.
        step_s: from the first launch to the last end.
        host_s: until the host had launched everything.
        compute_s: in which the compute stream was busy.
        exposed_s: in which it was not, though the step was not over.
        transfers_s: the sum over all collectives.
    """

    spans: tuple[Span, ...]
    step_s: float
    host_s: float
    compute_s: float
    exposed_s: float
    transfers_s: float


def play(events: Sequence[Event], cost: CostModel) -> Timeline:
    """Returns when each event begins and ends."""
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
            clock.streams[event.stream] = max(clock.free(event.stream), clock.marks.get(event.mark, 0.0))
    spans = tuple(clock.spans)
    step_s = max([clock.host_s, *(span.end_s for span in spans)])
    compute_s = sum(span.end_s - span.begin_s for span in spans if span.lane == "compute")
    transfers_s = sum(span.end_s - span.begin_s for span in spans if span.lane not in ("compute", "copies"))
    return Timeline(spans, step_s, clock.host_s, compute_s, step_s - compute_s, transfers_s)


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
        """Returns when a stream will have done what it was given."""
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
        """The host waits; on an accelerator, where streams wait, it does not."""
        if self._is_synchronous:
            self.host_s = max(self.host_s, self._ends[number])
