"""`shardgrad plan --measure`: forward and backward of a few blocks on this machine, against the
roofline.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardgrad.plan.cost import CostModel, compute_s
from shardgrad.plan.hardware import Machine, require_same_kind
from shardgrad.plan.models import PlanModel, build_plan_model
from shardgrad.plan.rehearsal import rehearse
from shardgrad.plan.request import Request
from shardgrad.train.failure import UsageError
from shardgrad.train.launcher import available_cores
from shardgrad.train.recompute import checkpointed

__all__ = ["Measured", "measure"]

_BLOCKS = 2
_SECONDS = 1.0  # that the roofline may give one step: sequences are shortened until it does
_SHORTEST = 32
_WARM_UP, _STEPS = 2, 7


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        scale: measured seconds of forward and backward over those of the roofline, by medians.
        sentence: what was run, and how it scales the plan.
    """

    scale: float
    sentence: str


def measure(request: Request, machine: Machine) -> Measured:
    """Runs a few steps of a part of the model, unsharded, and compares them with the plan of the
    same part.

    Args:
        request: the request of the plan.
        machine: the machine of the plan, of which this one is a part.

    Raises:
        UsageError: this machine is of another kind, or has too little memory.
    """
    device = _device_here(machine)
    part, roofline_s = _part_of(request, machine)
    plan_model = build_plan_model(part)
    all_blocks = len(plan_model.alike())
    plan_model.keep_alike(part.blocks or all_blocks)
    _check_memory(plan_model, device)
    threads = torch.get_num_threads()
    if device.type == "cpu":  # as many as each rank will have, if they are all here
        ranks = min(request.ranks, machine.devices_per_node)
        torch.set_num_threads(max(1, available_cores() // ranks))
    try:
        times = _times(plan_model, part, device)
    finally:
        torch.set_num_threads(threads)
    median = statistics.median(times)
    lower, _, upper = statistics.quantiles(times, n=4)
    scale = median / roofline_s
    sentence = (
        f"Measured on this machine's {device.type}: {len(plan_model.alike())} of {all_blocks} "
        f"blocks, "
        f"{part.batch_size} x {part.seq_len} of {request.batch_size} x {request.seq_len} tokens, "
        f"forward "
        f"and backward in {median * 1e3:,.1f} ms (quartiles {lower * 1e3:,.1f} to "
        f"{upper * 1e3:,.1f}, "
        f"{len(times)} steps). The roofline says {roofline_s * 1e3:,.1f} ms, so the plan's compute "
        f"takes "
        f"{scale:.2f} times the roofline's."
    )
    return Measured(scale, sentence)


def _device_here(machine: Machine) -> torch.device:
    if machine.device.is_synchronous:
        return torch.device("cpu")
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    require_same_kind(
        machine, None if here is None else str(torch.get_device_module(here).get_device_name(here))
    )
    return here or torch.device("cpu")


def _part_of(request: Request, machine: Machine) -> tuple[Request, float]:
    """Returns a part of the step that takes about a second, and the roofline's seconds for it."""
    part = request.but(
        ranks=1,
        mesh=None,
        stage="3",
        reshard_to=None,
        units=(),
        accumulate=1,
        no_sync=False,
        blocks=_BLOCKS,
    )
    cost = CostModel(machine, 1)
    seconds = compute_s(rehearse(part).events, cost)
    while seconds > _SECONDS and (part.batch_size > 1 or part.seq_len > _SHORTEST):
        if part.batch_size > 1:
            part = part.but(batch_size=max(1, int(part.batch_size * _SECONDS / seconds)))
        else:
            part = part.but(
                seq_len=max(_SHORTEST, min(part.seq_len // 2, int(part.seq_len / seconds)))
            )
        seconds = compute_s(rehearse(part).events, cost)
    return part, seconds


def _check_memory(plan_model: PlanModel, device: torch.device) -> None:
    numel = sum(param.numel() for param in plan_model.module.parameters())
    needed = 12 * numel  # weights, gradients, and as much again for activations
    if device.type == "cpu":
        with open("/proc/meminfo", encoding="ascii") as stream:
            rows = dict(line.split(":") for line in stream)
        free = int(rows["MemAvailable"].split()[0]) * 1024
    else:
        free = torch.get_device_module(device).mem_get_info(device)[0]
    if needed > free:
        raise UsageError(
            f"--measure needs about {needed / 2**30:.1f} GiB for {_BLOCKS} blocks with embedding "
            f"and head, "
            f"and {free / 2**30:.1f} GiB are free: measure a narrower model, or give --mfu or "
            f"--compute-s."
        )


def _times(plan_model: PlanModel, part: Request, device: torch.device) -> list[float]:
    """Returns the seconds of each step."""
    model = plan_model.module
    dtype = torch.float32 if part.precision == "fp32" else torch.bfloat16
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            nn.init.normal_(param, std=0.02)
    for name, block in plan_model.named_blocks():
        wrapped = checkpointed(block, part.activation_checkpointing)
        if part.compile:
            wrapped.compile()
        model.get_submodule(plan_model.blocks).register_module(name, wrapped)
    model.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)
    times = []
    for number in range(_WARM_UP + _STEPS):
        begin = time.perf_counter()
        with device:  # where the program's own loss makes its inputs
            loss = plan_model.loss(part.batch_size, part.seq_len)
        loss.backward()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        if number >= _WARM_UP:
            times.append(time.perf_counter() - begin)
        for param in model.parameters():
            param.grad = None
    return times


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Casts floating-point inputs, as `cast_forward_inputs` does in the planned step."""

    def cast(value: Any) -> Any:
        return (
            value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
        )

    return tree_map(cast, (args, kwargs))
