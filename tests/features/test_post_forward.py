"""`reshard_after_forward` as a number of ranks: what modules show and take, and its memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardgrad.engine.unit import units_under
from shardgrad.errors import LostWorkWarning
from shardgrad.sharding.dtensor import local_of
from tests.support.parity import GATHERED, UNSHARDED, Engine, Tensors, as_unsharded, stack
from tests.support.ranks import on_ranks


def nbytes_over_fewer_ranks(model: nn.Module) -> int:
    return sum(
        local_of(p.post_forward).untyped_storage().nbytes()
        for unit in units_under(model)
        for group in unit.groups
        for p in group.params
        if p.post_forward is not None
    )


def over_two(engine: Engine) -> nn.Sequential:
    """Returns a model, some of it sharded by columns, that a forward leaves over two of four
    ranks.
    """
    model = stack(5, 8, 7, 3)
    engine.shard(
        model[0],
        model[2],
        model,
        reshard_after_forward=2,
        shard_placement_fn=lambda p: Shard(1) if p.shape == (7, 8) else None,
    )
    return model


@on_ranks(4)
@as_unsharded
def test_what_is_written_to_two_of_four_ranks_shards_stays(engine: Engine) -> Tensors:
    """Changes weights by hand where a forward has left them, and trains on."""
    model = over_two(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for step in range(3):
        model(engine.inputs(9, 5))
        if engine is not UNSHARDED:
            assert nbytes_over_fewer_ranks(model) > 0
            shown = model[0].weight.to_local(), model[2].weight.to_local()
            assert [local.shape for local in shown] == [(4, 5), (7, 4)]
        with torch.no_grad():
            model[0].weight.mul_(1.5)
            model[2].bias.add_(0.1)
        for part in range(2):
            engine.loss(model, 2 * step + part, 5).backward()
            assert nbytes_over_fewer_ranks(model) == 0
        found |= {f"{name} in step {step}": x for name, x in engine.snapshot(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


@on_ranks(4)
@as_unsharded
def test_clipping_finds_the_gradients_after_an_evaluation_over_two_of_four_ranks(
    engine: Engine,
) -> Tensors:
    model = over_two(engine)
    engine.loss(model, 0, 5).backward()
    with torch.no_grad():
        model(engine.inputs(9, 5))
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return engine.snapshot(model)


@on_ranks(4)
def test_what_is_written_to_two_of_four_ranks_shards_and_dropped_is_told() -> None:
    model = over_two(GATHERED)
    model(torch.ones(2, 5))
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.warns(LostWorkWarning, match=r"weight was written while unsharded"):
        model[0].reshard()
