"""Extrapolates a deep model from two shallow ones.

The blocks of a model are alike: each adds the same memory, the same traffic and, in the steady state, the
    same
time. So a line through two rehearsals with a few blocks predicts a model with many blocks, in a fraction of
the time.

Both depths have the parity of the deep model: units alternate between two slots, and which slot the largest
units use depends on the number of blocks between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardgrad.plan.cost import model_flops
from shardgrad.plan.hardware import Machine
from shardgrad.plan.planning import Calibration, Plan, plan_of
from shardgrad.plan.rehearsal import Rehearsal, rehearse
from shardgrad.plan.request import Request

__all__ = ["Estimate", "estimate", "shallow"]

_FEWEST, _APART = 3, 2


@dataclass(frozen=True)
class Estimate:
    """The prediction for a step of the deep model, on one rank.

    Attributes:
        peak_nbytes: peak of allocated memory.
        needed_nbytes: memory that a device must have.
        step_s: seconds of the step.
        exposed_s: seconds in which compute waits.
        tokens_per_s: tokens per second of one rank.
        mfu: MFU with PaLM's count of FLOPs.
        fits: whether the device has enough memory.
    """

    peak_nbytes: int
    needed_nbytes: int
    step_s: float
    exposed_s: float
    tokens_per_s: float
    mfu: float
    fits: bool


def shallow(request: Request, depth: int) -> list[Rehearsal]:
    """Rehearses with three and five blocks, or with four and six, or with all blocks if there are fewer.

    Args:
        request: request for the deep model.
        depth: number of its blocks.

    Raises:
        UsageError, TrainingError: as `rehearse`.
    """
    return [rehearse(request.but(blocks=n)) for n in _depths(depth)]


def _depths(depth: int) -> list[int]:
    few = _FEWEST + (depth - _FEWEST) % 2
    return sorted({min(few, depth), min(few + _APART, depth)})


def estimate(
    rehearsals: Sequence[Rehearsal], machine: Machine, calibration: Calibration, depth: int
) -> Estimate:
    """Extrapolates shallow rehearsals to the deep model.

    Args:
        rehearsals: result of `shallow`.
        machine: the machine.
        calibration: calibration; a measured time is that of the deep model, and is not used.
        depth: number of blocks of the deep model.
    """
    calibration = dataclasses.replace(calibration, compute_s=None)
    plans = [plan_of(rehearsal, machine, calibration) for rehearsal in rehearsals]
    depths = _depths(depth)

    def at_depth(value: Callable[[Plan], float]) -> float:
        few, more = value(plans[0]), value(plans[-1])
        if len(depths) == 1:
            return few
        return few + (more - few) / (depths[-1] - depths[0]) * (depth - depths[0])

    request = rehearsals[0].request
    step_s = at_depth(lambda plan: plan.timeline.step_s)
    needed = round(at_depth(lambda plan: plan.needed_nbytes))
    flops = at_depth(lambda plan: model_flops(plan.rehearsal.events))
    return Estimate(
        peak_nbytes=round(at_depth(lambda plan: plan.peak_nbytes)),
        needed_nbytes=needed,
        step_s=step_s,
        exposed_s=at_depth(lambda plan: plan.timeline.exposed_s),
        tokens_per_s=request.tokens / step_s,
        mfu=flops / (step_s * plans[0].peak_flops),
        fits=needed <= machine.device.memory_nbytes,
    )
