"""`zero_stage="auto"`: keeps as many units unsharded as fit into the free memory.

[Note: Stage auto]
A unit that stays unsharded during a step is gathered once per step instead of twice. The memory
that a step needs depends on the program's batches and activations, so it is measured: the first
step runs as stage 3. The first forward after an optimizer step reads how much memory the device has
free, and all ranks take the minimum. In construction order, each unit is kept that fits into what
is left. Sizes are the same on all ranks, so all ranks keep the same units. From then on a kept unit
runs as stage 2.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.streams import is_capturing
from shardgrad.engine.unit import Unit, units_under

_MARGIN = 0.12  # of the device, for fragmentation and what NCCL takes later, as in plans


def stay_unsharded(model: nn.Module) -> list[str]:
    """Returns the names of the units under a module that are kept unsharded by their stage."""
    return [
        unit.name
        for unit in units_under(model)
        if all(group.stage.keeps_unsharded for group in unit.groups)
    ]


class StageAuto:
    """Called before each outermost forward of a unit with grad enabled, until it has decided."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._before_outermost_forward = unit.before_outermost_forward
        self._before: tuple[int, int] | None = None  # allocated bytes and steps, at the first one

    def __call__(self) -> None:
        """Decides, a collective then, if an optimizer has taken a step since the first call.

        Streams: the current one; the host waits for it. Capture: nothing is decided in one.
        """
        self._before_outermost_forward()
        unit, device = self._unit, self._unit.mesh.device
        # Under `participate`, a rank without a batch does not come here, so others must not count.
        is_joint = unit.context is not None and unit.context.participation is None
        if is_capturing(device) or not is_joint:
            return
        allocated = 0 if device.type == "cpu" else torch.accelerator.memory_allocated(device)
        groups = (group for each in _units(unit) for group in each.groups)
        steps = sum(p.steps_taken for group in groups for p in group.params)
        if self._before is None:
            self._before = allocated, steps
        elif steps != self._before[1]:
            unit.before_outermost_forward = self._before_outermost_forward
            _keep(unit, _least(_room(device, allocated - self._before[0]), unit))


def _units(root: Unit) -> list[Unit]:
    return [unit for module in root.modules for unit in units_under(module)]


def _room(device: torch.device, grown_nbytes: int) -> int:
    """Returns the bytes that units may keep: the memory that a step left free, less a margin, and
    less what has grown since that step began, such as optimizer states. 0 on the CPU, whose memory
    other programs use as well.
    """
    if device.type == "cpu":
        return 0
    free, total = torch.accelerator.get_memory_info(device)
    return free - round(_MARGIN * total) - grown_nbytes


def _least(nbytes: int, root: Unit) -> int:
    """Returns the minimum over the ranks of the root's mesh."""
    least = torch.tensor([nbytes], dtype=torch.int64, device=root.mesh.device)
    for group in root.mesh.comparable_groups:
        with recorder.group_log(group).waiting("memory that is left"):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least.item())


def _keep(root: Unit, room_nbytes: int) -> None:
    """Sets units that fit to stage 2. Skips the root, whose parameters backward needs first."""
    for unit in _units(root):
        groups = unit.groups
        nbytes = sum(g.layout.unsharded_numel * g.gather_dtype.itemsize for g in groups)
        is_asked = all(group.stage.decides and group.mesh == root.mesh for group in groups)
        if unit is not root and is_asked and nbytes <= room_nbytes:
            room_nbytes -= nbytes
            for group in groups:
                group.stage = replace(group.stage, keeps_unsharded=True)
