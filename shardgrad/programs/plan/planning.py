"""The plan: the memory, traffic and time of a step on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from shardgrad.programs.plan.cost import CostModel, compute_s, model_flops
from shardgrad.programs.plan.hardware import TAKEN_NBYTES, Machine
from shardgrad.programs.plan.rehearsal import Rehearsal
from shardgrad.programs.plan.request import Request
from shardgrad.programs.plan.timeline import Timeline, play


@dataclass(frozen=True)
class Plan:
    """The prediction for a step on a machine. Sizes are those of rank 0, in bytes; times in
    seconds.

    Attributes:
        rehearsal: the step.
        cost: of kernels and collectives on the machine, if compute is as fast as is likely.
        timeline: of the step, with that cost.
        step_range_s: the step if compute is as fast, and as slow, as in runs that were published;
            both are that of the timeline if it was measured.
    """

    rehearsal: Rehearsal
    cost: CostModel
    timeline: Timeline
    step_range_s: tuple[float, float]

    @property
    def needed_nbytes(self) -> int:
        """Memory that a device must have: with its context and libraries, and a margin."""
        return (
            self.rehearsal.memory.reserved_nbytes + TAKEN_NBYTES + self.cost.machine.margin_nbytes
        )

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory, with a margin."""
        return self.needed_nbytes <= self.cost.machine.gpu.memory_nbytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of one rank."""
        return self.rehearsal.request.tokens / self.timeline.step_s

    @property
    def tokens_per_s_range(self) -> tuple[float, float]:
        """Tokens per second of one rank, for the slow and for the fast end of the step's range."""
        fast, slow = self.step_range_s
        tokens = self.rehearsal.request.tokens
        return tokens / slow, tokens / fast

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, with PaLM's count of FLOPs."""
        peak_flops = _peak_flops(self.rehearsal.request, self.cost.machine)
        return model_flops(self.rehearsal.events) / (self.timeline.step_s * peak_flops)


def plan_of(rehearsal: Rehearsal, machine: Machine, *, compute_scale: float | None = None) -> Plan:
    """Predicts memory and time of a rehearsed step on a machine.

    Args:
        rehearsal: the step.
        machine: the machine.
        compute_scale: factor on the roofline's durations of kernels in forward and backward, if it
            is known; else it follows from the machine's MFU, or published runs give a range.
    """
    if compute_scale is None and machine.mfu is not None:
        peak_flops = _peak_flops(rehearsal.request, machine)
        measured_s = model_flops(rehearsal.events) / (peak_flops * machine.mfu)
        roofline = CostModel(machine, rehearsal.request.shards)
        compute_scale = measured_s / compute_s(rehearsal.events, roofline)
    scales = machine.gpu.slowdowns if compute_scale is None else (compute_scale,) * 3
    costs = [CostModel(machine, rehearsal.request.shards, scale) for scale in scales]
    fast, likely, slow = (play(rehearsal.events, cost) for cost in costs)
    return Plan(rehearsal, costs[1], likely, (fast.step_s, slow.step_s))


def _peak_flops(request: Request, machine: Machine) -> float:
    """Returns the peak FLOP/s of the device in the dtype that the model computes in."""
    return machine.gpu.flops["fp32" if request.precision == "fp32" else "bf16"]
