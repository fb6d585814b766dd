"""The plan: the memory, traffic and time of a step on a machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardgrad.programs.plan.cost import CostModel, compute_s, model_flops
from shardgrad.programs.plan.hardware import TAKEN_NBYTES, Machine
from shardgrad.programs.plan.memory import Memory, memory_of
from shardgrad.programs.plan.recording import Transfer
from shardgrad.programs.plan.rehearsal import Rehearsal, rehearse
from shardgrad.programs.plan.request import Request
from shardgrad.programs.plan.timeline import Timeline, play


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
        resting: allocated between steps, by owner.
        memory: over the step.
        traffic: traffic of a rank.
        model_flops: FLOPs of the model, as PaLM counts them.
        timeline: of the step if compute is as fast as is likely.
        step_range_s: the step if compute is as fast, and as slow, as in runs that were published;
            both are that of the timeline if it was measured.
        compute_scale: factor on the roofline's durations of kernels in forward and backward.
    """

    request: Request
    machine: Machine
    name: str
    parameters: int
    units: int
    resting: Mapping[str, int]
    memory: Memory
    traffic: tuple[Traffic, ...]
    model_flops: float
    timeline: Timeline
    step_range_s: tuple[float, float]
    compute_scale: float

    @property
    def needed_nbytes(self) -> int:
        """Memory that a device must have: with its context and libraries, and a margin."""
        return self.memory.reserved_nbytes + TAKEN_NBYTES + self.machine.device.margin_nbytes

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory, with a margin."""
        return self.needed_nbytes <= self.machine.device.memory_nbytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one rank."""
        return self.request.tokens / self.timeline.step_s

    @property
    def tokens_per_s_range(self) -> tuple[float, float]:
        """Tokens per second of one rank, for the slow and for the fast end of the step's range."""
        fast, slow = self.step_range_s
        return self.request.tokens / slow, self.request.tokens / fast

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, with PaLM's count of FLOPs."""
        return self.model_flops / (self.timeline.step_s * _peak_flops(self.request, self.machine))


def make_plan(request: Request, machine: Machine, *, mfu: float | None = None) -> Plan:
    """Rehearses a step, and predicts its memory and time on a machine.

    Args:
        request: the step.
        machine: the machine.
        mfu: measured MFU of forward and backward without communication, with PaLM's count of FLOPs.

    Raises:
        UsageError, TrainingError: as `rehearse`.
    """
    rehearsal = rehearse(request)
    if mfu is None:
        return plan_of(rehearsal, machine)
    measured_s = model_flops(rehearsal.events) / (_peak_flops(request, machine) * mfu)
    roofline_s = compute_s(rehearsal.events, CostModel(machine, request.shards))
    return plan_of(rehearsal, machine, compute_scale=measured_s / roofline_s)


def plan_of(rehearsal: Rehearsal, machine: Machine, *, compute_scale: float | None = None) -> Plan:
    """Predicts memory and time of a rehearsed step on a machine.

    Args:
        rehearsal: the step.
        machine: the machine.
        compute_scale: factor on the roofline's durations of kernels in forward and backward, if it
            is known; else those of published runs give a range.
    """
    request, events = rehearsal.request, rehearsal.events
    scales = machine.device.slowdowns if compute_scale is None else (compute_scale,) * 3
    costs = [CostModel(machine, request.shards, scale) for scale in scales]
    fast, likely, slow = (play(events, cost) for cost in costs)
    return Plan(
        request=request,
        machine=machine,
        name=rehearsal.name,
        parameters=rehearsal.parameters,
        units=rehearsal.units,
        resting=rehearsal.resting,
        memory=memory_of(rehearsal),
        traffic=_traffic(rehearsal, costs[1]),
        model_flops=model_flops(events),
        timeline=likely,
        step_range_s=(fast.step_s, slow.step_s),
        compute_scale=scales[1],
    )


def _peak_flops(request: Request, machine: Machine) -> float:
    """Returns the peak FLOP/s of the device in the dtype that the model computes in."""
    return machine.device.flops["fp32" if request.precision == "fp32" else "bf16"]


def _traffic(rehearsal: Rehearsal, cost: CostModel) -> tuple[Traffic, ...]:
    """Returns what a rank moves in a step, added up for each kind of collective over each axis."""
    alike: dict[tuple[str, str, str], list[Transfer]] = defaultdict(list)
    for event in rehearsal.events:
        if isinstance(event, Transfer) and event.ranks > 1:
            alike[event.axis, event.kind, cost.links_of(event)].append(event)
    return tuple(
        Traffic(
            *row,
            count=len(transfers),
            sent_nbytes=sum(transfer.sent_nbytes for transfer in transfers),
            busy_s=sum(map(cost.transfer_s, transfers)),
        )
        for row, transfers in sorted(alike.items())
    )
