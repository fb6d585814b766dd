"""What an optimizer step would lose is refused: gradients, hooks, another rank's state."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgrad
from shardgrad.errors import ForeignParameterError, GradientError
from tests.support.ranks import Ranks, on_ranks


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    shardgrad.fully_shard(model[0])
    return shardgrad.fully_shard(model)


def backward(model: nn.Module) -> None:
    model(torch.randn(3, 4)).square().mean().backward()


@on_ranks(2)
def test_a_program_that_loses_nothing_is_not_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.unshard()
    model.reshard()
    for index in range(4):
        model.set_requires_gradient_sync(index % 2 == 1)
        backward(model)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_a_step_before_the_reduction_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.full_tensor().clone() for param in model.parameters()]
    model.set_requires_gradient_sync(False)
    backward(model)
    with pytest.raises(GradientError, match=r"sums on each rank, of 0\.weight, 0\.bias"):
        optimizer.step()
    model.zero_grad()
    optimizer.step()
    for param, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), then)


@on_ranks(2)
def test_a_hook_that_never_runs_is_refused() -> None:
    model = nn.Linear(4, 6)
    model.weight.register_hook(lambda grad: 0 * grad)
    with pytest.raises(GradientError, match="a hook on weight never runs"):
        shardgrad.fully_shard(model)
    assert isinstance(model.weight, nn.Parameter)
    model = net()
    model[0].bias.register_hook(lambda grad: 0 * grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    with pytest.raises(GradientError, match=r"a hook on 0\.bias never runs"):
        optimizer.step()


def saved_by_rank_0(folder: str, flat: bool) -> None:
    model = net()
    kind = shardgrad.optim.AdamW if flat else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    own = io.BytesIO()
    torch.save(saved, own)
    if dist.get_rank() == 0:
        torch.save(saved, f"{folder}/saved.pt")
    dist.barrier()
    own.seek(0)
    ours = torch.load(own, weights_only=False)
    model.load_state_dict(ours["model"])
    optimizer.load_state_dict(ours["optimizer"])
    theirs = torch.load(f"{folder}/saved.pt", weights_only=False)
    if dist.get_rank() == 0:
        return
    with pytest.raises(
        ForeignParameterError, match=r"rank 1 loads the shard of 0\.weight that rank 0 has saved"
    ):
        model.load_state_dict(theirs["model"])
    with pytest.raises(ForeignParameterError, match="that rank 0 has saved"):  # noqa: PT012
        optimizer.load_state_dict(theirs["optimizer"])
        optimizer.step()


@pytest.mark.parametrize("flat", [False, True], ids=["torch.optim", "shardgrad.optim"])
def test_shards_that_another_rank_saved_are_refused(
    two_ranks: Ranks, tmp_path: Path, flat: bool
) -> None:
    two_ranks.run(saved_by_rank_0, str(tmp_path), flat)
