"""What tests of graphed steps share: the oracle, which is the same program without a graph, and the
step that most of them take.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import shardgrad
from tests.support.parity import judged_by

Step = Callable[[Tensor], Tensor]
Graphed = Callable[..., Any]  # `graphed_step`, or what stands for it
Values = Iterator[Any]  # as they are when they are yielded; a module stands for its weights
Program = Callable[..., Values]


def eager(*capturables: Any, **settings: Any) -> Callable[[Any], Any]:
    """Stands where `graphed_step` does, and leaves the function as it is."""
    return lambda function: function


def values_of(yielded: Iterable[Any]) -> list[Any]:
    """Returns what a program yields, of tensors copies before they are written again."""
    found = []
    for each in yielded:
        for leaf in tree_leaves(each):
            found += map(_copied, leaf.parameters() if isinstance(leaf, nn.Module) else [leaf])
    return found


def _copied(value: Any) -> Any:
    value = value.to_local() if isinstance(value, DTensor) else value
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def require_same(right: list[Any], ours: list[Any]) -> None:
    """Asserts that a program gave the same values, bit for bit, with and without graphs."""
    for number, (expected, got) in enumerate(zip(right, ours, strict=True)):
        same = torch.equal(expected, got) if isinstance(got, Tensor) else expected == got
        assert same, f"value {number}: {expected} and {got}"


def same_bits_as_eager(program: Program) -> Callable[..., None]:
    """Makes a test of a program that is given `graphed_step`, or what stands for it."""
    return judged_by(_both, program)


def _both(program: Program, **parameters: Any) -> None:
    runs = (values_of(program(each, **parameters)) for each in (eager, shardgrad.graphed_step))
    require_same(*runs)


def require_replays(step: Any, captures: int, replays: int) -> None:
    """Asserts what a graphed step did; an eager one has done nothing of the kind."""
    if isinstance(step, shardgrad.graphs.GraphedStep):
        assert (step.captures, step.replays) == (captures, replays)
        step.close()
        assert (step.captures, gc.isenabled()) == (0, True)


def on_one_gpu(model: nn.Sequential, **options: object) -> nn.Sequential:
    """Returns the model on the device of torch.cuda, each layer a unit."""
    mesh = init_device_mesh("cuda", (1,))
    for unit in (*model.cuda(), model):
        shardgrad.fully_shard(unit, mesh=mesh, **options)
    return model


def step_of(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    max_norm: float | None = None,
) -> Step:
    """Returns a step that trains on a batch and returns its loss."""

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        if max_norm is not None:
            shardgrad.clip_grad_norm_(model, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
