"""Parameters that several modules, or several calls of one module, use."""

from __future__ import annotations

from copy import deepcopy
from io import BytesIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.parity import (
    SHARDGRAD,
    hsdp_mesh,
    stack,
    token_loss,
    tower,
    train,
)
from tests.support.ranks import Ranks, on_ranks


@on_ranks(2)
def test_the_root_owns_a_parameter_that_two_of_its_units_share() -> None:
    """Also if the root is told to ignore it, which one of them has sharded."""
    model = tower()
    weight = model.head.weight = model.embedding.weight
    SHARDGRAD.shard(model.embedding, model.head)
    SHARDGRAD.shard(model, ignored_params={weight})
    assert model.embedding.weight is model.head.weight
    assert isinstance(model.head.weight, DTensor)
    train(SHARDGRAD, model, steps=1)
    assert model.embedding.weight is model.head.weight
    token_loss(model, SHARDGRAD.tokens(1))  # leaves the root unsharded
    assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.head.state_dict()["weight"], DTensor)


@on_ranks(2)
def test_a_unit_of_which_an_outer_one_takes_a_parameter_keeps_its_settings() -> None:
    """The first backward leaves a sum for the second, whose sum is divided by three."""
    model, mesh = stack(6, 6, 6), hsdp_mesh(2, 1)
    model[2].weight = model[0].weight
    whole, x = deepcopy(model), torch.ones(2, 6)
    first = SHARDGRAD.fully_shard(model[0], mesh=mesh)
    first.set_requires_all_reduce(False)
    first.set_gradient_divide_factor(3.0)
    shown: list[torch.Tensor] = []
    first.set_all_reduce_hook(shown.append)
    SHARDGRAD.shard(model[2], model, mesh=mesh)
    for is_last in (False, True):
        whole(x).sum().backward()
        if is_last:
            first.set_requires_all_reduce(True)
        model(x).sum().backward()
        assert (first.bias.grad is not None) == is_last == bool(shown)
    right = whole[0].bias.grad * dist.get_world_size() / 3
    torch.testing.assert_close(first.bias.grad.full_tensor(), right)


@on_ranks(2)
def test_a_weight_that_an_outer_unit_took_is_saved_without_its_units() -> None:
    model = stack(6, 6, 6)
    model[2].weight = model[0].weight
    SHARDGRAD.shard(model[0], model[2], model)
    torch.save(model[0].weight, BytesIO())


class TwiceTied(nn.Module):
    """Two weights, each tied across units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.c.weight, self.d.weight = self.a.weight, self.b.weight


@on_ranks(2)
def test_a_tied_weight_of_a_meta_model_may_be_loaded_under_its_second_name_only() -> None:
    with torch.device("meta"):
        model = SHARDGRAD.fully_shard(TwiceTied())
    whole, mesh = TwiceTied(), model.a.weight.device_mesh
    pieces = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in whole.state_dict().items()}
    del pieces["a.weight"]
    model.load_state_dict(pieces, strict=False, assign=True)
    model.unshard()
    assert torch.equal(model.a.weight, whole.a.weight)


def names_of_many_builds() -> list[list[str]]:
    builds = []
    for i in range(30):
        # Objects lie at other addresses in each process and at each build.
        litter = [
            bytearray(100 * (dist.get_rank() + 1) + j) for j in range(7 * dist.get_rank() + i)
        ]
        model = TwiceTied()
        SHARDGRAD.shard(model.a, model.b, model.c, model.d, model)
        builds.append([p.name for group in model._unit.groups for p in group.params])
        del litter
    return builds


def test_two_weights_tied_across_units_have_one_order_in_every_process(two_ranks: Ranks) -> None:
    ours, theirs = two_ranks.run(names_of_many_builds)
    assert ours == theirs
    assert all(names == ours[0] for names in ours)
