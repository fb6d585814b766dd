"""Applies `fully_shard` with the arguments of a request, and sums up the padding of the engine's
layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardgrad import fully_shard
from shardgrad.engine.grad_group import grads_of
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.unit import units_under
from shardgrad.plan.models import PlanModel
from shardgrad.plan.request import Request, require_units
from shardgrad.policies import GradientPolicy, MixedPrecisionPolicy
from shardgrad.sharding.layout import ShardLayout
from shardgrad.train.recompute import checkpointed

__all__ = ["Waste", "groups_of", "policies_of", "shard_plan_model", "waste_of"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WIRE_DTYPES = {None: None, "bf16": torch.bfloat16}


def policies_of(request: Request) -> dict[str, Any]:
    """Returns the keyword arguments of `fully_shard` for a request, without the mesh."""
    reduce_dtype = DTYPES[request.reduce_dtype or "fp32"]
    mixed = MixedPrecisionPolicy()
    if request.precision != "fp32":
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    gradient_dtype = None if request.gradient_dtype is None else DTYPES[request.gradient_dtype]
    return {
        "mp_policy": mixed,
        "gradient_policy": GradientPolicy(
            dtype=gradient_dtype, wire_dtype=_WIRE_DTYPES[request.wire_dtype]
        ),
        "reshard_after_forward": request.reshard_to,
        "zero_stage": request.stage if request.stage == "hfsdp" else int(request.stage),
    }


def shard_plan_model(plan_model: PlanModel, request: Request, mesh: DeviceMesh) -> None:
    """Gives the model its memory and shards it, as the training program does: blocks first, then
    the rest.

    Raises:
        UsageError: no module is of a class that was named as a unit.
    """
    require_units(request.units, plan_model.parts_of_blocks())
    policies = policies_of(request)
    weights = torch.bfloat16 if request.precision == "bf16" else None
    for name, block in plan_model.named_blocks():
        for part in block.modules():
            if part is not block and type(part).__name__ in request.units:
                _materialise(part, weights)
                fully_shard(part, mesh=mesh, **policies)
        _materialise(block, weights)
        block = checkpointed(block, request.activation_checkpointing, preserve_rng_state=False)
        plan_model.module.get_submodule(plan_model.blocks).register_module(name, block)
        fully_shard(block, mesh=mesh, **policies)
    _materialise(plan_model.module, weights)
    fully_shard(plan_model.module, mesh=mesh, **policies)


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


@dataclass(frozen=True)
class Waste:
    """Bytes of padding on one rank.

    Attributes:
        alignment_nbytes: padding that aligns each parameter's part to 128 bytes, and tails.
        uneven_nbytes: padding of parameters whose rows the ranks do not divide, averaged over the
            ranks.
        total_nbytes: size of the shards, padding included.
    """

    alignment_nbytes: int
    uneven_nbytes: int
    total_nbytes: int


def waste_of(groups: Sequence[ParamGroup]) -> Waste:
    """Sums up the padding in the parameter and gradient shards."""
    alignment = uneven = total = 0
    for layout, itemsize in _shards(groups):
        full = sum(piece.shard_numel for piece in layout.pieces)
        whole = sum(piece.numel for piece in layout.pieces)
        alignment += layout.padding_numel * itemsize
        uneven += (full * layout.world_size - whole) * itemsize // layout.world_size
        total += layout.chunk_numel * itemsize
    return Waste(alignment, uneven, total)


def _shards(groups: Sequence[ParamGroup]) -> Iterator[tuple[ShardLayout, int]]:
    for group in groups:
        yield group.layout, group.dtype.itemsize
        layout = grads_of(group).layout
        if layout is not None:
            yield layout, group.gradient_dtype.itemsize
