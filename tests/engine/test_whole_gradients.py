"""How many groups' whole gradients there are at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.multiprocessing.reductions import StorageWeakRef

from shardgrad import fully_shard
from shardgrad.engine.grad_collector import GradCollector
from tests.support.ranks import Ranks

LAYERS, WIDTH = 8, 1024  # a rank's piece of a weight is large enough to be sent from where it is


def most_alive(param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> int:
    """Returns the largest number of layers whose whole gradients were there when one arrived."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    arrived: list[StorageWeakRef] = []
    counts: list[int] = []
    take = GradCollector.take

    def counting(
        self: GradCollector, unsharded: Any, grad: torch.Tensor, *args: Any, **kwargs: Any
    ) -> bool:
        arrived.append(StorageWeakRef(grad.untyped_storage()))
        counts.append(sum(not each.expired() for each in arrived))
        return take(self, unsharded, grad, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradCollector, "take", counting)
        for _ in range(3):
            model(torch.randn(2, WIDTH)).sum().backward()
    assert len(counts) == 3 * LAYERS
    return max(counts)


def few_are_alive() -> None:
    assert most_alive(None, None) <= 2
    assert most_alive(torch.bfloat16, torch.float32) <= 2


def test_whole_gradients_go_when_they_are_sent(two_ranks: Ranks) -> None:
    two_ranks.run(few_are_alive)


def test_a_copy_is_all_that_is_kept_of_a_packed_gradient(four_ranks: Ranks) -> None:
    four_ranks.run(few_are_alive)
