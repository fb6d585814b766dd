"""`GradientPolicy(wire_dtype=...)` over streams: an all-to-all and a sum for each group, in rank
order.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardgrad
from shardgrad import ops
from shardgrad.engine import transports
from tests.simulated.accelerator.device import NAME, checked
from tests.simulated.accelerator.virtual_ranks import VirtualRanks, one_at_a_time

BF16 = torch.bfloat16
WIDTH, DEPTH = 8, 3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def _batch(rank: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(rank))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x.flip(0))


def _sharded(replicas: int) -> nn.Sequential:
    ranks = dist.get_world_size()
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    mesh = init_device_mesh(NAME, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    with one_at_a_time():
        model = _model()
    model = model.to(NAME)
    policy = shardgrad.GradientPolicy(wire_dtype=BF16)
    for layer in (*model, model):
        shardgrad.fully_shard(layer, mesh=mesh, gradient_policy=policy)
    return model


def _gradients(replicas: int) -> list[Tensor]:
    model = _sharded(replicas)
    for _ in range(2):
        model.zero_grad()
        _loss(model, _batch(dist.get_rank()).to(NAME)).backward()
    return [p.grad.to_local().cpu() for p in model.parameters()]


def _exchanged(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    total = parts[0].to(BF16).float()
    for part in parts[1:]:
        total = total + part.to(BF16).float()
    return total


def _expected(ranks: int, replicas: int) -> list[list[Tensor]]:
    """Returns what each rank holds, of whole models on the CPU."""
    by_rank = []
    for rank in range(ranks):
        model = _model()
        _loss(model, _batch(rank)).backward()
        by_rank.append([p.grad for p in model.parameters()])
    shards = ranks // replicas
    right: list[list[Tensor]] = [[] for _ in range(ranks)]
    for parts in zip(*by_rank, strict=True):
        sums = [
            _exchanged(list(parts[first : first + shards])) for first in range(0, ranks, shards)
        ]
        total = _exchanged(sums)
        if replicas > 2:  # the parts that they have added up are gathered
            total = total.to(BF16).float()
        pieces = (total / ranks).chunk(shards)
        for rank in range(ranks):
            right[rank].append(pieces[rank % shards])
    return right


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
def test_what_was_rounded_once_is_summed_in_float32_in_rank_order(
    ranks: int, replicas: int
) -> None:
    with checked():
        found = VirtualRanks(ranks).run(_gradients, replicas)
    for ours, right in zip(found, _expected(ranks, replicas), strict=True):
        for grad, expected in zip(ours, right, strict=True):
            assert grad.dtype == torch.float32
            assert torch.equal(grad, expected)


def test_a_group_is_reduced_by_one_all_to_all_and_one_sum() -> None:
    done: list[str] = []

    def counted(name: str, call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return call(*args, **kwargs)

        return counting

    with (
        patch.object(ops, "sum_chunks", counted("sum", ops.sum_chunks)),
        patch.object(dist, "all_to_all_single", counted("all-to-all", dist.all_to_all_single)),
        patch.object(
            transports, "_reduce_scatter", counted("reduce-scatter", transports._reduce_scatter)
        ),
    ):
        VirtualRanks(2).run(_gradients, 1)
    times = 2 * 2 * DEPTH  # ranks, backwards, groups
    assert Counter(done) == {"sum": times, "all-to-all": times}
