"""Parameters that travel by themselves: the numbers of FSDP2, and the same messages on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from shardgrad.sharding import zero_copy
from tests.support.parity import (
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    stack,
    watching_collectives,
)
from tests.support.ranks import on_ranks

SIZES = (64, 128, 64)


@contextmanager
def weights_direct() -> Iterator[None]:
    """Makes the weights of small layers direct, and not their biases."""
    with patch.object(zero_copy, "ZERO_COPY_NBYTES", 2**10):
        yield


def sharded_stack(engine: Engine, **options: Any) -> nn.Sequential:
    """Returns two linear layers, each a unit."""
    return engine.shard_stack(stack(*SIZES), **options)


# -- numbers


class Sum(nn.Module):
    """Two parameters whose gradients are one tensor, in two shapes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(64, 64))
        self.b = nn.Parameter(torch.randn(4096))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.view(-1) + self.b) * x


@on_ranks(2)
@as_under_fsdp2
def test_gradients_that_share_memory_are_only_read(engine: Engine) -> Tensors:
    with weights_direct():
        model = engine.fully_shard(Sum())
        kept: list[Tensor] = []
        for step in range(2):
            out = model(engine.inputs(step, 4096)[0])
            out.register_hook(kept.append)
            out.square().sum().backward()
        return {**engine.snapshot(model), **{f"kept {i}": grad for i, grad in enumerate(kept)}}


# -- messages


@on_ranks(2)
def test_a_programs_own_all_gather_gets_everything_in_one_message() -> None:
    with weights_direct():
        model = sharded_stack(SHARDGRAD)
        for layer in (model[0], model[2]):
            layer.set_custom_all_gather(DefaultAllGather())
        x = SHARDGRAD.inputs(0, SIZES[0])
        model(x).sum().backward()
        seen: list[tuple[str, int]] = []
        with watching_collectives(lambda name, tensor: seen.append((name, tensor.numel()))):
            model(x).sum().backward()
    gathers = [numel for name, numel in seen if name.startswith("all_gather")]
    assert gathers
    assert min(gathers) > WEIGHT // 2


WEIGHT = SIZES[0] * SIZES[1]


@on_ranks(2)
def test_a_dropped_all_gather_gives_the_whole_parameters_back() -> None:
    with weights_direct():
        model = sharded_stack(SHARDGRAD)
        model(SHARDGRAD.inputs(0, SIZES[0])).sum().backward()
        (group,) = model[0]._unit.groups
        whole = group.unsharded_memory.flat.untyped_storage()
        handle = model[0].unshard(async_op=True)
        assert whole.nbytes() >= WEIGHT * 4  # on the way
        model[0].reshard()
        del handle
        assert whole.nbytes() == 0
