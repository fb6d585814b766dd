"""The plan: the memory, traffic and time of a step on a machine."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardgrad.programs.plan.calibration import Calibration
from shardgrad.programs.plan.cost import CostModel, compute_s, model_flops
from shardgrad.programs.plan.depth import line, rehearse_shallow
from shardgrad.programs.plan.hardware import DEVICES, TAKEN_NBYTES, Device, Machine
from shardgrad.programs.plan.memory import memory_of
from shardgrad.programs.plan.recording import Transfer
from shardgrad.programs.plan.rehearsal import Rehearsal
from shardgrad.programs.plan.request import Request
from shardgrad.programs.plan.timeline import play

_TIMES = ("step_s", "compute_s", "exposed_s", "transfers_s", "host_s")  # of the likely timeline


@dataclass(frozen=True)
class Traffic:
    """The traffic of one rank in a step, for one kind of collective over one axis.

    Attributes:
        axis: axis of the mesh, as in `Transfer`.
        kind: kind of collective, as in `Transfer`.
        link: name of the link.
        count: number of collectives.
        sent_nbytes: number of bytes that one rank sends.
        busy_s: sum of the durations in seconds.
    """

    axis: str
    kind: str
    link: str
    count: int
    sent_nbytes: int
    busy_s: float


@dataclass(frozen=True)
class Plan:
    """The prediction for a step on a machine. Sizes are those of rank 0, in bytes; times in
    seconds.

    Attributes:
        request: the request.
        machine: the machine.
        name: name of the model.
        parameters: number of elements of its parameters.
        units: number of calls of `fully_shard`.
        blocks: length of the longest run of blocks that are alike.
        unsharded_blocks: how many of them stage "auto" keeps unsharded.
        resting: allocated between steps, by owner.
        at_peak: allocated at the peak, by owner.
        peak_nbytes: peak of allocated memory.
        reserved_nbytes: what a caching allocator reserves.
        traffic: traffic of a rank.
        model_flops: FLOPs of the model, as PaLM counts them.
        step_s: the step.
        step_range_s: the step if compute is as fast, and as slow, as in runs that were published;
            both are `step_s` if it was measured.
        compute_s: the compute stream is busy.
        exposed_s: a collective runs, and the compute stream is idle.
        transfers_s: sum of all collectives.
        host_s: until the host has launched everything.
        compute_scale: factor on the roofline's durations of kernels in forward and backward.
    """

    request: Request
    machine: Machine
    name: str
    parameters: int
    units: int
    blocks: int
    unsharded_blocks: int
    resting: Mapping[str, int]
    at_peak: Mapping[str, int]
    peak_nbytes: int
    reserved_nbytes: int
    traffic: tuple[Traffic, ...]
    model_flops: float
    step_s: float
    step_range_s: tuple[float, float]
    compute_s: float
    exposed_s: float
    transfers_s: float
    host_s: float
    compute_scale: float

    def needed_on(self, device: Device) -> int:
        """Returns the memory that a device must have: with its context and libraries, and a
        margin.
        """
        return self.reserved_nbytes + TAKEN_NBYTES + device.margin_nbytes

    @property
    def needed_nbytes(self) -> int:
        """Memory that a device of the machine must have."""
        return self.needed_on(self.machine.device)

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory, with a margin."""
        return self.needed_nbytes <= self.machine.device.memory_nbytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one rank."""
        return self.request.tokens / self.step_s

    @property
    def tokens_per_s_range(self) -> tuple[float, float]:
        """Tokens per second of one rank, for the slow and for the fast end of the step's range."""
        fast, slow = self.step_range_s
        return self.request.tokens / slow, self.request.tokens / fast

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, with PaLM's count of FLOPs."""
        return self.model_flops / (self.step_s * _peak_flops(self.request, self.machine))

    def fits_on(self) -> Iterator[tuple[str, bool]]:
        """Yields every known accelerator, and whether it has enough memory."""
        for device in DEVICES.values():
            yield device.name, self.needed_on(device) <= device.memory_nbytes


def make_plan(request: Request, machine: Machine, calibration: Calibration = Calibration()) -> Plan:
    """Rehearses a step with a few blocks of the model, and predicts the whole model's on a machine.

    Raises:
        UsageError, TrainingError: as `rehearse`.
    """
    if request.stage != "auto":
        return plan_of(rehearse_shallow(request), machine, calibration)
    sharded = rehearse_shallow(request.but(stage="3"))
    unsharded = rehearse_shallow(request)
    planned = partial(plan_of, sharded, machine, calibration, unsharded=unsharded)
    blocks = sharded[0].blocks
    least = planned().needed_nbytes
    of_block = (planned(unsharded_blocks=blocks).needed_nbytes - least) / max(blocks, 1)
    room = max(0, machine.device.memory_nbytes - least)
    return planned(unsharded_blocks=min(blocks, int(room / max(of_block, 1))))


