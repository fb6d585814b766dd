"""Applies `fully_shard` with the arguments of a request."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardgrad import FSDPModule, fully_shard
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.unit import units_under
from shardgrad.policies import GradientPolicy, MixedPrecisionPolicy
from shardgrad.programs.plan.models import PlanModel
from shardgrad.programs.plan.recompute import checkpointed
from shardgrad.programs.plan.request import Request
from shardgrad.programs.train.failure import UsageError

DTYPES: dict[str | None, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def policies_of(request: Request) -> dict[str, Any]:
    """Returns the keyword arguments of `fully_shard` for a request, without the mesh."""
    reduce_dtype = DTYPES[request.reduce_dtype or "fp32"]
    mixed = MixedPrecisionPolicy()
    if request.precision != "fp32":
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return {
        "mp_policy": mixed,
        "gradient_policy": GradientPolicy(wire_dtype=DTYPES.get(request.wire_dtype)),
        # As if there were room for all units; `planning.py` knows how many there is room for.
        "zero_stage": {"hfsdp": "hfsdp", "auto": 2}.get(request.stage) or int(request.stage),
    }


def shard_plan_model(plan_model: PlanModel, request: Request, mesh: DeviceMesh) -> None:
    """Gives the model its memory and shards it, as the training program does: the units that
    are asked for, then the blocks, then the rest.

    Raises:
        UsageError: there is no module that was named as a unit.
    """
    known = plan_model.possible_units()
    for unit in request.units:
        if unit not in known:
            raise UsageError(
                f"--unit {unit}: no module has this name or class; there are "
                f"{', '.join(known) or 'none'}."
            )
    policies = policies_of(request)
    weights = torch.bfloat16 if request.precision == "bf16" else None
    for name, part in reversed([*plan_model.module.named_modules()]):  # a child before its parent
        if name and (name in request.units or type(part).__name__ in request.units):
            _materialise(part, weights)
            fully_shard(part, mesh=mesh, **policies)
    together: list[nn.Module] = []
    blocks = plan_model.named_blocks()
    for count, (name, block) in enumerate(blocks, start=1):
        _materialise(block, weights)
        block = checkpointed(block, request.activation_checkpointing, preserve_rng_state=False)
        plan_model.module.get_submodule(plan_model.blocks).register_module(name, block)
        together.append(block)
        if count % request.blocks_per_unit == 0 or count == len(blocks):
            fully_shard(together, mesh=mesh, **policies)
            together = []
    if request.stage == "auto":
        policies["zero_stage"] = 3  # a plan says how many blocks stage "auto" keeps
    ends = [name for name in plan_model.ends if name not in request.units]
    for part in (*map(plan_model.module.get_submodule, ends), plan_model.module):
        _materialise(part, weights)
        fully_shard(part, mesh=mesh, **policies)
        if isinstance(part, nn.Embedding) and isinstance(part, FSDPModule):
            part.set_unshard_in_backward(False)  # which reads no weight


def _materialise(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Replaces meta tensors by fake ones on the CPU; shared parameters stay shared."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is None or param.device.type != "meta":
                continue
            if id(param) not in made:
                fake = torch.empty(param.shape, dtype=dtype or param.dtype, device="cpu")
                made[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
            part._parameters[name] = made[id(param)]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def groups_of(model: nn.Module) -> list[ParamGroup]:
    """Returns the parameter groups of all units of a model, in construction order."""
    return [group for unit in units_under(model) for group in unit.groups]
