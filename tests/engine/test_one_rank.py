"""One rank sends nothing, so nothing is copied for a message: the bits of FSDP2, with fewer bytes
moved. Kept programs of one rank compare other dtypes.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.parity import (
    Engine,
    Tensors,
    as_under_fsdp2,
    stack,
    train_squares,
    watching_collectives,
)

SIZES = (24, 40, 24)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.usefixtures("one_rank")
@as_under_fsdp2
def test_one_rank_trains_to_the_bits_of_fsdp2(
    engine: Engine, param_dtype: torch.dtype | None
) -> Tensors:
    """With hooks on what is reduced, which no message is needed for either."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = engine.shard_stack(stack(*SIZES), mp_policy=policy)
    for layer in (model, model[0]):
        layer.set_all_reduce_hook(lambda chunk: chunk.mul_(3.0))
    sent: list[str] = []
    with watching_collectives(lambda name, _: sent.append(name)):
        found = train_squares(engine, model, SIZES[0])
    assert not sent
    return found