def plan_of(
    rehearsals: Sequence[Rehearsal],
    machine: Machine,
    calibration: Calibration = Calibration(),
    *,
    unsharded: Sequence[Rehearsal] = (),
    unsharded_blocks: int = 0,
) -> Plan:
    """Predicts memory and time on a machine: of one rehearsed step, or of the line through two.

    Args:
        rehearsals: one with all blocks, or two with fewer; see `depth.py`.
        machine: the machine.
        calibration: measurements of the whole model.
        unsharded: the same with all blocks unsharded, for a model of which some stay so.
        unsharded_blocks: how many.
    """
    first = rehearsals[0]
    request = (unsharded or rehearsals)[0].request.but(blocks=None)

    def of_model(values: Callable[[Rehearsal], Mapping[Any, Any]]) -> dict[Any, Any]:
        # Each block adds the same: one to a depth, and one that stays unsharded.
        ends = [
            line([(one.kept, values(one)) for one in some], first.blocks)
            for some in (rehearsals, unsharded)
            if some
        ]
        points = [(first.blocks * number, end) for number, end in enumerate(ends)]
        found: dict[Any, Any] = line(points, unsharded_blocks)
        return found

    plain = CostModel(machine, request.shards)
    compute = of_model(
        lambda one: {"flops": model_flops(one.events), "seconds": compute_s(one.events, plain)}
    )
    peak_flops = _peak_flops(request, machine)
    measured = calibration.factor(compute["flops"], compute["seconds"], peak_flops)
    # For the fastest, the likely and the slowest step.
    scales = machine.device.slowdowns if measured is None else (measured,) * 3
    costs = [dataclasses.replace(plain, compute_scale=scale) for scale in scales]

    def steps(one: Rehearsal) -> dict[str, float]:
        fast, likely, slow = (play(one.events, cost) for cost in costs)
        return {
            "fast_s": fast.step_s,
            "slow_s": slow.step_s,
            **{name: getattr(likely, name) for name in _TIMES},
        }

    memories = {id(one): memory_of(one) for one in (*rehearsals, *unsharded)}
    sizes = of_model(
        lambda one: {
            "units": one.units,
            "peak": memories[id(one)].peak_nbytes,
            "reserved": memories[id(one)].reserved_nbytes,
        }
    )
    seconds = of_model(steps)
    return Plan(
        request=request,
        machine=machine,
        name=first.name,
        parameters=first.parameters,
        units=round(sizes["units"]),
        blocks=first.blocks,
        unsharded_blocks=unsharded_blocks,
        resting=_rounded(of_model(lambda one: one.resting)),
        at_peak=_rounded(of_model(lambda one: memories[id(one)].at_peak)),
        peak_nbytes=round(sizes["peak"]),
        reserved_nbytes=round(sizes["reserved"]),
        traffic=_traffic(of_model(partial(_moved, cost=costs[1]))),
        model_flops=compute["flops"],
        step_range_s=(seconds["fast_s"], seconds["slow_s"]),
        compute_scale=scales[1],
        **{name: seconds[name] for name in _TIMES},
    )


def _rounded(sizes: Mapping[str, float]) -> dict[str, int]:
    return {owner: round(nbytes) for owner, nbytes in sizes.items()}


def _peak_flops(request: Request, machine: Machine) -> float:
    """Returns the peak FLOP/s of the device in the dtype that the model computes in."""
    return machine.device.flops["fp32" if request.precision == "fp32" else "bf16"]


_Row = tuple[str, str, str]  # axis, kind, link


def _moved(one: Rehearsal, cost: CostModel) -> dict[tuple[_Row, str], float]:
    """Returns what a rank moves in a step, by the row of the traffic and its column."""
    found: dict[tuple[_Row, str], float] = defaultdict(int)
    for event in one.events:
        if isinstance(event, Transfer) and event.ranks > 1:
            row = event.axis, event.kind, cost.links_of(event)
            found[row, "count"] += 1
            found[row, "sent_nbytes"] += event.sent_nbytes
            found[row, "busy_s"] += cost.transfer_s(event)
    return found


def _traffic(moved: Mapping[tuple[_Row, str], float]) -> tuple[Traffic, ...]:
    return tuple(
        Traffic(
            *row,
            count=round(moved[row, "count"]),
            sent_nbytes=round(moved[row, "sent_nbytes"]),
            busy_s=moved[row, "busy_s"],
        )
        for row in sorted({row for row, _ in moved})
    )
