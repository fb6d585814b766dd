"""Parameters that several modules, or several calls of one module, use."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.parity import (
    SHARDGRAD,
    WIDTH,
    Engine,
    Tensors,
    as_unsharded,
    stack,
    tower,
    train,
)
from tests.support.ranks import Ranks, on_ranks


def tied_tower() -> nn.Module:
    model = tower()
    model.head.weight = model.embedding.weight
    return model


@on_ranks(2)
def test_the_root_owns_a_parameter_that_two_of_its_units_share() -> None:
    model = tied_tower()
    for inner in (model.embedding, model.head):
        SHARDGRAD.fully_shard(inner)
    SHARDGRAD.fully_shard(model)
    assert model.embedding.weight is model.head.weight
    assert isinstance(model.head.weight, DTensor)
    names = [name for name, _ in model.named_parameters()]
    assert "head.weight" in names
    assert "embedding.weight" not in names
    train(SHARDGRAD, model, steps=1)
    assert model.embedding.weight is model.head.weight


def tied_units(engine: Engine) -> nn.Sequential:
    """Units that share a weight, which the root owns, and own their biases; the root registers
    nothing.
    """
    model = stack(WIDTH, WIDTH, WIDTH)
    model[2].weight = model[0].weight
    for unit in (model[0], model[2], model):
        engine.fully_shard(unit)
    return model


@pytest.mark.parametrize("unshards", [False, True])
@on_ranks(2)
@as_unsharded
def test_a_unit_whose_tied_weight_the_root_owns_may_be_called_by_itself(
    engine: Engine, unshards: bool
) -> Tensors:
    """The root's parameter is used around its forward; the program may say so beforehand."""
    model = tied_units(engine)
    for step in range(3):
        x = engine.inputs(step, WIDTH, dtype=torch.get_default_dtype())
        model(x).square().mean().backward()
        if unshards and not engine.whole_batch:
            model.unshard()
        model[2](x).square().mean().backward()
    return engine.snapshot(model)


@on_ranks(2)
def test_state_dicts_after_an_evaluation_hold_and_take_shards_of_tied_parameters() -> None:
    model, x = tied_units(SHARDGRAD), SHARDGRAD.inputs(0, WIDTH)
    with torch.no_grad():
        model(x)
        saved = model.state_dict()
        assert [name for name, value in saved.items() if not isinstance(value, DTensor)] == []
        doubled = {name: 2 * value for name, value in saved.items()}
        model(x)
        model.load_state_dict(doubled)
        assert torch.equal(model[2].weight.full_tensor(), doubled["2.weight"].full_tensor())
        loaded = [doubled[name].full_tensor() for name in ("2.weight", "2.bias", "0.bias")]
        hidden = torch.tanh(nn.functional.linear(x, loaded[0], loaded[2]))
        torch.testing.assert_close(model(x), nn.functional.linear(hidden, loaded[0], loaded[1]))


class TwiceTied(nn.Module):
    """Two weights, each tied across units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.c.weight, self.d.weight = self.a.weight, self.b.weight


def names_of_many_builds() -> list[list[str]]:
    builds = []
    for i in range(30):
        # Objects lie at other addresses in each process and at each build.
        litter = [
            bytearray(100 * (dist.get_rank() + 1) + j) for j in range(7 * dist.get_rank() + i)
        ]
        model = TwiceTied()
        for unit in (model.a, model.b, model.c, model.d, model):
            SHARDGRAD.fully_shard(unit)
        builds.append([p.name for group in model._unit.groups for p in group.params])
        del litter
    return builds


def test_two_weights_tied_across_units_have_one_order_in_every_process(two_ranks: Ranks) -> None:
    ours, theirs = two_ranks.run(names_of_many_builds)
    assert ours == theirs
    assert all(names == ours[0] for names in ours)
