"""What a program writes to unsharded parameters is in the shards afterwards, as in plain torch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import shardgrad
from shardgrad.errors import LostWorkWarning
from tests.support.ranks import on_ranks

SIZE = 5


class Normalized(nn.Linear):
    """Normalizes its weight in place, as nGPT does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class Recomputed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def pair(
    kind: type[nn.Sequential] = nn.Sequential, last: type[nn.Linear] = nn.Linear, **options: Any
) -> tuple[Any, Any]:
    """Returns a plain model and one that is sharded."""
    torch.manual_seed(0)
    plain = kind(Normalized(SIZE, 7), nn.Tanh(), last(7, SIZE)).double()
    model = copy.deepcopy(plain)
    for layer in (model[0], model[2]):
        shardgrad.fully_shard(layer, **options)
    return plain, shardgrad.fully_shard(model, **options)


def same(plain: nn.Module, model: nn.Module) -> None:
    for expected, got in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected.detach(), rtol=0, atol=1e-14)  # type: ignore[operator]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, SIZE, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"zero_stage": 2},
        {"zero_stage": 1},
        {"reshard_after_forward": 2},
    ],
    ids=["", "kept", "stage 2", "stage 1", "to fewer"],
)
@on_ranks(4)
def test_a_recomputed_forward_that_normalizes_its_weight_trains_as_in_plain_torch(
    options: dict[str, Any],
) -> None:
    # Backward reads the weight of the last layer, and not of the first.
    plain, model = pair(Recomputed, Normalized, **options)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = shardgrad.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LostWorkWarning)
        for _ in range(3):
            train(plain, theirs)
            train(model, optimizer)
            same(plain, model)


@on_ranks(2)
def test_what_a_unit_writes_that_ran_before_its_root_is_kept() -> None:
    plain, model = pair()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, SIZE, dtype=torch.float64)
    for each in (plain, model):
        with torch.no_grad():
            for param in each[0].parameters():  # so that the forward changes it
                param.mul_(3)
        each[0](x)
    for _ in range(3):
        train(plain, theirs)
        train(model, optimizer)
        same(plain, model)


@pytest.mark.parametrize("trains", [False, True])
@on_ranks(2)
def test_a_layer_that_forward_writes_before_it_runs_is_gathered_after_the_write(
    trains: bool,
) -> None:
    def average(layer: nn.Module) -> None:
        for param in layer.parameters():  # torch does not count a write to `data`
            (param.detach() if trains else param.data).mul_(0.9)

    plain, model = pair(zero_stage=2 if trains else 3)
    for each in (plain, model):
        each[2].requires_grad_(trains)
        each[1].register_forward_hook(lambda *_, layer=each[2]: average(layer))
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            train(each, optimizer)
    same(plain, model)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["older", "rounded"])
@on_ranks(2)
def test_a_write_that_the_shard_cannot_take_is_told(dtype: torch.dtype | None) -> None:
    """The shard is newer, or more exact."""
    _, model = pair(mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    sharded = model[2].weight
    model[2].unshard()
    with torch.no_grad():
        if dtype is None:
            sharded.mul_(3)
        model[2].weight.zero_()
    expected = sharded.full_tensor().clone()
    with pytest.warns(LostWorkWarning, match=r"weight was written while unsharded"):
        model[2].reshard()
    assert torch.equal(model[2].weight.full_tensor(), expected)


@on_ranks(2)
def test_a_weights_version_moves_when_an_optimizer_step_has_changed_it() -> None:
    _, model = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    model[2].register_forward_pre_hook(lambda layer, _: seen.append(layer.weight._version))
    for _ in range(2):
        train(model, optimizer)
        with torch.no_grad():
            for _ in range(2):
                model(torch.ones(3, SIZE, dtype=torch.float64))
    training, evaluation, again, next_training, *_ = seen
    assert training < evaluation == again == next_training


@on_ranks(2)
def test_a_backward_after_a_step_that_changed_its_weights_is_refused_as_in_plain_torch() -> None:
    plain = nn.Sequential(nn.Linear(SIZE, 7), nn.Tanh(), nn.Linear(7, SIZE)).double()
    for model in (copy.deepcopy(plain), shardgrad.fully_shard(plain)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(3, SIZE, dtype=torch.float64)
        one, other, refused = (model(x).square().mean() for _ in range(3))
        one.backward()
        model[2].zero_grad()
        optimizer.step()
        other.backward()  # reads only the weight that this step has not changed
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            refused.backward()
