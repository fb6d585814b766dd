"""What the contract tests of integrations share: a model, partners, and loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

import shardgrad
from shardgrad.integrations import apex, transformer_engine
from tests.support.parity import Tensors
from tests.support.stand_ins import apex_fused_adam, te_fused_adam

# Adam's step hardly depends on the scale of a gradient; with a large epsilon it does.
HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-2, "weight_decay": 0.1}
SHAPES = ((5, 3), (4,), (2, 2), (1,))  # on two ranks the last has no row on rank 1


class Plane(nn.Module):
    """A loss that is linear in the parameters: gradients do not depend on them, so errors do not
    grow.
    """

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=generator).to(dtype) for shape in shapes or SHAPES
        )

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        slopes = [
            torch.randn(tuple(w.shape), generator=generator).to(w.dtype) for w in self.weights
        ]
        return sum((w * slope).sum() for w, slope in zip(self.weights, slopes, strict=True))


def plane(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> Plane:
    """Returns a sharded plane."""
    return shardgrad.fully_shard(Plane(*shapes, dtype=dtype), **options)


@contextmanager
def partner(name: str) -> Iterator[Callable[..., Any]]:
    """Yields our FusedAdam for "te 2.17.1" or "apex", with a stand-in installed that runs on the
    CPU.
    """
    kind, _, version = name.partition(" ")
    module: Any = transformer_engine if kind == "te" else apex
    installed = te_fused_adam.installed(version) if kind == "te" else apex_fused_adam.installed()
    before, module.FusedAdam.device_types = module.FusedAdam.device_types, ("cpu",)
    try:
        with installed:
            yield module.FusedAdam
    finally:
        module.FusedAdam.device_types = before


def descend(model: nn.Module, optimizer: Optimizer, steps: range = range(3)) -> None:
    for step in steps:
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> Tensors:
    """Returns copies of whole parameters."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def state(optimizer: Optimizer) -> Tensors:
    """Returns copies of whole pieces of state, by parameter's number and name."""
    found = {}
    for number, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{number}.{name}"] = whole.detach().clone()
    return found


def assert_rounded_alike(
    ours: Tensors, theirs: Tensors, *, steps: int = 3, dtype: torch.dtype = torch.float32
) -> None:
    """Requires two Adams' weights, of the same gradients, to differ by roundings only.

    Both compute in float32. An update, at most 2 lr here, carries less than 16 roundings; taking it
    off a weight two more, and storing the weight in `dtype` one.
    """
    unit, stored = 2.0**-24, torch.finfo(dtype).eps / 2
    for name, right in theirs.items():
        largest = right.float().abs().max().item()
        bound = steps * (
            16 * unit * 2 * HYPER["lr"] + 2 * unit * largest + stored * largest * (stored > unit)
        )
        off = (ours[name].float() - right.float()).abs().max().item()
        assert off <= bound + unit * largest, f"{name} differs by {off}, more than {bound}"
