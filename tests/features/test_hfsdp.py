"""Sharding over both axes of a mesh: the bits of HSDP. `tests/sharding/test_zero_stage.py` counts
what is sent.
"""

from __future__ import annotations

from typing import Any

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


def trained(stage: Any) -> Tensors:
    """Freezes a parameter, and thaws it."""
    options = {"mesh": hsdp_mesh(2, 2), "reshard_after_forward": True}
    model = SHARDGRAD.shard_tower(tower(), zero_stage=stage, **options)
    optimizer = make_optimizer("adamw", model)
    for step in range(3):
        next(model.layers[0].parameters()).requires_grad_(step != 1)
        for micro in range(2):
            token_loss(model, SHARDGRAD.tokens(micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model, optimizer)


@on_ranks(4)
def test_both_axes_train_to_the_bits_of_replicas() -> None:
    assert_same_bits(trained("hfsdp"), trained(3))
