"""Memory of gradients is not another's before all that reads it, in whatever order the streams
allow.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgrad
from tests.cuda_runtime import inspection
from tests.support.ranks import Ranks

WIDTH = 64


def thawed_between_backwards(order: str) -> list[torch.Tensor]:
    """Weights begin to require grad between two backwards that accumulate: gradients get other
    places.
    """
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
    )
    model = nn.Sequential(*blocks).cuda()
    for block in model:
        shardgrad.fully_shard(block)
    shardgrad.fully_shard(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    with inspection.order(order):
        for _ in range(2):
            for requires_grad in (False, True):
                for block in model:
                    block[0].weight.requires_grad_(requires_grad)
                x = torch.randn(4, WIDTH, generator=generator).cuda()
                (model(x) - x.flip(0)).square().mean().backward()
            found += [param.grad.to_local().cpu() for param in model.parameters()]
            model.zero_grad()
    return found


def test_gradients_that_get_other_places_are_the_same_in_every_order() -> None:
    ranks = Ranks(2, backend="cpu:gloo,cuda:nccl")
    try:
        right = ranks.run(thawed_between_backwards, "host")
        for order in ("late", "1", "2"):
            for expected, got in zip(
                right, ranks.run(thawed_between_backwards, order), strict=True
            ):
                assert all(map(torch.equal, expected, got)), order
    finally:
        ranks.stop()


def kept_beside_another_stream(order: str) -> bool:
    """The next forward runs on another stream, and frees; the first one goes on beside it, and
    allocates.
    """
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).cuda()
    shardgrad.fully_shard(model)
    x = torch.ones(4, WIDTH, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    first.wait_stream(torch.cuda.current_stream())
    with inspection.order(order):
        with torch.cuda.stream(first):
            model(x).sum().backward()
            kept = model[0].weight.grad
            right = kept.to_local().clone()
            model.zero_grad()
        second.wait_stream(first)
        with torch.cuda.stream(second), torch.no_grad():
            model(x)
        with torch.cuda.stream(first):
            others = [torch.full_like(right, 7.0) for _ in range(3)]
        torch.cuda.synchronize()
    assert len(others) == 3
    return torch.equal(kept.to_local(), right)


@pytest.mark.parametrize("order", ["host", "late", "1"])
def test_a_kept_gradient_stays_when_another_stream_frees_and_the_first_allocates(
    order: str,
) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert kept_beside_another_stream(order)
    finally:
        dist.destroy_process_group()
