"""What an optimizer step would lose is refused: gradients, hooks, another rank's state."""

from __future__ import annotations

import io
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardgrad.errors import ForeignParameterError, GradientError
from tests.support.parity import SHARDGRAD, hsdp_mesh, stack
from tests.support.ranks import on_ranks


def backward(model: nn.Module) -> None:
    model(torch.randn(3, 4)).square().mean().backward()


@on_ranks(2)
def test_a_step_before_the_reduction_is_refused() -> None:
    model = SHARDGRAD.shard_stack(stack(4, 6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.full_tensor().clone() for param in model.parameters()]
    model.set_requires_gradient_sync(False)
    backward(model)
    with pytest.raises(GradientError, match=r"unreduced gradients of 0\.weight, 0\.bias"):
        optimizer.step()
    model.zero_grad()
    optimizer.step()
    for param, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), then)
    model[0].set_requires_gradient_sync(True)
    backward(model)
    optimizer.step()  # the program has chosen a unit that waits


@on_ranks(2)
def test_a_state_that_another_rank_has_saved_is_refused_by_the_next_step() -> None:
    model = SHARDGRAD.shard_stack(stack(4, 6, 2), mesh=hsdp_mesh(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward(model)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    box = [file.getvalue()]
    dist.broadcast_object_list(box, 0)
    optimizer.load_state_dict(torch.load(io.BytesIO(box[0]), weights_only=False))
    refused = pytest.raises(ForeignParameterError, match=r"momentum_buffer of 0.* rank 0 saved")
    with refused if dist.get_rank() else nullcontext():
        optimizer.step()
