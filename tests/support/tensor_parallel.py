"""Layers that tensor parallelism cuts and an engine shards, and the loop that trains them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.support import parity
from tests.support.parity import Engine, Tensors

WIDTH = 6


@cache
def grid(*shape: int) -> DeviceMesh:
    names = {2: ("dp", "tp"), 3: ("replicate", "dp", "tp")}[len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Mlp(parity.Block):
    """A norm on sequence shards, one matrix cut by columns, one by rows; sizes that ranks do not
    divide.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def mlps(hidden: int = 10, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Mlp(WIDTH, hidden) for _ in range(2)))


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for mlp in model:
        parallelize_module(
            mlp,
            mesh,
            {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Replicate()),
            },
        )
    return model


def inputs(step: int, mesh: DeviceMesh) -> Tensor:
    """Returns what this rank's data-parallel rank gets; the same for all of its tensor-parallel
    ranks.
    """
    dp = mesh["dp"]
    rank = dp.get_local_rank()
    if mesh.ndim == 3:
        rank += dp.size() * mesh["replicate"].get_local_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(
        torch.get_default_dtype()
    )


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]


def build(
    engine: Engine, shape: tuple[int, ...], hidden: int = 10, seed: int = 0, **options: Any
) -> nn.Sequential:
    mesh = grid(*shape)
    model = parallelize(mlps(hidden, seed), mesh["tp"])
    return engine.shard(*model, model, mesh=data_mesh(mesh), **options)


def train(
    engine: Engine,
    shape: tuple[int, ...],
    *,
    hidden: int = 10,
    micro_batches: int = 1,
    sync_each: bool = True,
    max_norm: float | None = None,
    recomputed: bool = False,
    from_meta: bool = False,
    **options: Any,
) -> Tensors:
    with torch.device("meta" if from_meta else "cpu"):
        model = build(engine, shape, hidden, **options)
    if from_meta:
        model.to_empty(device="cpu")
        with torch.no_grad():
            values = build(engine, shape, hidden, **options).parameters()
            for param, value in zip(model.parameters(), values, strict=True):
                param.copy_(value)
    for mlp in model if recomputed else ():
        mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=False)

    def loss(number: int) -> Tensor:
        return model(inputs(number, grid(*shape))).square().mean()

    def clip(step: int) -> Tensors:
        if max_norm is None:
            return {}
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return {f"norm {step}": norm.full_tensor() if isinstance(norm, DTensor) else norm}

    loop = {"micro_batches": micro_batches, "sync_each": sync_each}
    return parity.train(engine, model, loss=loss, steps=2, before_step=clip, **loop)


needs_dims = pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="this torch has none"
)
