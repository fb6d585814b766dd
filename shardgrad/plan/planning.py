"""The plan: the memory, traffic and time of a rehearsed step on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardgrad.plan.cost import CostModel, model_flops, scaled_to_mfu, scaled_to_time
from shardgrad.plan.hardware import DEVICES, Machine
from shardgrad.plan.memory import MemoryCurve, memory_of
from shardgrad.plan.recording import Transfer
from shardgrad.plan.rehearsal import Rehearsal, rehearse
from shardgrad.plan.request import Request, require_range
from shardgrad.plan.timeline import Timeline, play

__all__ = ["Calibration", "Plan", "Traffic", "make_plan", "plan_of"]


@dataclass(frozen=True)
class Calibration:
    """Measurements that replace the roofline model of compute; None uses the roofline.

    Attributes:
        mfu: MFU of forward and backward without communication, with PaLM's count of FLOPs.
        compute_s: seconds of forward and backward without communication.
    """

    mfu: float | None = None
    compute_s: float | None = None

    def __post_init__(self) -> None:
        require_range("--compute-s", self.compute_s, 1e9)


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
    """The prediction for a step on a machine.

    Attributes:
        rehearsal: the rehearsed step.
        machine: the machine.
        cost: model of durations.
        memory: memory over the step.
        timeline: timeline of the step.
    """

    rehearsal: Rehearsal
    machine: Machine
    cost: CostModel
    memory: MemoryCurve
    timeline: Timeline

    @property
    def request(self) -> Request:
        """The request of the plan."""
        return self.rehearsal.request

    @property
    def peak_nbytes(self) -> int:
        """Peak of allocated memory."""
        return self.memory.peak.total

    @property
    def needed_nbytes(self) -> int:
        """Memory that a device must have, for the allocator, context, communicators and workspaces."""
        reserved = self.peak_nbytes if self.request.on_host else self.memory.reserved_nbytes
        return reserved + self.machine.device.taken_nbytes

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.needed_nbytes <= self.machine.device.memory_nbytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one rank."""
        return self.request.tokens / self.timeline.step_s

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of the device in the dtype that the model computes in."""
        return self.machine.device.flops["fp32" if self.request.precision == "fp32" else "bf16"]

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, with PaLM's count of FLOPs."""
        return model_flops(self.rehearsal.events) / (self.timeline.step_s * self.peak_flops)

    def fits_on(self) -> Iterator[tuple[str, bool]]:
        """Yields every known accelerator, and whether it has enough memory."""
        for device in DEVICES.values():
            if not device.is_synchronous:
                room = device.memory_nbytes - device.taken_nbytes
                yield device.name, self.memory.reserved_nbytes <= room

    def traffic(self) -> list[Traffic]:
        """Returns the traffic of a rank, by axis and kind."""
        found: dict[tuple[str, str, str], list[Transfer]] = {}
        for event in self.rehearsal.events:
            if isinstance(event, Transfer) and event.ranks > 1:
                key = event.axis, event.kind, self.cost.links_of(event)
                found.setdefault(key, []).append(event)
        return [
            Traffic(
                *key,
                len(transfers),
                sum(transfer.sent_nbytes for transfer in transfers),
                sum(map(self.cost.transfer_s, transfers)),
            )
            for key, transfers in sorted(found.items())
        ]


def make_plan(request: Request, machine: Machine, calibration: Calibration = Calibration()) -> Plan:
    """Rehearses a step and predicts its memory and time on a machine.

    Raises:
        UsageError, TrainingError: as `rehearse`.
    """
    return plan_of(rehearse(request), machine, calibration)


def plan_of(rehearsal: Rehearsal, machine: Machine, calibration: Calibration = Calibration()) -> Plan:
    """Predicts memory and time of a rehearsed step on a machine."""
    cost = CostModel(machine, rehearsal.request.shards)
    if calibration.mfu is not None:
        cost = scaled_to_mfu(cost, rehearsal.events, calibration.mfu)
    elif calibration.compute_s is not None:
        cost = scaled_to_time(cost, rehearsal.events, calibration.compute_s)
    return Plan(rehearsal, machine, cost, memory_of(rehearsal), play(rehearsal.events, cost))
