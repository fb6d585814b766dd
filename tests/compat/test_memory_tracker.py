"""torch's `FSDPMemTracker` over our units: what it sees, and that it leaves a model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPModState, _FSDPRefType

import shardgrad
from shardgrad.errors import UnsupportedError
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_same_bits,
    stack,
    token_loss,
    tower,
)
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")


def storages(tensors: Iterator[Tensor]) -> int:
    """Returns the bytes of all memory below the local tensors, each counted once."""
    found = {}
    for tensor in tensors:
        storage = tensor.to_local().untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def track(engine: Engine, *, tracked: bool = True) -> tuple[Tensors, Any, nn.Module]:
    """Trains three steps, the second one tracked."""
    model = engine.shard_tower(tower())
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    tracker = FSDPMemTracker(model, optim)
    tracker.track_inputs(engine.tokens(1))

    def take(step: int) -> None:
        token_loss(model, engine.tokens(step)).backward()
        optim.step()
        optim.zero_grad()

    take(0)
    with tracker if tracked else nullcontext():
        take(1)
    take(2)
    return engine.snapshot(model), tracker, model


@on_ranks(2)
def test_the_memory_tracker_sees_units_and_leaves_them_as_they_were() -> None:
    ours, tracker, model = track(SHARDGRAD)
    assert_same_bits(ours, track(SHARDGRAD, tracked=False)[0])
    assert_same_bits(ours, track(FSDP2)[0])
    peak = tracker.get_tracker_snapshot("peak")[CPU]
    assert peak[_FSDPRefType.SHARDED_PARAM] == storages(model.parameters())
    assert peak[_FSDPRefType.OPT] > 0
    for unit in (model, model.embedding, *model.layers):
        snapshots = tracker.memory_tracking[unit].snapshots
        (before,), (after,) = (
            snapshots[_FSDPModState.BEF_PRE_FW],
            snapshots[_FSDPModState.AFT_PRE_FW],
        )
        whole = sum(p.numel() * p.element_size() for p in _own(unit, model))
        gained = (
            after[CPU][_FSDPRefType.UNSHARDED_PARAM] - before[CPU][_FSDPRefType.UNSHARDED_PARAM]
        )
        assert gained >= whole, "what pre-forward gathers is not seen"
        assert _FSDPModState.AFT_POST_FW in snapshots
        assert _FSDPModState.AFT_PRE_BW in snapshots
    # The embedding's inputs are integers, so no gradient of them tells when its backward is over.
    for unit in model.layers:
        assert _FSDPModState.AFT_POST_BW in tracker.memory_tracking[unit].snapshots
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1


def _own(unit: nn.Module, root: nn.Module) -> list[nn.Parameter]:
    inner = {id(p) for child in (root.embedding, *root.layers) for p in child.parameters()}
    return [p for p in unit.parameters() if unit is not root or id(p) not in inner]


@on_ranks(2)
def test_the_memory_tracker_is_refused_for_a_unit_of_several_modules() -> None:
    model = stack(5, 7, 3)
    shardgrad.fully_shard([model[0], model[2]])
    shardgrad.fully_shard(model)
    with (
        pytest.raises(UnsupportedError, match=r"FSDPMemTracker over .*, a unit of several modules"),
        FSDPMemTracker(model),
    ):
        pass
