"""How often ranks talk: no more than under FSDP2, whatever is switched off between
micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.profiler import ProfilerActivity, profile

from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_same_bits,
    hsdp_mesh,
    make_optimizer,
    token_loss,
    tower,
    watching_collectives,
)
from tests.support.ranks import Ranks, on_ranks


def spans_of(engine: Engine, change: Callable[[Any], None], **options: Any) -> Counter[str]:
    """Returns how often each kind of work shows up in a profile of the third step."""
    model = engine.shard_tower(tower(), **options)
    change(model)
    for step in range(2):
        token_loss(model, engine.tokens(step)).backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        token_loss(model, engine.tokens(2)).backward()
    return counted(profiled)


def counted(profiled: profile) -> Counter[str]:
    names = [
        event.name.split(" (")[0] for event in profiled.events() if event.name.startswith("FSDP::")
    ]
    return Counter(
        name for name in names if name in ("FSDP::all_gather", "FSDP::post_backward_reduce")
    )


def nothing(model: Any) -> None:
    """Leaves the model as it is."""


def embedding_stays_away(model: Any) -> None:
    model.embedding.set_unshard_in_backward(False)


@pytest.mark.parametrize(
    ("reshard", "change", "gathers"),
    [
        (None, nothing, 5 + 3),
        (True, nothing, 5 + 5),
        (False, nothing, 5),
        (True, embedding_stays_away, 5 + 4),
    ],
)
@on_ranks(2)
def test_a_step_gathers_and_reduces_no_more_often_than_fsdp2(
    change: Callable[[Any], None], reshard: Any, gathers: int
) -> None:
    """Five units. By default the root stays whole, and here the unit that ran last does as well."""
    ours = spans_of(SHARDGRAD, change, reshard_after_forward=reshard)
    assert ours == {"FSDP::all_gather": gathers, "FSDP::post_backward_reduce": 5}
    theirs = spans_of(FSDP2, change, reshard_after_forward=reshard)
    assert ours["FSDP::post_backward_reduce"] == theirs["FSDP::post_backward_reduce"]
    assert ours["FSDP::all_gather"] <= theirs["FSDP::all_gather"]


# -- between micro-batches


def no_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def no_sync_of_the_root(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last, recurse=False)


def no_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def no_all_reduce_of_the_root(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last, recurse=False)


def kept_after_backward(model: Any, last: bool) -> None:
    model.set_reshard_after_backward(last)


def root_kept_after_backward(model: Any, last: bool) -> None:
    model.set_reshard_after_backward(last, recurse=False)


Switch = Callable[[Any, bool], None]


def accumulate(
    engine: Engine, switch: Switch, replicas: int, on_host: bool
) -> tuple[Tensors, Counter[str]]:
    """Trains two steps of two micro-batches; counts what the second one communicates."""
    options: dict[str, Any] = {"reshard_after_forward": True}
    if replicas > 1:
        options["mesh"] = hsdp_mesh(replicas, dist.get_world_size() // replicas)
    if on_host:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = engine.shard_tower(tower(), **options)
    optim = make_optimizer("adamw", model)
    counts: Counter[str] = Counter()

    def count(name: str, chunk: torch.Tensor) -> None:
        counts["all_reduce"] += name == "all_reduce"

    def take(step: int) -> None:
        for micro in range(2):
            switch(model, micro == 1)
            (token_loss(model, engine.tokens(2 * step + micro)) / 2).backward()
            if micro == 0 and switch in (no_sync, no_all_reduce):
                assert [
                    name for name, param in model.named_parameters() if param.grad is not None
                ] == []

    take(0)
    optim.step()
    optim.zero_grad()
    with watching_collectives(count), profile(activities=[ProfilerActivity.CPU]) as profiled:
        take(1)
    return engine.snapshot(model), counts + counted(profiled)


def accumulates_as_often_as_fsdp2(
    switch: Switch, replicas: int, on_host: bool, gathers: int, reductions: int, all_reduces: int
) -> None:
    ours, counts = accumulate(SHARDGRAD, switch, replicas, on_host)
    theirs, their_counts = accumulate(FSDP2, switch, replicas, on_host)
    assert_same_bits(ours, theirs)
    assert counts["FSDP::all_gather"] == gathers <= their_counts["FSDP::all_gather"]
    assert (
        counts["FSDP::post_backward_reduce"]
        == reductions
        == their_counts["FSDP::post_backward_reduce"]
    )
    assert counts["all_reduce"] == all_reduces == their_counts["all_reduce"]


# Five units: forward and backward gather each, in both micro-batches, and each backward reduces
# all.
COUNTS = [
    (no_sync, 20, 5, 5),
    (no_sync_of_the_root, 20, 9, 9),
    (kept_after_backward, 15, 10, 10),
    (root_kept_after_backward, 19, 10, 10),
]


@pytest.mark.parametrize("on_host", [False, True], ids=["", "on the host"])
@pytest.mark.parametrize(("switch", "gathers", "reductions", "all_reduces"), COUNTS)
def test_micro_batches_communicate_as_often_as_under_fsdp2(
    two_ranks: Ranks, switch: Switch, gathers: int, reductions: int, all_reduces: int, on_host: bool
) -> None:
    two_ranks.run(accumulates_as_often_as_fsdp2, switch, 1, on_host, gathers, reductions, 0)


@pytest.mark.parametrize(
    ("switch", "gathers", "reductions", "all_reduces"),
    [*COUNTS, (no_all_reduce, 20, 10, 5), (no_all_reduce_of_the_root, 20, 10, 9)],
)
def test_micro_batches_on_replicas_communicate_as_often_as_under_fsdp2(
    four_ranks: Ranks, switch: Switch, gathers: int, reductions: int, all_reduces: int
) -> None:
    four_ranks.run(
        accumulates_as_often_as_fsdp2, switch, 2, False, gathers, reductions, all_reduces
    )
