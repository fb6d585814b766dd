"""One rank sends nothing, so nothing is copied for a message: the bits of FSDP2, with fewer bytes
moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from tests.support.parity import (
    Engine,
    Tensors,
    same_bits_as_fsdp2,
    stack,
    train_squares,
    watching_collectives,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
SIZES = (24, 40, 24)


pytestmark = pytest.mark.usefixtures("one_rank")


def train(
    engine: Engine,
    *,
    change: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> Tensors:
    model = engine.shard_stack(stack(*SIZES), **options)
    change(model)
    sent: list[str] = []
    with watching_collectives(lambda name, _: sent.append(name)):
        found = train_squares(engine, model, SIZES[0])
    assert not sent
    return found


def hooked(model: Any) -> None:
    for layer in (model, model[0]):
        layer.set_all_reduce_hook(lambda chunk: chunk.mul_(3.0))


def columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MIXED},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)},  # which rounds gradients
        {"change": hooked},
        {"shard_placement_fn": columns, "mp_policy": MixedPrecisionPolicy(param_dtype=BF16)},
    ],
    ids=str,
)
def test_one_rank_trains_to_the_bits_of_fsdp2(options: dict[str, Any]) -> None:
    same_bits_as_fsdp2(train, **options)
