"""Activation checkpointing inside, outside and across units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.support.parity import (
    SHARDGRAD,
    VOCABULARY,
    WIDTH,
    Engine,
    Tensors,
    as_under_fsdp2,
    tower,
    train,
)
from tests.support.ranks import on_ranks


class Recomputed(nn.Module):
    """Calls another module under activation checkpointing."""

    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.inner, *args, use_reentrant=self.use_reentrant)


def by_composition(module: nn.Module) -> nn.Module:
    return composable_checkpoint(module)


def by_a_wrapper(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)


def by_its_caller(module: nn.Module) -> nn.Module:
    return Recomputed(module, use_reentrant=False)


@pytest.mark.parametrize("recomputed", [by_composition, by_a_wrapper, by_its_caller])
@pytest.mark.parametrize("units", ["blocks", "lists", "tied"])
@on_ranks(2)
@as_under_fsdp2
def test_every_kind_of_recomputation_goes_with_every_kind_of_unit(
    engine: Engine, units: str, recomputed: Callable[[nn.Module], nn.Module]
) -> Tensors:
    """Recomputes every block. Units are blocks, or lists of what stands side by side, or hold tied
    weights.

    The first unit of forward is not gathered for backward, where nothing needs its values. Blocks
    compute in bfloat16, the second time too, and so does each module of a list.
    """
    model = tower()
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    if units == "tied":
        model.head.weight = model.embedding.weight
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for i, layer in enumerate(model.layers):
        if units == "blocks":
            engine.fully_shard(layer, mp_policy=policy)
        model.layers[i] = recomputed(layer)
    if units == "blocks":
        engine.fully_shard(model.embedding)
    else:
        engine.fully_shard([model.embedding, model.norm, model.head], mp_policy=policy)
        engine.shard(list(model.layers[:2]), model.layers[2])
    engine.fully_shard(model)
    if units == "blocks":
        model.embedding.set_unshard_in_backward(False)
    found = train(engine, model, steps=2)
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


class Island(nn.Module):
    """Computes in the dtype of its input, as a router of experts in float32 does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(100 * x * self.weight.to(x.dtype))


class WithAnIsland(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.island: nn.Module = Island()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.island(self.linear(x).float()).to(x.dtype)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recomputed", ["part", "unit"])
@pytest.mark.parametrize("measured", [False, True])
@on_ranks(2)
@as_under_fsdp2
def test_a_part_is_recomputed_from_the_inputs_of_its_first_run(
    engine: Engine, recomputed: str, use_reentrant: bool, measured: bool
) -> Tensors:
    """Inputs of a unit are cast to bfloat16, those of its parts are not.

    A metric calls the part between forward and backward, which FSDP2 cannot do.
    """
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    blocks = [WithAnIsland() for _ in range(3)]
    islands = [block.island for block in blocks]
    for block in blocks:
        if recomputed == "part":
            block.island = Recomputed(block.island, use_reentrant)
        engine.fully_shard(block, mp_policy=policy)
    if recomputed == "unit":
        blocks = [Recomputed(block, use_reentrant) for block in blocks]
    # A reentrant checkpoint needs an input that requires a gradient.
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    engine.fully_shard(model, mp_policy=policy)

    def loss(number: int) -> Tensor:
        x = engine.inputs(number, WIDTH)
        found = model(x).square().mean()
        if measured and engine is SHARDGRAD:
            with torch.no_grad():
                for island in islands:
                    island(x)
        return found

    return train(engine, model, loss=loss)
