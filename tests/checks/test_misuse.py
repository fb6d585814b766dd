"""Parameters used around their unit's forward: gradients are right, or the error says what to
type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardgrad
from shardgrad.errors import UnitBypassedError
from tests.support.parity import (
    SHARDGRAD,
    WIDTH,
    Engine,
    Tensors,
    Tower,
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


def inner_module_of_a_unit(model: WithMethods) -> Any:
    return model.layers[1].up(torch.ones(2, WIDTH))


def inner_module_of_the_root(model: WithMethods) -> Any:
    return model.head(torch.ones(2, WIDTH))


def method_that_calls_modules(model: WithMethods) -> Any:
    return model.loss(*SHARDGRAD.tokens(0))


def forward_itself(model: WithMethods) -> Any:
    return model.forward(SHARDGRAD.tokens(0)[0])


def forward_of_a_unit(model: WithMethods) -> Any:
    return model.layers[1].forward(torch.ones(2, WIDTH))


WAYS: dict[Callable[[WithMethods], Any], tuple[str, str]] = {
    inner_module_of_a_unit: ("Linear", "layers.1"),
    inner_module_of_the_root: ("Linear", ""),
    method_that_calls_modules: ("RMSNorm", 'register_fsdp_forward_method(model, "method")'),
    forward_itself: ("norm", "call"),
    forward_of_a_unit: ("LayerNorm", "layers.1"),
}


@pytest.mark.parametrize("trained_before", [False, True], ids=["first", "after_a_step"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_way_around_forward_is_refused_with_the_line_to_add(
    way: Callable[[WithMethods], Any], trained_before: bool
) -> None:
    model = with_methods(SHARDGRAD)
    if trained_before:
        token_loss(model, SHARDGRAD.tokens(0)).backward()
    with pytest.raises(UnitBypassedError) as caught:
        way(model)
    text = str(caught.value)
    for label in ("expected:", "got:", "where:", "try:"):
        assert label in text, text
    if trained_before:
        for part in WAYS[way]:
            assert part.lower() in text.lower(), text
    token_loss(model, SHARDGRAD.tokens(1)).backward()  # nothing is broken by the refusal


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


def forward_of_a_root_that_owns_nothing(engine: Engine) -> Tensors:
    model = stack(5, 7, 3)
    engine.fully_shard(model[0])
    engine.fully_shard(model[2])
    engine.fully_shard(model)
    for step in range(3):
        x = engine.inputs(step, 5, dtype=torch.get_default_dtype())
        (model.forward(x) if step != 1 else model(x)).square().mean().backward()
    return engine.snapshot(model)


def a_unit_that_trained_long_before_its_root(engine: Engine) -> Tensors:
    model = stack(5, 7, 5)
    engine.fully_shard(model[0])
    engine.fully_shard(model[2])
    engine.fully_shard(model)
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
