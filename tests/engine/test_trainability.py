"""Parameters that do not train, start or stop training later, are ignored, or have another
dtype.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    as_under_fsdp2,
    as_unsharded,
    close_to_unsharded,
    hsdp_mesh,
    stack,
    train_squares,
    watching_collectives,
)
from tests.support.ranks import on_ranks


@on_ranks(2)
@as_under_fsdp2
def test_ignored_parameters_have_the_gradients_of_fsdp2(engine: Engine) -> Tensors:
    model = stack(5, 7, 3)
    model[0] = torch.jit.script(model[0])  # a unit cannot own those of such a module
    ignored = set(model[0].parameters())
    engine.fully_shard(model, ignored_params=ignored)
    assert set(model[0].parameters()) == ignored
    assert not any(isinstance(param, DTensor) for param in ignored)
    for step in range(2):
        model.zero_grad()
        engine.loss(model, step, 5).backward()
    return engine.snapshot(model)


class TwoDtypes(nn.Module):
    """One unit with a float64 and a float32 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7, dtype=torch.float64)
        self.narrow = nn.Linear(7, 3, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)).float())


@pytest.mark.parametrize("when", ["before", "after", "later"])
@on_ranks(2)
def test_only_trainable_elements_of_a_unit_are_reduced(when: str) -> None:
    """Frozen before sharding, afterwards, or with a gradient that is reset then; it is 144 elements
    that would travel too.
    """
    sent: dict[str, int] = {}
    for engine in (SHARDGRAD, FSDP2):
        model = stack(8, 16, 4)
        if when == "before":
            model[0].requires_grad_(False)
        engine.fully_shard(model, reshard_after_forward=False)
        for is_frozen in (False, True) if when == "later" else ():
            model[0].requires_grad_(not is_frozen)
            engine.loss(model, 0, 8).backward()
        model.zero_grad()
        model[0].requires_grad_(False)
        counts: list[int] = []
        loss = engine.loss(model, 0, 8)
        with watching_collectives(lambda name, chunk, into=counts: into.append(chunk.numel())):
            loss.backward()
        sent[engine.name] = sum(counts)
    trains = 16 * 4 + 4
    assert sent["fsdp2"] == trains
    # Of two ranks each sends the half that is the other's: here without, under FSDP2 with its own,
    # which stays. Beside gradients travel flags, a label and padding to 128 bytes.
    assert trains / 2 <= sent["shardgrad"] <= trains / 2 + 3 * 32


@on_ranks(2)
def test_several_dtypes_in_one_unit_equal_an_unsharded_run() -> None:
    def program(engine: Engine) -> Tensors:
        torch.manual_seed(0)
        return train_squares(engine, engine.fully_shard(TwoDtypes()), 5)

    # Half of the model computes in fp32, in another order than unsharded: 2^-24 with a margin for
    # Adam.
    close_to_unsharded(program, tolerance=1e-4)


@pytest.mark.parametrize("words", list(product(product([False, True], repeat=2), repeat=3)))
@on_ranks(2)
def test_what_is_said_last_of_requires_grad_counts_on_either_parameter(
    words: tuple[tuple[bool, bool], ...],
) -> None:
    """It is said of unsharded or of sharded parameters, and what the next forward finds; what is
    frozen last also gets no gradient of an earlier loss, which may know no outputs of a unit.
    """
    model = SHARDGRAD.fully_shard(stack(5, 3))
    model(SHARDGRAD.inputs(0, 5))
    model.unshard()
    loss = sum(param.sum() for param in model.parameters())
    for word, is_unsharded in words:
        model.unshard() if is_unsharded else model.reshard()
        model.requires_grad_(word)
    loss.backward()
    model.reshard()
    assert word or all(param.grad is None for param in model.parameters())
    for _ in range(2):
        assert {param.requires_grad for param in model.parameters()} == {word}
        model(SHARDGRAD.inputs(0, 5))


@pytest.mark.parametrize("replicas", [1, 2])
@on_ranks(2)
@as_unsharded
def test_gradients_that_wait_are_cast_with_the_model(engine: Engine, replicas: int) -> Tensors:
    """They are whole numbers and sixteenths, which no dtype rounds."""
    model = engine.fully_shard(stack(4, 2), mesh=hsdp_mesh(replicas, 2 // replicas))
    for is_last in (False, True):
        if replicas == 1:
            engine.sync(model, is_last)
        elif not engine.whole_batch:
            model.set_requires_all_reduce(is_last)
        x = engine.mine(torch.arange(32).view(8, 4) + 5 * is_last)
        model(x.to(model[0].weight.dtype)).mean().backward()
        model.float()
    return engine.snapshot(model)


class Turns(nn.Module):
    """Trains one of its layers in each forward; says so before it calls it, or as the call
    begins.
    """

    def __init__(self, *, by_hook: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.trained = 0
        self.by_hook = by_hook

    def say(self, layer: nn.Module, *_: Any) -> None:
        layer.requires_grad_(layer is self.layers[self.trained])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.by_hook:
                self.say(layer)
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("by_hook", [False, True])
@on_ranks(2)
@as_unsharded
def test_a_forward_may_freeze_and_thaw_what_it_calls(engine: Engine, *, by_hook: bool) -> Tensors:
    torch.manual_seed(0)
    model = Turns(by_hook=by_hook)
    for layer in model.layers:
        engine.fully_shard(layer)
        if by_hook:
            layer.register_forward_pre_hook(model.say)
    engine.fully_shard(model)
    for step, model.trained in enumerate((0, 1, 1, 0)):
        engine.loss(model, step, 5).backward()
    return engine.snapshot(model)
