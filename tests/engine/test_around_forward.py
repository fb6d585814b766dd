"""Parameters used around their unit's forward: gradients are right.

Random and kept programs call parts of the root again and again, recomputed, nested and between
evaluations; those of `tests/silent/cases` call other methods, and use weights without their module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardgrad
from tests.support.parity import (
    WIDTH,
    Engine,
    Tensors,
    Tower,
    as_unsharded,
    stack,
)
from tests.support.ranks import on_ranks


class WithALoss(Tower):
    """A tower with a method that a training loop may call instead of forward; it reads a
    parameter.
    """

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.norm(self.embedding(tokens)) @ self.head.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Asking(nn.Linear):
    """Runs the model that it is a part of, and then itself."""

    def forward(self, x: Tensor, model: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return super().forward(x if model is None else model(x))


@pytest.mark.parametrize("reshard_after_forward", [None, True])
@on_ranks(2)
@as_unsharded
def test_a_part_may_call_the_model_that_it_is_of(
    engine: Engine, reshard_after_forward: bool | None
) -> Tensors:
    torch.manual_seed(0)
    unit = nn.Sequential(Asking(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(Asking(WIDTH, WIDTH), unit)
    engine.shard(unit, model, reshard_after_forward=reshard_after_forward)
    for step, part in enumerate((model[0], unit[0])):
        x = engine.inputs(step, WIDTH)
        for grads in (False, True):
            with torch.set_grad_enabled(grads):
                loss = part(x, model).square().mean()
        loss.backward()
        model(x).square().mean().backward()
    return engine.snapshot(model)


@on_ranks(2)
@as_unsharded
def test_a_part_that_another_one_calls_may_have_a_backward_of_its_own(engine: Engine) -> Tensors:
    """After a call that fails, of which nothing is left."""
    torch.manual_seed(0)
    unit = nn.Sequential(Asking(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = engine.shard(unit, nn.Sequential(unit, nn.Tanh()), reshard_after_forward=True)
    x, kept = engine.inputs(0, WIDTH).requires_grad_(), list[Tensor]()
    with suppress(RuntimeError):
        unit[0](x[:, 1:])
    unit[0](x, lambda x: kept.append(unit[1](x)) or kept[0].detach()).square().mean().backward()
    kept[0].square().mean().backward()
    model(x)
    assert engine.whole_batch or isinstance(unit[0].weight, DTensor)
    return engine.snapshot(model)


class Attention(nn.Module):
    """Attention whose projection is a unit: it reads the weight and does not call it."""

    def __init__(self, *, is_unit: bool, engine: Engine) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        engine.fully_shard(self.attention.out_proj)
        if is_unit:
            engine.fully_shard(self.attention)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("is_unit", [False, True])
@on_ranks(2)
@as_unsharded
def test_multihead_attention_may_have_its_projection_sharded(
    engine: Engine, is_unit: bool
) -> Tensors:
    torch.manual_seed(0)
    model = engine.fully_shard(Attention(is_unit=is_unit, engine=engine))
    for step in range(3):
        x = engine.inputs(step, 5, WIDTH)
        model(x).square().mean().backward()
        with torch.no_grad():
            model.eval()(x)
        model.train()
    return engine.snapshot(model)


# -- what is right without help


@on_ranks(2)
@as_unsharded
def test_a_registered_method_may_be_what_the_loss_comes_from(engine: Engine) -> Tensors:
    torch.manual_seed(0)
    model = engine.shard_tower(WithALoss())
    if not engine.whole_batch:
        shardgrad.register_fsdp_forward_method(model, "loss")
    for step in range(2):
        model.loss(*engine.tokens(step)).backward()
    return engine.snapshot(model)


@on_ranks(2)
@as_unsharded
def test_forward_of_a_root_that_owns_nothing_may_be_called_by_its_name(engine: Engine) -> Tensors:
    model = engine.shard_stack(stack(5, 7, 5))
    for step in range(3):
        x = engine.inputs(step, 5)
        (model.forward(x) if step != 1 else model(x)).square().mean().backward()
    return engine.snapshot(model)
