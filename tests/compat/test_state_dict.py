"""State dicts, distributed checkpoints, meta construction, and dtype changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.parity import (
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    hsdp_mesh,
    token_loss,
    tower,
    train,
)
from tests.support.ranks import on_ranks


def options_of(kind: str) -> dict[str, Any]:
    """Returns how to shard: rows over all ranks, over one of two axes, or even columns."""
    if kind == "replicas":
        return {"mesh": hsdp_mesh(2, dist.get_world_size() // 2)}
    even = lambda param: Shard(1) if param.ndim == 2 and param.shape[1] % 2 == 0 else None  # noqa: E731
    return {"shard_placement_fn": even} if kind == "columns" else {}


def even_tower() -> nn.Module:
    """A tower whose layers' first matrix has columns that two ranks divide."""
    model = tower()
    for layer in model.layers:
        layer.up, layer.norm, layer.down = nn.Linear(8, 11), nn.LayerNorm(8), nn.Linear(11, 8)
    model.embedding, model.norm, model.head = nn.Embedding(13, 8), nn.RMSNorm(8), nn.Linear(8, 13)
    return model


KINDS = pytest.mark.parametrize("kind", ["rows", "replicas", "columns"])


@KINDS
@on_ranks(2)
def test_a_state_dict_shares_storage_with_the_shards(kind: str) -> None:
    """Before a load, which writes in place, and after it."""
    names = list(even_tower().state_dict())
    model = SHARDGRAD.shard_tower(even_tower(), **options_of(kind))
    addresses = [param.to_local().data_ptr() for param in model.parameters()]
    loaded = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    model(SHARDGRAD.tokens(0)[0])
    state = model.state_dict()
    assert list(state) == names
    assert [value.to_local().data_ptr() for value in state.values()] == addresses
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert torch.equal(value.full_tensor(), loaded[name].full_tensor()), name


@pytest.mark.parametrize("from_rank_0", [False, True], ids=["on all ranks", "from rank 0"])
@on_ranks(2)
@as_under_fsdp2
def test_torchs_function_fills_a_meta_model_as_under_fsdp2(
    engine: Engine, from_rank_0: bool
) -> Tensors:
    """torch's function fills a model on the meta device, from a whole state on every rank or on
    one.
    """
    model = meta_tower(engine)
    state = {} if from_rank_0 and dist.get_rank() else tower(seed=3).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_model_state_dict(model, state, options=options)
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    return train(engine, model)


def meta_tower(engine: Engine, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = tower()
        model.register_buffer("seen", torch.zeros(3), persistent=False)
    return engine.shard_tower(model, **options)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned to the host"])
@on_ranks(2)
@as_under_fsdp2
def test_late_data_trains_bit_for_bit_like_fsdp2(engine: Engine, assign: bool) -> Tensors:
    """Assigned as by a loader of large checkpoints: one tensor after another."""
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if assign else {}
    model, full = meta_tower(engine, **options), tower(seed=4).state_dict()
    shards = {
        name: nn.Parameter(distribute_tensor(full[name], param.device_mesh, param.placements))
        for name, param in model.named_parameters()
    }
    if assign:
        for name, shard in shards.items():
            model.load_state_dict({name: shard}, assign=True, strict=False)
        return train(engine, model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(shards[name])
    return train(engine, model)


@pytest.mark.parametrize("reshard_after_forward", [True, False, 2])
@on_ranks(4)
def test_a_state_dict_after_forward_holds_the_shards(reshard_after_forward: bool | int) -> None:
    model = SHARDGRAD.shard_tower(tower(), reshard_after_forward=reshard_after_forward)
    model(SHARDGRAD.tokens(0)[0])
    states = get_model_state_dict(model), model.state_dict()
    assert list(states[0]) == list(states[1])
    for state in states:
        for name, value in state.items():
            assert torch.equal(value.full_tensor(), tower().state_dict()[name]), name
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        assert param.device_mesh.size() == dist.get_world_size(), name


@on_ranks(2)
def test_no_gradient_is_lost_however_often_a_model_is_cast() -> None:
    """Each cast makes new whole parameters, some at the addresses of old ones, and each needs its
    hook.
    """
    model = SHARDGRAD.shard_tower(tower())
    for cast in range(24):
        model.to(torch.float64 if cast % 2 else torch.float32)
        token_loss(model, SHARDGRAD.tokens(cast)).backward()
        assert [name for name, param in model.named_parameters() if param.grad is None] == []
        model.zero_grad()
