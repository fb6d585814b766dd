"""A step that the simulated accelerator recorded, with given durations: how long it takes, and as a
trace.

The device has no speed, so a `Clock` says how long each launch takes. `seconds_of` then times a
step by its vector clocks alone. `step_of` makes of it what `shardgrad explain` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from shardgrad.explain.step import COLLECTIVES, Kind, Op, Step
from tests.simulated.accelerator import collectives, device
from tests.simulated.accelerator.device import Launch
from tests.simulated.accelerator.virtual_ranks import VirtualRanks

_KINDS: dict[str, Kind] = {
    "simulated::all_gather": "all-gather",
    "simulated::reduce_scatter": "reduce-scatter",
    "simulated::all_reduce": "all-reduce",
}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(frozen=True)
class Sent:
    """What a collective moves.

    Attributes:
        link: name of its process group.
        nbytes: of the larger side of it, on one rank.
        dtype: of the elements, such as "fp32".
    """

    link: str
    nbytes: int
    dtype: str


@dataclass(frozen=True)
class Recorded:
    """A step of rank 0.

    Attributes:
        launches: in the host's order.
        sent: of each collective among them, in the same order.
    """

    launches: list[Launch]
    sent: list[Sent]

    @property
    def is_graph(self) -> bool:
        """Whether the step was replayed, so that the host launched once."""
        return any(launch.stream.endswith("in a graph") for launch in self.launches)


@dataclass(frozen=True)
class Clock:
    """How long launches take, in seconds.

    Attributes:
        product_s: a matrix product.
        other_s: another kernel of the model, or of the optimizer.
        copy_s: a kernel of the engine.
        start_s: a collective without a byte.
        bytes_per_s: of a collective.
        launch_s: the host, for one launch.
    """

    product_s: float
    other_s: float = 3e-6
    copy_s: float = 4e-6
    start_s: float = 12e-6
    bytes_per_s: float = 1e9
    launch_s: float = 6e-6

    def with_faster(self, *, kernels: float = 1.0, links: float = 1.0) -> Clock:
        """Returns a clock with durations divided by factors."""
        return dataclasses.replace(
            self,
            product_s=self.product_s / kernels,
            other_s=self.other_s / kernels,
            start_s=self.start_s / links,
            bytes_per_s=self.bytes_per_s * links,
        )

    def durations(self, recorded: Recorded) -> list[float]:
        """Returns the duration of each launch."""
        sent = iter(recorded.sent)
        return [self._duration(launch.op, sent) for launch in recorded.launches]

    def _duration(self, op: str, sent: Iterator[Sent]) -> float:
        if op in _KINDS:
            return self.start_s + next(sent).nbytes / self.bytes_per_s
        if op.startswith(_PRODUCTS):
            return self.product_s
        return self.copy_s if op.startswith("shardgrad::") else self.other_s


def record(
    ranks: int, prepare: Callable[..., Callable[[], None]], *args: Any, steps: int
) -> Recorded:
    """Returns the last of some steps.

    Args:
        ranks: number of virtual ranks.
        prepare: called on each rank with `args`; returns what runs a step.
        *args: for `prepare`.
        steps: how many to run.
    """
    launches: list[Launch] = []
    begin = threading.Barrier(ranks, lambda: device.restart_schedule(keep_launches=True))
    end = threading.Barrier(ranks, lambda: launches.extend(device.launches(0)))
    sent: list[Sent] = []

    def train() -> None:
        step = prepare(*args)
        for number in range(steps):
            if number == steps - 1:
                begin.wait()
            step()
        end.wait()
        torch.accelerator.synchronize()  # before the model's memory is given back

    with device.checked(), _watched(sent):
        VirtualRanks(ranks).run(train)
    # A replay has the collectives that were seen last: when it was captured.
    count = sum(launch.op in _KINDS for launch in launches)
    return Recorded(launches, sent[-count:])


@contextlib.contextmanager
def _watched(sent: list[Sent]) -> Iterator[None]:
    """Collects the collectives of rank 0."""
    launch = collectives.SimulatedGroup._launch

    def watched(self: Any, kind: str, inputs: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._owner == 0:
            nbytes = max(sum(tensor.nbytes for tensor in side) for side in (inputs, outputs))
            sent.append(Sent(self._name, nbytes, _DTYPES.get(inputs[0].dtype, "")))
        return launch(self, kind, inputs, outputs, *args, **kwargs)

    with mock.patch.object(collectives.SimulatedGroup, "_launch", watched):
        yield


def seconds_of(recorded: Recorded, clock: Clock) -> float:
    """Returns how long a step takes: each launch begins when all that its stream knew of has ended.

    The host launches one after the other, or a whole graph at once, and collectives of one group
    take turns.
    """
    host_s = clock.launch_s if recorded.is_graph else 0.0
    ends: list[float] = []
    links: dict[str, float] = {}
    sent = iter(recorded.sent)
    for launch, seconds in zip(recorded.launches, clock.durations(recorded), strict=True):
        host_s += 0.0 if recorded.is_graph else clock.launch_s
        begin = max([host_s, *_ends_before(launch, recorded.launches, ends)])
        if launch.op in _KINDS:
            link = next(sent).link
            begin = max(begin, links.get(link, 0.0))
            links[link] = begin + seconds
        ends.append(begin + seconds)
    return max(ends)


def _ends_before(
    launch: Launch, launches: Sequence[Launch], ends: Sequence[float]
) -> Iterator[float]:
    return (end for other, end in zip(launches, ends, strict=False) if launch.comes_after(other))


def step_of(recorded: Recorded, clock: Clock) -> Step:
    """Returns a step as `shardgrad.explain` has it: with each launch, the last ones its stream
    waited for.
    """
    ops: list[Op] = []
    known: dict[int, tuple[int, ...]] = {}  # by lane, what its last launch knew
    lanes: dict[int, list[tuple[int, int]]] = {}  # by lane, the ticks and positions of its launches
    sent = iter(recorded.sent)
    for launch, seconds in zip(recorded.launches, clock.durations(recorded), strict=True):
        after = []
        for lane, launched in lanes.items():
            tick = launch.knows[lane] if lane < len(launch.knows) else 0
            before = known.get(launch.lane, ())
            if lane == launch.lane or (lane < len(before) and before[lane] >= tick):
                continue
            after += (
                [max(place for at, place in launched if at <= tick)]
                if launched[0][0] <= tick
                else []
            )
        kind = _KINDS.get(launch.op, "copy" if launch.op.startswith("shardgrad::") else "compute")
        moved = next(sent) if kind in COLLECTIVES else Sent("", 0, "")
        first = not ops if recorded.is_graph else True
        ops.append(
            Op(
                name=launch.op,
                lane=launch.stream,
                kind=kind,
                seconds=seconds,
                launch_s=clock.launch_s if first else 0.0,
                after=tuple(sorted(after)),
                link=moved.link or None,
                dtype=moved.dtype,
            )
        )
        lanes.setdefault(launch.lane, []).append((launch.tick, len(ops) - 1))
        known[launch.lane] = launch.knows
    return Step(tuple(ops), None, "the simulated accelerator's order, with given durations")
