"""State dicts between engines, with every option of torch's functions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path

from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    assert_same_bits,
    token_loss,
    tower,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.two_engines import ENGINES, Trained, build, take_steps, whole


def trained(engine: Engine, **options: Any) -> Trained:
    model, optim = build(engine, **options)
    take_steps(engine, model, optim)
    return model, optim


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Requires the same structure, placements, devices and bits."""
    (mine, shape), (others, other_shape) = map(tree_flatten_with_path, (ours, theirs))
    assert shape == other_shape
    for (where, value), (_, other) in zip(mine, others, strict=True):
        assert type(value) is type(other), where
        if isinstance(value, DTensor):
            assert (value.placements, value.shape) == (other.placements, other.shape), where
            value, other = value.to_local(), other.to_local()
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.device) == (other.dtype, other.device), where
            assert torch.equal(value, other), where
        else:
            assert value == other, where


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("cpu", [False, True], ids=["in place", "on the CPU"])
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@on_ranks(2)
def test_state_dicts_are_fsdp2s_with_every_option(full: bool, cpu: bool, flatten: bool) -> None:
    """With torch's optimizer under both, and both load them."""
    options = StateDictOptions(
        full_state_dict=full, cpu_offload=cpu, flatten_optimizer_state_dict=flatten
    )
    states = []
    for engine in (SHARDGRAD, FSDP2):
        model = engine.shard_tower(tower())
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        token_loss(model, engine.tokens(0)).backward()
        optim.step()
        model_state = get_model_state_dict(model, options=options)
        optim_state = get_optimizer_state_dict(model, optim, options=options)
        states.append({"model": model_state, "optim": optim_state})
        if options.full_state_dict and options.cpu_offload and dist.get_rank():
            assert (model_state, optim_state) == ({}, {})
            continue
        other = engine.shard_tower(tower(seed=1))
        if not options.full_state_dict:
            set_model_state_dict(other, model_state, options=options)
            assert_same_bits(
                {n: p.to_local() for n, p in other.named_parameters()},
                {n: p.to_local() for n, p in model.named_parameters()},
            )
    assert_same_state(*states)


def full_state_goes_everywhere(source: str, target: str, from_rank_0: bool, replicas: int) -> None:
    writer, reader = ENGINES[source], ENGINES[target]
    full = StateDictOptions(full_state_dict=True, cpu_offload=from_rank_0)
    model, optim = trained(writer, replicas=replicas)
    right = whole(model, optim)
    saved = get_state_dict(model, optim, options=full)
    assert bool(saved[0]) is (dist.get_rank() == 0 or not from_rank_0)
    other, other_optim = build(reader, seed=1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_model_state_dict(other, saved[0], options=options)
    set_optimizer_state_dict(other, other_optim, saved[1], options=options)
    assert_same_bits(whole(other, other_optim), right)


@pytest.mark.parametrize("from_rank_0", [False, True], ids=["on all ranks", "from rank 0"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("fsdp2", "shardgrad"), ("shardgrad", "fsdp2"), ("shardgrad", "shardgrad")],
)
def test_a_full_state_of_one_engine_loads_in_the_other(
    two_ranks: Ranks, source: str, target: str, from_rank_0: bool
) -> None:
    two_ranks.run(full_state_goes_everywhere, source, target, from_rank_0, 1)


def test_a_full_state_of_replicas_loads_into_shards(four_ranks: Ranks) -> None:
    four_ranks.run(full_state_goes_everywhere, "shardgrad", "shardgrad", True, 2)


def two_optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """One for the layers and one, of another kind, for the rest."""
    layers = list(model.layers.parameters())
    rest = [param for param in model.parameters() if not any(param is other for other in layers)]
    return torch.optim.AdamW(layers, lr=1e-2), torch.optim.SGD(rest, lr=1e-1, momentum=0.9)


def take_step(model: nn.Module, optims: tuple[torch.optim.Optimizer, ...], step: int) -> None:
    token_loss(model, SHARDGRAD.tokens(step)).backward()
    for optim in optims:
        optim.step()
        optim.zero_grad()


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize(("source", "target"), [("fsdp2", "shardgrad"), ("shardgrad", "fsdp2")])
@on_ranks(2)
def test_the_state_of_several_optimizers_crosses_at_once(
    source: str, target: str, full: bool
) -> None:
    """One state for both; what it is loaded into trains on to the same bits."""
    options = StateDictOptions(full_state_dict=full)
    model, other = ENGINES[source].shard_tower(tower()), ENGINES[target].shard_tower(tower(seed=1))
    optims, other_optims = two_optimizers(model), two_optimizers(other)
    for each, its in ((model, optims), (other, other_optims)):
        take_step(each, its, 0)
        for module in (each, each.embedding, *each.layers):
            module.reshard()
    saved = get_state_dict(model, optims, options=options)
    loads = {"model_state_dict": saved[0], "optim_state_dict": copy.deepcopy(saved[1])}
    set_state_dict(other, other_optims, options=options, **loads)
    for each, its in ((model, optims), (other, other_optims)):
        take_step(each, its, 1)
    assert_same_bits(SHARDGRAD.snapshot(other), SHARDGRAD.snapshot(model))
