"""`shardgrad plan --search`: the fastest settings that fit, for a model, a machine and a global
batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from shardgrad.programs.plan.calibration import Calibration
from shardgrad.programs.plan.hardware import Machine
from shardgrad.programs.plan.planning import Plan, make_plan
from shardgrad.programs.plan.request import Request, require_share
from shardgrad.programs.train.display import nice_nbytes
from shardgrad.programs.train.failure import TrainingError, UsageError

__all__ = ["Setting", "as_table", "search"]

_LARGEST_BATCH = 64
_MICRO_BATCHES = 2, 3  # rehearsed; a line leads to more


@dataclass(frozen=True)
class Setting:
    """A setting that fits, and its prediction.

    Attributes:
        request: the setting.
        needed_nbytes: memory that a device must have.
        step_s: seconds of a step.
        tokens_per_s: tokens per second of a rank.
    """

    request: Request
    needed_nbytes: int
    step_s: float
    tokens_per_s: float

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return {**dataclasses.asdict(self), "options": self.options()}

    def options(self) -> str:
        """Returns what was searched, as options of `shardgrad train`."""
        request = self.request
        words = ["--mesh", request.mesh or str(request.ranks), "--stage", request.stage]
        words += ["--activation-checkpointing", request.activation_checkpointing]
        words += ["--batch-size", str(request.batch_size), "--accumulate", str(request.accumulate)]
        if request.accumulate > 1 and not request.no_sync:
            words.append("--sync-every-microbatch")
        return " ".join(words)


def search(
    request: Request,
    machine: Machine,
    calibration: Calibration,
    tokens_per_step: int,
    *,
    most: int = 10,
) -> list[Setting]:
    """Returns the fastest settings that fit, fastest first.

    Tried are layouts (FSDP, and replicas of a node with HSDP and HFSDP), recomputation, and the
    division of the batch into micro-batches, with and without a reduction after each. Model,
    precision, sequence length and machine are the request's.

    Raises:
        UsageError: the tokens cannot be divided over the ranks, or nothing fits.
    """
    sequences = require_share(request, tokens_per_step)
    if calibration.mfu is not None or calibration.compute_s is not None:
        calibration = Calibration(scale=make_plan(request, machine, calibration).compute_scale)
    found: list[Setting] = []
    for base in _bases(request, machine):
        for batch_size in _batches(sequences):
            accumulate = sequences // batch_size
            tried = base.but(batch_size=batch_size, accumulate=accumulate)
            fitting = [
                setting
                for no_sync in ((False, True) if accumulate > 1 else (False,))
                if (setting := _setting(tried.but(no_sync=no_sync), machine, calibration))
                is not None
            ]
            if not fitting:
                break  # nor does a larger batch fit
            found += fitting
    if not found:
        raise UsageError(
            f"No setting that was tried fits on {request.ranks} x {machine.device.name}: use more "
            "ranks, a larger device, shorter sequences, or --precision bf16."
        )
    return sorted(found, key=lambda setting: -setting.tokens_per_s)[:most]


def as_table(settings: list[Setting]) -> Table:
    """Returns the settings for a terminal."""
    columns = "", "tokens/s, a rank", "step", "needs", "options of shardgrad train"
    table = Table(*columns, box=None, pad_edge=False)
    for number, each in enumerate(settings, 1):
        table.add_row(
            str(number),
            f"{each.tokens_per_s:,.0f}",
            f"{each.step_s * 1e3:,.0f} ms",
            nice_nbytes(each.needed_nbytes),
            each.options(),
        )
    return table


def _bases(request: Request, machine: Machine) -> Iterator[Request]:
    layouts: list[dict[str, Any]] = [{"mesh": None, "stage": "3"}]
    per_node = machine.devices_per_node
    if request.ranks > per_node and request.ranks % per_node == 0:
        mesh = f"{request.ranks // per_node}x{per_node}"
        layouts += [{"mesh": mesh, "stage": "3"}, {"mesh": mesh, "stage": "hfsdp"}]
    plain = request.but(batch_size=1, accumulate=1, no_sync=False, reshard_to=None)
    for layout in layouts:
        for mode in ("none", "selective", "full"):
            yield plain.but(**layout, activation_checkpointing=mode)


def _batches(sequences: int) -> Iterator[int]:
    """Yields the powers of two that divide the sequences of a rank."""
    size = 1
    while size <= min(sequences, _LARGEST_BATCH):
        if sequences % size == 0:
            yield size
        size *= 2


def _setting(request: Request, machine: Machine, calibration: Calibration) -> Setting | None:
    """Plans a setting; None if it does not fit, or is not possible."""
    few, more = _MICRO_BATCHES
    try:
        if request.accumulate <= more:
            plans = [make_plan(request, machine, calibration)]
        else:
            plans = [
                make_plan(request.but(accumulate=n), machine, calibration) for n in (few, more)
            ]
    except TrainingError:
        return None
    last: Plan = plans[-1]
    if not last.fits:
        return None
    step_s = last.step_s
    if len(plans) == 2:
        step_s += (last.step_s - plans[0].step_s) * (request.accumulate - more)
    return Setting(request, last.needed_nbytes, step_s, request.tokens / step_s)
