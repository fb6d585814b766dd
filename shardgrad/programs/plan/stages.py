"""Applies `fully_shard` with the arguments of a request."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.unit import units_under
from shardgrad.policies import GradientPolicy
from shardgrad.programs.plan.models import PlanModel
from shardgrad.programs.plan.recompute import checkpointed
from shardgrad.programs.plan.request import Request
from shardgrad.programs.train.sharding import precision_policy, shard_in_order


def shard_plan_model(plan_model: PlanModel, request: Request, mesh: DeviceMesh) -> None:
    """Gives the model its memory and shards it, as the training program does."""
    module, mode = plan_model.module, request.activation_checkpointing
    wire_dtype = torch.bfloat16 if request.wire_dtype == "bf16" else None
    shard_in_order(
        module,
        module.get_submodule(plan_model.blocks) if plan_model.blocks else nn.ModuleList(),
        plan_model.ends,
        fill=_materialise,
        wrap=lambda block: checkpointed(block, mode),
        arguments={
            "mesh": mesh,
            "mp_policy": precision_policy(request.precision),
            "gradient_policy": GradientPolicy(wire_dtype=wire_dtype),
            "zero_stage": request.stage if request.stage == "hfsdp" else int(request.stage),
        },
    )


def _materialise(module: nn.Module) -> None:
    """Replaces meta tensors by fake ones on the CPU; shared parameters stay shared."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is None or param.device.type != "meta":
                continue
            if id(param) not in made:
                fake = torch.empty(param.shape, dtype=param.dtype, device="cpu")
                made[id(param)] = nn.Parameter(fake, requires_grad=param.requires_grad)
            part._parameters[name] = made[id(param)]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def groups_of(model: nn.Module) -> list[ParamGroup]:
    """Returns the parameter groups of all units of a model, in construction order."""
    return [group for unit in units_under(model) for group in unit.groups]
