"""What one rank keeps, and what it makes in a step, does not grow with the number of ranks."""

import gc

import pytest
import torch
from torch import nn

from shardgrad import fully_shard
from shardgrad.programs.plan.world import fake_world


def tensors_after_steps(ranks: int) -> int:
    """Returns how many tensors live after two training steps of two units."""
    with fake_world((ranks,)) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for unit in (model[0], model):
            fully_shard(unit, mesh=mesh)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            model.zero_grad()
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.filterwarnings("ignore::shardgrad.checks.padding.PaddingWarning")
def test_a_rank_among_16384_keeps_as_many_tensors_as_one_among_8() -> None:
    assert tensors_after_steps(16_384) == tensors_after_steps(8)
