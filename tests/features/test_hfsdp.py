"""Sharding over both axes of a mesh: the bits of HSDP, and an outer axis that is used once a
step.
"""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.support.parity import (
    SHARDGRAD,
    Tensors,
    assert_same_bits,
    hsdp_mesh,
    make_optimizer,
    token_loss,
    tower,
)
from tests.support.ranks import on_ranks
from tests.support.two_engines import whole


def trained(stage: Any) -> tuple[Tensors, list[int]]:
    """Freezes a parameter, and thaws it; counts the all-gathers of each backward."""
    options = {"mesh": hsdp_mesh(2, 2), "reshard_after_forward": True}
    model = SHARDGRAD.shard_tower(tower(), zero_stage=stage, **options)
    optimizer, gathers = make_optimizer("adamw", model), []
    for step in range(3):
        next(model.layers[0].parameters()).requires_grad_(step != 1)
        for micro in range(2):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                token_loss(model, SHARDGRAD.tokens(micro)).backward()
            names = [event.name for event in profiled.events()]
            gathers.append(sum(name.startswith("FSDP::all_gather ") for name in names))
        optimizer.step()
        optimizer.zero_grad()
    return whole(model, optimizer), gathers


@on_ranks(4)
def test_both_axes_train_to_the_bits_of_replicas_and_the_outer_one_gathers_once_a_step() -> None:
    ours, gathers = trained("hfsdp")
    theirs, of_replicas = trained(3)
    assert_same_bits(ours, theirs)
    # Five units, in forward and backward; and once over the outer axis.
    assert (gathers, of_replicas) == ([5 + 10, 10] * 3, [10] * 6)
