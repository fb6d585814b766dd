"""`zero_stage`: the same numbers in every stage, and the traffic and the memory that the docs
give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgrad
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.unit import units_under
from shardgrad.features import zero_stage_auto
from shardgrad.features.zero_stage_auto import stay_unsharded
from tests.support.parity import (
    SHARDGRAD,
    Tensors,
    Tower,
    assert_same_bits,
    hsdp_mesh,
    make_optimizer,
    token_loss,
    tower,
    watching_collectives,
)
from tests.support.ranks import on_ranks

STEPS = 3


def groups_of(model: nn.Module) -> list[ParamGroup]:
    return [group for unit in units_under(model) for group in unit.groups]


# -- traffic


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the bytes that this rank sends, in groups of two."""
    sent: Counter[str] = Counter()
    with watching_collectives(lambda name, chunk: sent.update(nbytes=chunk.nbytes)):
        yield sent


def step_once(
    model: Tower,
    optim: torch.optim.Optimizer,
    micro_batches: int,
    seed: int,
    says_last: str = "set_is_last_backward",
) -> None:
    for micro in range(micro_batches):
        getattr(model, says_last)(micro == micro_batches - 1)
        token_loss(model, SHARDGRAD.tokens(seed + micro)).backward()
    optim.step()
    optim.zero_grad()


def traffic_of(stage: int | str, *says_last: str, **options: Any) -> tuple[int, int, int]:
    """Returns the bytes that one step of two micro-batches sends, and those of one chunk of shards
    and of gradients.
    """
    model = SHARDGRAD.shard_tower(tower(), reshard_after_forward=None, zero_stage=stage, **options)
    model.set_reshard_after_forward(stage in (3, "hfsdp"))  # nothing is whole by chance
    optim = make_optimizer("sgd", model)
    step_once(model, optim, 2, 0, *says_last)
    with counted() as sent:
        step_once(model, optim, 2, 2, *says_last)
    groups = groups_of(model)
    shards = sum(group.layout.chunk_numel for group in groups) * 4
    gradients = sum(group.grads.layout.chunk_numel for group in groups) * 4
    return sent["nbytes"], shards, gradients


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_stage_sends_what_the_docs_say(stage: int) -> None:
    """On two ranks a whole gather or reduction sends one chunk."""
    sent, shards, gradients = traffic_of(stage)
    gathers, reductions = {1: (1, 1), 2: (1, 2), 3: (4, 2)}[stage]
    assert sent == gathers * shards + reductions * gradients


@pytest.mark.parametrize(
    ("says_last", "reductions"), [("set_is_last_backward", 2), ("set_requires_all_reduce", 1)]
)
@on_ranks(4)
def test_the_outer_axis_carries_little(says_last: str, reductions: int) -> None:
    """Four ranks, two by two: the outer axis carries a quarter of what the inner axis does, or
    less.
    """
    mesh = hsdp_mesh(2, 2)
    sent, shards, gradients = traffic_of("hfsdp", says_last, mesh=mesh)
    # Outer: a chunk a step, and one a reduction. Inner: two chunks in each of four gathers, two
    # reductions.
    assert sent == (1 + 4 * 2) * shards + (reductions + 2 * 2) * gradients


@on_ranks(4)
def test_auto_keeps_units_unsharded_as_long_as_every_rank_has_room() -> None:
    """One rank has room for one unit, the others for a second, which is larger: all of both
    replicas keep the first. One alone has a batch in the first step, which therefore does not
    count.
    """
    mesh = hsdp_mesh(2, 2)
    [group] = units_under(SHARDGRAD.shard_tower(tower(), mesh=mesh))[1].groups
    room = (5 if dist.get_rank() else 1) * group.layout.unsharded_numel * 4
    found: dict[int | str, tuple[Tensors, int]] = {}
    for stage in (3, "auto"):
        model = SHARDGRAD.shard_tower(tower(), zero_stage=stage, mesh=mesh)
        optim = make_optimizer("adamw", model)
        with shardgrad.participate(model):
            if dist.get_rank() == 0:
                token_loss(model, SHARDGRAD.tokens(3)).backward()
        optim.step()
        with mock.patch.object(zero_stage_auto, "_room", return_value=room):
            step_once(model, optim, 1, 0)
            assert stay_unsharded(model) == []
            step_once(model, optim, 1, 1)
        with counted() as sent:
            step_once(model, optim, 1, 2)
        found[stage] = SHARDGRAD.snapshot(model), sent["nbytes"]
    assert stay_unsharded(model) == [units_under(model)[1].name]
    assert_same_bits(found["auto"][0], found[3][0])
    assert found[3][1] - found["auto"][1] == group.layout.chunk_numel * 4  # one gather of a chunk


# -- memory


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_a_stage_keeps_what_the_docs_say(stage: int) -> None:
    """Of whole parameters and of whole gradients, after a backward that is not the last."""
    model = SHARDGRAD.shard_tower(tower(), zero_stage=stage)
    groups = groups_of(model)
    whole = sum(group.layout.unsharded_numel for group in groups) * 4
    model.set_is_last_backward(False)
    token_loss(model, SHARDGRAD.tokens(0)).backward()
    params = sum(group.unsharded_memory.flat.untyped_storage().nbytes() for group in groups)
    gradients = sum(tensor.nbytes for group in groups for tensor in group.grads.buffers().values())
    model.set_is_last_backward(True)
    token_loss(model, SHARDGRAD.tokens(1)).backward()
    assert params == (whole if stage < 3 else 0)
    assert (gradients >= whole) if stage == 1 else (gradients == 0)


# -- both axes


@on_ranks(4)
def test_after_a_reshard_both_axes_read_the_shards_again() -> None:
    """Also if they were written past the versions that torch counts."""
    model = shardgrad.fully_shard(nn.Linear(8, 8), mesh=hsdp_mesh(2, 2), zero_stage="hfsdp")
    inputs = torch.ones(1, 8)
    with torch.no_grad():
        assert model(inputs).any()
        for param in model.parameters():
            param.data.zero_()
        model.reshard()
        assert not model(inputs).any()
