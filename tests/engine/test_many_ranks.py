"""What one rank keeps, and what it makes in a step, does not grow with the number of ranks."""

import gc

import pytest
import torch
from torch import nn

from shardgrad import fully_shard
from shardgrad.engine.unit import units_under
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


def test_groups_that_are_alike_pack_the_same_tail() -> None:
    with fake_world((64,)) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        model(torch.ones(1, 4)).sum().backward()
        memory = [
            {storage._cdata for owner, storage in grads.memory() if owner == "tails"}
            for unit in units_under(model)
            for grads in unit.grad_groups
        ]
    assert memory[0] == memory[1] != memory[2]
