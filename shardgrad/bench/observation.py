"""What is seen of a contestant beside its times; nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LANES", "Observation", "Span", "Traffic"]

LANES = ("compute", "all-gather", "reduce-scatter", "all-reduce", "optimizer", "engine")


@dataclass(frozen=True)
class Span:
    """Something that took time on one rank.

    Attributes:
        lane: one of `LANES`.
        name: of the operation, kernel or collective.
        start_us: since the beginning of the step.
        length_us: how long.
    """

    lane: str
    name: str
    start_us: float
    length_us: float


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step.

    Attributes:
        count: calls.
        nbytes: what this rank sends, by the arithmetic of rings: (N - 1) / N of what is gathered or reduced,
            twice that for an all-reduce.
    """

    count: int
    nbytes: int


@dataclass(frozen=True)
class Observation:
    """Of one rank.

    Attributes:
        baseline_rss_nbytes: peak resident memory before there was a model: imports and process group.
        peak_rss_nbytes: peak resident memory after all rounds.
        peak_allocated_nbytes: of the device, by torch's allocator; None on a CPU.
        peak_reserved_nbytes: likewise, with what the allocator keeps.
        pool_nbytes: of it, by graphs.
        dtensors: constructed from Python in one steady step.
        launches: how often the host gave the device something to do in one step; None on a CPU.
        traffic: by kind of collective, in one step.
        timeline: of one steady step; empty on all ranks but the first.
        dropped: spans that the timeline leaves out, the shortest.
        communication_s: seconds in which the timeline shows a collective under way;
        exposed_s: those of them in which nothing was computed on this rank.
    """

    baseline_rss_nbytes: int
    peak_rss_nbytes: int
    peak_allocated_nbytes: int | None = None
    peak_reserved_nbytes: int | None = None
    pool_nbytes: int = 0
    dtensors: int = 0
    launches: int | None = None
    traffic: dict[str, Traffic] = field(default_factory=dict)
    timeline: list[Span] = field(default_factory=list)
    dropped: int = 0
    communication_s: float = 0.0
    exposed_s: float = 0.0
