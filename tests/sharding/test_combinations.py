"""Stages and homes for parameters cut along any dim, over any mesh, or by themselves: equal, or
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardgrad import fully_shard
from shardgrad.errors import UnsupportedError
from shardgrad.features.tensor_extensions import require_extension
from shardgrad.sharding.offload import ShardMemory
from tests.support import tensor_extensions, tensor_parallel
from tests.support.parity import (
    BYTE_DTYPES,
    SHARDGRAD,
    Tensors,
    assert_same_bits,
    hsdp_mesh,
    last_dim,
    stack,
    train_squares,
)
from tests.support.ranks import on_ranks
from tests.support.tensor_extensions import Narrowed


def train(kind: str, micro_batches: int, **options: Any) -> Tensors:
    """Trains layers of one kind with the last of several backwards reducing."""
    if kind == "two axes":
        return tensor_parallel.train(
            SHARDGRAD, (2, 1), hidden=8, micro_batches=micro_batches, sync_each=False, **options
        )
    if kind == "extension":
        return tensor_extensions.train(
            SHARDGRAD, Narrowed, (6, 8, 4), micro_batches=micro_batches, sync_each=False, **options
        )
    model = SHARDGRAD.shard_stack(stack(6, 8, 4), shard_placement_fn=last_dim, **options)
    return train_squares(SHARDGRAD, model, 6, micro_batches=micro_batches, sync_each=False)


@pytest.mark.parametrize("kind", ["last dim", "two axes", "extension"])
@pytest.mark.parametrize(
    "options",
    [{"zero_stage": 1}, {"zero_stage": 2}, {"offload_policy": CPUOffloadPolicy()}],
    ids=["stage_1", "stage_2", "offloaded"],
)
@on_ranks(2)
def test_stages_and_homes_change_no_bit_of_any_kind_of_parameter(
    kind: str, options: dict[str, Any]
) -> None:
    assert_same_bits(train(kind, 2, **options), train(kind, 2))


@pytest.mark.parametrize("dtype", BYTE_DTYPES, ids=str)
@on_ranks(2)
def test_bytes_that_are_only_carried_are_cut_along_any_dim(dtype: torch.dtype) -> None:
    """Seven rows by six columns of bytes, cut by columns, are put together as they were."""
    values = torch.arange(42).reshape(7, 6).to(dtype)
    model = nn.Module()
    model.table = nn.Parameter(values.clone(), requires_grad=False)
    model.forward = lambda: model.table.detach().clone()  # type: ignore[method-assign]
    fully_shard(model, shard_placement_fn=last_dim)
    assert isinstance(model.table, DTensor)
    assert model.table.placements == (Shard(1),)
    assert model.table.to_local().shape == (7, 3)
    whole = model()
    assert torch.equal(whole.float(), values.float())
    model.reshard()
    first = 3 * dist.get_rank()
    assert torch.equal(model.table.to_local().float(), values[:, first : first + 3].float())


# -- refused


def _of_last_dim() -> dict[str, Any]:
    return {"module": nn.Linear(4, 4), "shard_placement_fn": last_dim}


def _of_dtensors() -> dict[str, Any]:
    module = nn.Linear(4, 4, bias=False)
    weight = distribute_tensor(module.weight.detach(), hsdp_mesh(1, 2)["shard"], [Shard(0)])
    module.weight = nn.Parameter(weight)
    return {"module": module}


def _of_extensions() -> dict[str, Any]:
    return {"module": tensor_extensions.extended(Narrowed, 4, 4)}


def _of_named_axes() -> dict[str, Any]:
    module = nn.Linear(4, 4, bias=False)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    weight = distribute_tensor(module.weight.detach(), mesh, [Replicate(), Replicate()])
    module.weight = nn.Parameter(weight)
    dims = fsdp.DataParallelMeshDims(shard="shard", replicate="replicate")
    return {"module": module, "mesh": mesh, "dp_mesh_dims": dims}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (_of_last_dim, 'zero_stage="hfsdp" for weight, which is sharded on dim 1'),
        (_of_dtensors, 'zero_stage="hfsdp" for weight, which is a DTensor already'),
        (_of_extensions, 'zero_stage="hfsdp" for 0.weight, which has fsdp_pre_all_gather'),
        pytest.param(
            _of_named_axes, 'zero_stage="hfsdp" with dp_mesh_dims', marks=tensor_parallel.needs_dims
        ),
    ],
    ids=["last_dim", "dtensors", "extensions", "named_axes"],
)
@on_ranks(2)
def test_sharding_over_both_axes_names_what_it_does_not_cut(
    arguments: Callable[[], dict[str, Any]], named: str
) -> None:
    options = {"mesh": hsdp_mesh(1, 2), **arguments()}
    module = options.pop("module")
    kinds = {name: type(param) for name, param in module.named_parameters()}
    with pytest.raises(UnsupportedError, match=named):
        fully_shard(module, zero_stage="hfsdp", **options)
    assert {name: type(param) for name, param in module.named_parameters()} == kinds


def test_an_extension_is_not_moved_off_its_device() -> None:
    param: Tensor = nn.Parameter(Narrowed(torch.ones(2, 2)))
    away = ShardMemory(torch.device("cpu"), is_offloaded=True)
    with pytest.raises(
        UnsupportedError, match="CPUOffloadPolicy for weight, which has fsdp_pre_all_gather"
    ):
        require_extension(param, "weight", None, away)
    require_extension(param, "weight", None, ShardMemory(torch.device("cpu")))
