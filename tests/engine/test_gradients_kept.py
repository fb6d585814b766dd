"""Gradients of a completed backward are kept, whatever a program does next; frozen parameters get
none.

Each program runs under plain torch, with gradients averaged over the ranks by hand, and under
shardgrad. What every parameter has for a gradient, or that it has none, is compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardgrad
from tests.support.parity import Route, mlp
from tests.support.ranks import on_ranks

SIZE = 6
Shard = Callable[[nn.Module], nn.Module]
Program = Callable[[Shard], nn.Module]


def batch(number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, SIZE, dtype=torch.float64, generator=generator)


def shard_each(shard: Shard, model: nn.Sequential) -> nn.Module:
    for layer in list(model)[:-1]:
        shard(layer)
    return shard(model)


def set_sync(model: Any, sync: bool) -> None:
    """Does nothing under plain torch."""
    if isinstance(model, shardgrad.FSDPModule):
        model.set_requires_gradient_sync(sync)


# -- comparing


def averaged(model: nn.Module) -> dict[str, Tensor | None]:
    """Returns the mean over the ranks; a rank without a gradient counts as zeros, if another has
    one.
    """
    gradients: dict[str, Tensor | None] = {}
    for name, param in model.named_parameters():
        total = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        having = torch.tensor(float(param.grad is not None))
        dist.all_reduce(total)
        dist.all_reduce(having)
        gradients[name] = total.detach() / dist.get_world_size() if having else None
    return gradients


def gathered(model: nn.Module) -> dict[str, Tensor | None]:
    for module in model.modules():
        if isinstance(module, shardgrad.FSDPModule):
            module.reshard()
    gradients: dict[str, Tensor | None] = {}
    for name, param in model.named_parameters():
        gradients[name] = (
            param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        )
    return gradients


# -- a forward that does not come to its end


class Stop(Exception):
    """Raised to leave a forward early."""


def extracts_features_by_an_exception(shard: Shard) -> nn.Module:
    model = shard_each(shard, mlp())
    features: list[Tensor] = []

    def stop(module: nn.Module, args: Any, output: Tensor) -> None:
        features.append(output)
        raise Stop

    model[1].register_forward_hook(stop)
    for number in range(2):
        with pytest.raises(Stop):
            model(batch(number))
        features.pop().square().sum().backward()
    return model


class GatedOnOneRank(nn.Module):
    """Recomputes what is inside; of its own parameters, one rank may not use all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.last, self.gate = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.ranks = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=True))
        x = self.last(x)
        return x + self.gate(x) if dist.get_rank() in self.ranks else x


def recomputes_inside_a_unit_of_which_one_rank_uses_all(shard: Shard) -> nn.Module:
    model = mlp()
    gated = GatedOnOneRank().double()
    model.insert(2, gated)
    for layer in gated.inner:
        shard(layer)
    shard(gated)
    shard(model)
    model(batch()).square().mean().backward()
    gated.ranks = [1]
    model(batch(1)).square().mean().backward()
    return model


# -- freezing and summing


def penalizes_a_weight_without_a_forward(shard: Shard) -> nn.Module:
    """The program has unsharded the layer itself, and reads its weight; no forward comes to it."""
    model = shard_each(shard, mlp())
    layer: Any = model[1]
    model(batch()).square().mean().backward()
    if isinstance(layer, shardgrad.FSDPModule):
        layer.unshard()
    layer.weight.square().sum().backward()
    return model


def drops_sums_that_one_rank_has(shard: Shard) -> nn.Module:
    """The other rank, too, has a reduction due in the next backward, which does not come to the
    layer.
    """
    model = Route(mlp())
    for layer in model.layers:
        shard(layer)
    shard(model)
    if isinstance(model, shardgrad.FSDPModule):
        model.set_reshard_after_forward(False)  # a rank without a backward of it gathers nothing
    model.layers[1].register_forward_hook(lambda _, __, y: y.detach() if dist.get_rank() else y)
    set_sync(model, False)
    model(batch(), 0, 1, 2, 3).square().mean().backward()
    model.zero_grad()
    set_sync(model, True)
    model(batch(1), 0, 2, 3).square().mean().backward()
    return model


PROGRAMS = [
    extracts_features_by_an_exception,
    recomputes_inside_a_unit_of_which_one_rank_uses_all,
    penalizes_a_weight_without_a_forward,
    drops_sums_that_one_rank_has,
]


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@on_ranks(2)
def test_a_program_has_the_gradients_of_plain_torch(
    program: Program, reshard_after_forward: bool | None
) -> None:
    options = {"reshard_after_forward": reshard_after_forward}
    expected = averaged(program(lambda module: module))
    got = gathered(program(lambda module: shardgrad.fully_shard(module, **options)))
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        ours = got[name]
        assert (ours is None) == (gradient is None), f"{name}: {ours} instead of {gradient}"
        if gradient is not None and ours is not None:
            assert torch.allclose(ours, gradient, rtol=1e-12, atol=1e-14), name


# -- a backward that does not come to its end


class WithABiasOnOneRank(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, None if dist.get_rank() else self.bias)


@pytest.mark.parametrize(
    ("earlier_syncs", "failing_syncs", "buffers"),
    [(True, True, 2), (True, True, 1), (False, False, 2), (False, True, 2)],
)
@on_ranks(2)
def test_a_failed_backward_drops_with_a_warning_what_it_has_begun_to_write(
    earlier_syncs: bool, failing_syncs: bool, buffers: int
) -> None:
    """Without sync each gradient is added to a sum as soon as it is there; over gloo reductions end
    later, or when the next one needs their buffer.

    A sum that earlier backwards have left is sent along.
    """

    def made() -> nn.Sequential:
        layers = mlp()
        layers[2].__class__ = WithABiasOnOneRank
        return layers

    model: Any = shard_each(shardgrad.fully_shard, made())
    model.set_reduce_scatter_max_input_buffers(1)
    model[2].set_reduce_scatter_max_input_buffers(buffers)  # the most that a unit asks for
    set_sync(model, earlier_syncs)
    model(batch()).square().sum().backward()
    set_sync(model, True)
    with torch.no_grad():
        model(batch())
    set_sync(model, failing_syncs)

    def trap(grad: Tensor) -> Tensor:
        raise Stop

    hidden: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda module, args, output: hidden.append(output))
    loss = model(batch(1)).square().sum()
    hidden.pop().register_hook(trap)
    handle.remove()
    with pytest.raises(Stop):
        loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            model(batch())
    (warning,) = [str(each.message) for each in caught if "a backward failed" in str(each.message)]
    lost = "1, 2" if not earlier_syncs else "2" if buffers == 1 else ""
    assert (f"In units {lost}, they had been added" in warning) == bool(lost)
    set_sync(model, True)
    model(batch(2)).square().sum().backward()
    expected = {}
    for numbers in ((0, 2), (2,)):
        plain = made()
        for number in numbers:
            plain(batch(number)).square().sum().backward()
        expected[numbers] = averaged(plain)
    for name, gradient in gathered(model).items():
        # The root waits for its turn, behind 0.
        kept = name[0] not in lost
        torch.testing.assert_close(
            gradient, expected[(0, 2) if kept else (2,)][name], rtol=1e-12, atol=1e-14
        )
