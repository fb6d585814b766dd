"""How often ranks talk: no more than under FSDP2, whatever is switched off between
micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint
from torch.profiler import ProfilerActivity, profile

import shardgrad
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    WIDTH,
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

GATHERS, REDUCTIONS = "FSDP::all_gather", "FSDP::post_backward_reduce"
Switch = Callable[[Any, bool], None]


def embedding_stays_away(model: Any, last: bool) -> None:
    model.embedding.set_unshard_in_backward(False)


def no_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def no_sync_of_the_root(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last, recurse=False)


def no_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def no_all_reduce_until_all_is_synced(model: Any, last: bool) -> None:
    if last:
        model.set_requires_gradient_sync(True)
    else:
        model.set_requires_all_reduce(False)


def no_all_reduce_of_the_root(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last, recurse=False)


def kept_after_backward(model: Any, last: bool) -> None:
    model.set_reshard_after_backward(last)


def root_kept_after_backward(model: Any, last: bool) -> None:
    model.set_reshard_after_backward(last, recurse=False)


def accumulate(
    engine: Engine, switch: Switch, replicas: int, reshard: bool | None
) -> tuple[Tensors, Counter[str]]:
    """Trains two steps of two micro-batches; counts what the second one communicates."""
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if replicas > 1:
        options["mesh"] = hsdp_mesh(replicas, dist.get_world_size() // replicas)
    model = engine.shard_tower(tower(), **options)
    optim = make_optimizer("adamw", model)
    counts: Counter[str] = Counter()

    def count(name: str, chunk: torch.Tensor) -> None:
        counts["all_reduce"] += name == "all_reduce"

    def take(step: int) -> None:
        for micro in range(2):
            switch(model, micro == 1)
            (token_loss(model, engine.tokens(2 * step + micro)) / 2).backward()

    take(0)
    optim.step()
    optim.zero_grad()
    with watching_collectives(count), profile(activities=[ProfilerActivity.CPU]) as profiled:
        take(1)
    counts.update(event.name.split(" (")[0] for event in profiled.events())
    return engine.snapshot(model), counts


def as_often_as_fsdp2(switch: Switch, replicas: int, reshard: bool | None, gathers: int) -> None:
    ours, counts = accumulate(SHARDGRAD, switch, replicas, reshard)
    theirs, their_counts = accumulate(FSDP2, switch, replicas, reshard)
    assert_same_bits(ours, theirs)
    assert counts[GATHERS] == gathers <= their_counts[GATHERS]
    assert counts[REDUCTIONS] == their_counts[REDUCTIONS] > 0
    assert counts["all_reduce"] == their_counts["all_reduce"]


# Forward and backward gather each of five units, in both micro-batches.
SWITCHES = [
    (no_sync, 20),
    (no_sync_of_the_root, 20),
    (kept_after_backward, 15),
    (root_kept_after_backward, 19),
]
OF_REPLICAS = [
    *SWITCHES,
    (no_all_reduce, 20),
    (no_all_reduce_until_all_is_synced, 20),
    (no_all_reduce_of_the_root, 20),
]


@pytest.mark.parametrize(
    ("ranks", "switch", "reshard", "gathers"),
    [
        # By default the root stays whole, and here the unit that ran last does as well.
        (2, kept_after_backward, False, 5),
        (2, kept_after_backward, None, 5 + 2 * 3),
        (2, no_sync, None, 2 * (5 + 3)),
        (2, no_sync, False, 2 * 5),
        (2, embedding_stays_away, True, 2 * (5 + 4)),
        *((2, switch, True, gathers) for switch, gathers in SWITCHES),
        *((4, switch, True, gathers) for switch, gathers in OF_REPLICAS),
    ],
)
def test_micro_batches_communicate_no_more_often_than_under_fsdp2(
    worlds: dict[int, Ranks], ranks: int, switch: Switch, reshard: bool | None, gathers: int
) -> None:
    """Four ranks are two replicas."""
    worlds[ranks].renewed().run(as_often_as_fsdp2, switch, ranks // 2, reshard, gathers)


@pytest.mark.parametrize(("to_inputs", "calls"), [(False, 1), (True, 1), (False, 2)])
@on_ranks(2)
def test_a_unit_that_is_called_three_times_is_reduced_once(*, to_inputs: bool, calls: int) -> None:
    """And gathered once, where FSDP2 gathers it for each call; before backward ends."""
    layer = nn.Linear(WIDTH, WIDTH)
    model = SHARDGRAD.shard(layer, nn.Sequential(layer, layer, layer, nn.Linear(WIDTH, 1)))
    x = torch.ones(2, WIDTH, requires_grad=to_inputs)
    loss = sum(model(x).sum() for _ in range(calls))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        loss.backward()
    names = [event.name.split(" (")[0] for event in profiled.events()]
    expected = [GATHERS, REDUCTIONS, "FSDP::root_post_backward_callback", REDUCTIONS]
    # After two forwards the unit that ran last is still unsharded.
    assert [name for name in names if name in expected] == expected[calls - 1 :]


class Learner(nn.Sequential):
    def learn(self, x: torch.Tensor) -> None:
        self(x).sum().backward()


@on_ranks(2)
def test_the_next_all_gather_begins_before_a_unit_waits_for_its_own() -> None:
    """Or that of a unit which the program names; whatever has failed, run alone or been evaluated
    before; once, also if a method calls forward.
    """
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(5)]
    checkpoint(layers[2])  # nothing is gathered for what runs again
    model = SHARDGRAD.shard(*layers, Learner(*layers))
    shardgrad.register_fsdp_forward_method(model, "learn")
    layers[0].set_modules_to_forward_prefetch([layers[2]])
    layers[2].set_modules_to_forward_prefetch([layers[3]])
    layers[4].set_modules_to_backward_prefetch([layers[2]])
    with suppress(RuntimeError):
        model(torch.ones(1))
    x = torch.ones(2, WIDTH)
    for called in (layers[3], model, model, layers[3]):
        called(x).sum().backward()
    model(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model.learn(x)
    names = (event.name.partition("::all_gather")[2] for event in profiled.events())
    assert "".join(names).replace("_copy_out", "->") == (
        " (0) (2)-> (0) (1)-> (1) (3)-> (2) (4)-> (3)-> (4)"
        " (2) (3)-> (3) (1)-> (2) (0)-> (1)-> (0)"  # (4) has stayed whole
    )
