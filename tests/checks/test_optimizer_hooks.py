"""An optimizer's step is seen by the units whose parameters it has, whenever it got them."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardgrad.errors import ForeignParameterError, OptimizerParameterError
from tests.support.parity import SHARDGRAD, stack
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_an_optimizer_is_looked_at_again_after_its_parameters_were_sharded() -> None:
    """An optimizer that had nothing to do with any model, until its parameters were sharded."""
    SHARDGRAD.fully_shard(stack(5, 3))  # so that hooks are there from the beginning
    model = stack(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    SHARDGRAD.fully_shard(model)
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(OptimizerParameterError, match="before fully_shard"):
        optimizer.step()
    for param in optimizer.param_groups[0]["params"]:
        param.requires_grad_(False)
    optimizer.step()  # it has nothing to train


@on_ranks(2)
def test_an_optimizer_of_assigned_parameters_may_step_before_the_next_forward() -> None:
    """Its writes, which torch does not count, are seen although the parameters had no owner yet,
    and although gradients are gone when the step ends.
    """
    plain, model = stack(5, 3), SHARDGRAD.fully_shard(stack(5, 3))
    model.set_reshard_after_backward(False)
    model(torch.ones(1, 5)).sum().backward()
    model.zero_grad()
    layer = model[0]
    for name, param in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(param.detach().clone()))
    losses = []
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, foreach=True)
        optimizer.step()
        optimizer.register_step_post_hook(lambda it, *_: it.zero_grad())
        for _ in range(3):
            loss = each(torch.ones(1, 5)).square().sum()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1])


class Wrapper(torch.optim.SGD):
    """Has its state behind a property, as wrappers of optimizers do."""

    @property
    def state(self) -> object:
        return self.kept

    @state.setter
    def state(self, value: object) -> None:
        self.kept = value


@pytest.mark.parametrize("kind", [torch.optim.SGD, Wrapper])
@on_ranks(2)
def test_a_step_with_state_that_another_rank_saved_is_refused(kind: type[torch.optim.SGD]) -> None:
    model = SHARDGRAD.fully_shard(stack(5, 4))
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    file, files = io.BytesIO(), [b"", b""]
    torch.save(optimizer.state[model[0].weight], file)
    dist.all_gather_object(files, file.getvalue())
    other = kind(model.parameters(), lr=0.1, momentum=0.9)
    of_other_rank = files[1 - dist.get_rank()]
    other.state[model[0].weight] = torch.load(io.BytesIO(of_other_rank), weights_only=False)
    with pytest.raises(ForeignParameterError, match=r"loaded the shard of momentum_buffer of 0\."):
        other.step()
