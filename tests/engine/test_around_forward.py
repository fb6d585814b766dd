"""Parameters used around their unit's forward: gradients are right. The kept programs of
`tests/fuzz/programs/seeds` that call parts do so recomputed, nested and between evaluations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardgrad
from tests.support.parity import (
    SHARDGRAD,
    WIDTH,
    Engine,
    Tensors,
    Tower,
    as_unsharded,
    close_to_unsharded,
    stack,
    token_loss,
)
from tests.support.ranks import Ranks, on_ranks


class WithMethods(Tower):
    """A tower with methods that a training loop may call instead of forward."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def through_self(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return token_loss(self, (tokens, targets))


def with_methods(engine: Engine) -> WithMethods:
    torch.manual_seed(0)
    return engine.shard_tower(WithMethods())


def inner_modules(model: WithMethods, tokens: Tensor, targets: Tensor) -> Tensor:
    """An inner module of a unit, one of the root, and a whole unit in between."""
    hidden = model.layers[1].norm(model.embedding(tokens))
    logits = model.head(model.layers[0](hidden))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def forward_of_units(model: WithMethods, tokens: Tensor, targets: Tensor) -> Tensor:
    """`forward` by name, of the root and of a unit."""
    again = model.layers[1].forward(model.embedding(tokens)).square().mean()
    return F.cross_entropy(model.forward(tokens).flatten(0, 1), targets.flatten()) + again


def after_one_that_raises(model: WithMethods, tokens: Tensor, targets: Tensor) -> Tensor:
    for module in (model.head, model.layers[0].up):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(torch.ones(2, WIDTH + 1))
    return model.loss(tokens, targets) + token_loss(model, (tokens, targets))


WAYS = [
    WithMethods.loss,
    inner_modules,
    forward_of_units,
    after_one_that_raises,
]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
@as_unsharded
def test_inner_modules_may_be_called_around_their_units_forward(
    engine: Engine, way: Callable[[WithMethods, Tensor, Tensor], Tensor], micro_batches: int
) -> Tensors:
    model = with_methods(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for micro in range(micro_batches):
            engine.sync(model, micro == micro_batches - 1)
            way(model, *engine.tokens(step * micro_batches + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    way(model, *engine.tokens(9)).backward()
    return engine.snapshot(model)


@on_ranks(2)
def test_a_change_of_the_weights_is_seen_by_a_call_around_forward() -> None:
    model, x = with_methods(SHARDGRAD), torch.ones(2, WIDTH)
    shards = list(model.parameters())
    before = model.head(x)  # the root stays unsharded for a backward that does not come
    with torch.no_grad():
        for shard in shards:
            shard.zero_()
    assert before.count_nonzero()
    assert not model.head(x).count_nonzero()


class Asking(nn.Linear):
    """Runs the model that it is a part of, and then itself."""

    def forward(self, x: Tensor, model: nn.Module | None = None) -> Tensor:
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
    for module in (unit, model):
        engine.fully_shard(module, reshard_after_forward=reshard_after_forward)
    for step, part in enumerate((model[0], unit[0])):
        x = engine.inputs(step, WIDTH, dtype=torch.get_default_dtype())
        for grads in (False, True):
            with torch.set_grad_enabled(grads):
                loss = part(x, model).square().mean()
        loss.backward()
        model(x).square().mean().backward()
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
        x = engine.inputs(step, 5, WIDTH, dtype=torch.get_default_dtype())
        model(x).square().mean().backward()
        with torch.no_grad():
            model.eval()(x)
        model.train()
    return engine.snapshot(model)


@on_ranks(2)
@as_unsharded
def test_attention_that_raises_leaves_nothing_to_the_next_forward(engine: Engine) -> Tensors:
    torch.manual_seed(0)
    model = engine.fully_shard(Attention(is_unit=False, engine=engine))
    params = list(model.parameters())
    x = engine.inputs(0, 5, WIDTH, dtype=torch.get_default_dtype())
    model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match="shape of the 2D attn_mask"):
        model.attention(x, x, x, attn_mask=torch.zeros(7, 7))
    for _ in range(2):
        with torch.no_grad():
            model(x)
            for param in params:
                param.mul_(0.5)
    model(x).square().mean().backward()
    return engine.snapshot(model)


# -- what is right without help


def through_a_method_that_calls_forward(engine: Engine) -> Tensors:
    model = with_methods(engine)
    for step in range(2):
        model.through_self(*engine.tokens(step)).backward()
    return engine.snapshot(model)


def through_a_registered_method(engine: Engine) -> Tensors:
    model = with_methods(engine)
    if not engine.whole_batch:
        shardgrad.register_fsdp_forward_method(model, "loss")
    for step in range(2):
        model.loss(*engine.tokens(step)).backward()
    return engine.snapshot(model)


class Headless(Tower):
    """Returns hidden states; the loop calls the head itself, while the root is still whole."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def head_outside_forward(engine: Engine) -> Tensors:
    torch.manual_seed(0)
    model = engine.shard_tower(Headless())
    for step in range(2):
        tokens, targets = engine.tokens(step)
        logits = model.head(model(tokens)) * model.gain
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return engine.snapshot(model)


def two_units_under_a_root_that_owns_nothing(engine: Engine) -> nn.Sequential:
    model = stack(5, 7, 5)
    for module in (model[0], model[2], model):
        engine.fully_shard(module)
    return model


def forward_of_a_root_that_owns_nothing(engine: Engine) -> Tensors:
    model = two_units_under_a_root_that_owns_nothing(engine)
    for step in range(3):
        x = engine.inputs(step, 5, dtype=torch.get_default_dtype())
        (model.forward(x) if step != 1 else model(x)).square().mean().backward()
    return engine.snapshot(model)


def a_unit_that_trained_long_before_its_root(engine: Engine) -> Tensors:
    model = two_units_under_a_root_that_owns_nothing(engine)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        x = engine.inputs(step, 5, dtype=torch.get_default_dtype())
        used = model[0] if step < 3 else model
        used(x).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return engine.snapshot(model)


RIGHT = [
    through_a_method_that_calls_forward,
    through_a_registered_method,
    head_outside_forward,
    forward_of_a_root_that_owns_nothing,
    a_unit_that_trained_long_before_its_root,
]


@pytest.mark.parametrize("program", RIGHT)
def test_gradients_are_averaged_whatever_path_the_loss_took(
    two_ranks: Ranks, program: Callable[..., Any]
) -> None:
    two_ranks.run(close_to_unsharded, program)
