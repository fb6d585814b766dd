"""A sharded module is still the user's module: class, parameters, pickles, copies, collection."""

from __future__ import annotations

import copy
import gc
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import shardgrad
from tests.support.parity import (
    SHARDGRAD,
    UNSHARDED,
    WIDTH,
    Block,
    Tower,
    stack,
    tower,
    train,
)
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_classes_are_swapped_in_place_and_names_stay() -> None:
    model = tower()
    children = dict(model.named_modules())
    names = [name for name, _ in model.named_parameters()]
    assert SHARDGRAD.fully_shard(model.layers[0]) is model.layers[0]
    assert SHARDGRAD.fully_shard(model) is model
    assert dict(model.named_modules()) == children
    assert [name for name, _ in model.named_parameters()] == names
    for module, original in ((model.layers[0], Block), (model, Tower)):
        assert type(module).__name__ == f"FSDP{original.__name__}"
        assert type(module).__mro__[2] is original
        assert isinstance(module, original)
        assert isinstance(module, shardgrad.FSDPModule)
        assert isinstance(module, fsdp.FSDPModule)
    assert type(model.layers[1]) is Block
    assert type(tower().layers[0]) is Block


@on_ranks(2)
def test_a_slice_of_a_sharded_sequential_is_a_plain_one() -> None:
    model = stack(5, 7, 3)
    SHARDGRAD.fully_shard(model)
    part = model[:1]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]


@on_ranks(2)
def test_attributes_of_parameters_survive() -> None:
    model = stack(5, 7)
    model[0].weight.tag = "mine"
    SHARDGRAD.fully_shard(model)
    assert model[0].weight.tag == "mine"


@on_ranks(2)
def test_a_deleted_model_is_collected() -> None:
    model = SHARDGRAD.shard_tower(tower())
    train(SHARDGRAD, model, steps=1)
    watched = [weakref.ref(model), weakref.ref(model.layers[0])]
    watched += [weakref.ref(param) for param in model.parameters()]
    del model
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


@on_ranks(2)
def test_a_parameter_replaced_by_hand_is_taken_over() -> None:
    """Also where `__setattr__` keeps it a second time, as in `nn.RNN`."""
    torch.manual_seed(0)
    plain = nn.RNN(WIDTH, 5)
    model = SHARDGRAD.fully_shard(copy.deepcopy(plain))
    x = SHARDGRAD.inputs(0, WIDTH)
    for _ in range(2):
        model.weight_hh_l0 = nn.Parameter(model.weight_hh_l0.detach() * 2)
        with torch.no_grad():
            plain.weight_hh_l0 *= 2
        assert torch.equal(model(x)[0], plain(x)[0])
        model.reshard()
    model.weight_hh_l0 = nn.Parameter(model.weight_hh_l0.detach() * 2)
    model.unshard()
    assert torch.equal(model.weight_hh_l0, 2 * plain.weight_hh_l0)


@on_ranks(2)
def test_a_tied_parameter_may_be_loaded_into_each_of_its_places() -> None:
    model, plain = stack(WIDTH, WIDTH, WIDTH), stack(WIDTH, WIDTH, WIDTH)
    for each in (model, plain):
        each[2].weight = each[0].weight
    SHARDGRAD.fully_shard(model)
    model.load_state_dict({name: p * 2 for name, p in model.state_dict().items()}, assign=True)
    plain.load_state_dict({name: p * 2 for name, p in plain.state_dict().items()})
    for step in range(2):
        x = SHARDGRAD.inputs(step, WIDTH)
        assert torch.equal(model(x), plain(x))
        model.reshard()
        assert model[0].weight is model[2].weight


@on_ranks(2)
def test_an_optimizer_built_right_after_a_parameter_was_replaced_trains_the_new_one() -> None:
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    for make in (shardgrad.optim.AdamW, torch.optim.AdamW):
        model, plain = SHARDGRAD.fully_shard(stack(WIDTH, 5)), stack(WIDTH, 5)
        model[0].weight = nn.Parameter(model[0].weight.detach() * 2)
        with torch.no_grad():
            plain[0].weight *= 2
        optimizers = (make(model.parameters(), 0.1), torch.optim.AdamW(plain.parameters(), 0.1))
        for trained, optimizer in zip((model, plain), optimizers, strict=True):
            for _ in range(3):
                trained(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        replaced, right = model[0].weight.full_tensor(), plain[0].weight.detach()
        torch.testing.assert_close(replaced, right, atol=1e-3, rtol=0)


class Product(nn.Module):
    """Multiplies by integers, until they are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3 * WIDTH).reshape(WIDTH, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype)


@on_ranks(2)
def test_integers_that_are_replaced_by_floats_are_trained() -> None:
    model = SHARDGRAD.fully_shard(Product())
    x = SHARDGRAD.inputs(0, WIDTH)
    assert torch.equal(model(x), Product()(x))
    model.reshard()
    model.weight = nn.Parameter(model.weight.detach().float() / 2)
    model(x).sum().backward()
    plain = Product().weight.float().div(2).requires_grad_()
    (UNSHARDED.inputs(0, WIDTH) @ plain).sum().div(dist.get_world_size()).backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.grad)
