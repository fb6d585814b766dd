"""The plan: a rehearsal, put on a machine's clock and beside its memory."""

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
    """What is known of the compute from elsewhere; None for what a roofline says.

    Attributes:
        mfu: share of the peak that forward and backward reach without communication, counted as PaLM does.
        compute_s: seconds that they take.
    """

    mfu: float | None = None
    compute_s: float | None = None

    def __post_init__(self) -> None:
        require_range("--compute-s", self.compute_s, 1e9)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in a step, over one axis by one kind of collective.

    Attributes:
        axis, kind: as in `Transfer`.
        link: that it goes over.
        count: of collectives.
        sent_nbytes: by one rank.
        busy_s: their durations' sum.
    """

    axis: str
    kind: str
    link: str
    count: int
    sent_nbytes: int
    busy_s: float


@dataclass(frozen=True)
class Plan:
    """What a step will need on a machine.

    Attributes:
        rehearsal: what was run.
        machine: what it is put on.
        cost: durations.
        memory: over the step.
        timeline: of the step.
    """

    rehearsal: Rehearsal
    machine: Machine
    cost: CostModel
    memory: MemoryCurve
    timeline: Timeline

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self.rehearsal.request

    @property
    def peak_nbytes(self) -> int:
        """Most that is allocated at once."""
        return self.memory.peak.total

    @property
    def needed_nbytes(self) -> int:
        """What a device must have: the allocator's, and what others take of the device."""
        reserved = self.peak_nbytes if self.request.on_host else self.memory.reserved_nbytes
        return reserved + self.machine.device.taken_nbytes

    @property
    def fits(self) -> bool:
        """Whether the device has it."""
        return self.needed_nbytes <= self.machine.device.memory_nbytes

    @property
    def tokens_per_s(self) -> float:
        """Of one rank."""
        return self.request.tokens / self.timeline.step_s

    @property
    def peak_flops(self) -> float:
        """Of the device, in the dtype that the model computes in."""
        return self.machine.device.flops["fp32" if self.request.precision == "fp32" else "bf16"]

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the device could have done in the step, counted as PaLM does."""
        return model_flops(self.rehearsal.events) / (self.timeline.step_s * self.peak_flops)

    def fits_on(self) -> Iterator[tuple[str, bool]]:
        """Yields every accelerator known here, and whether it has the memory."""
        for device in DEVICES.values():
            if not device.is_synchronous:
                room = device.memory_nbytes - device.taken_nbytes
                yield device.name, self.memory.reserved_nbytes <= room

    def traffic(self) -> list[Traffic]:
        """Returns what a rank sends, by axis and kind."""
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
    """Rehearses a step and puts it on a machine.

    Raises:
        UsageError, TrainingError: as `rehearse`.
    """
    return plan_of(rehearse(request), machine, calibration)


def plan_of(rehearsal: Rehearsal, machine: Machine, calibration: Calibration = Calibration()) -> Plan:
    """Puts a rehearsed step on a machine."""
    cost = CostModel(machine, rehearsal.request.shards)
    if calibration.mfu is not None:
        cost = scaled_to_mfu(cost, rehearsal.events, calibration.mfu)
    elif calibration.compute_s is not None:
        cost = scaled_to_time(cost, rehearsal.events, calibration.compute_s)
    return Plan(rehearsal, machine, cost, memory_of(rehearsal), play(rehearsal.events, cost))
