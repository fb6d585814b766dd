"""torch's own optimizers, clipping and loss scaler on our parameters do what they do under
FSDP2.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shardgrad
from shardgrad.checks import optimizer_hooks
from shardgrad.errors import CaptureError
from tests.support.parity import (
    FSDP2,
    SHARDGRAD,
    Engine,
    Tensors,
    assert_same_bits,
    many_small,
    same_bits_as_fsdp2,
    stack,
    tower,
    unchanged,
)
from tests.support.ranks import Ranks, on_ranks
from tests.support.two_engines import take_steps

# Names of optimizers, and options.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "AdamW foreach": ("AdamW", {"foreach": True}),
    "AdamW for-loop": ("AdamW", {"foreach": False}),
    "AdamW fused": ("AdamW", {"fused": True}),
    "AdamW fused, lr a tensor": ("AdamW", {"lr": torch.tensor(1e-2), "fused": True}),
    "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "Adam foreach": ("Adam", {"foreach": True}),
    "SGD": ("SGD", {}),
    "SGD momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "RMSprop": ("RMSprop", {"lr": 1e-3}),
    "Adagrad": ("Adagrad", {}),
}
# DTensor has no rule for some of their operations in torch 2.13, whoever made the DTensor.
RECIPES_WITHOUT_RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "Adafactor": ("Adafactor", {}),
    "SGD fused": ("SGD", {"momentum": 0.9, "fused": True}),
}


def _train(engine: Engine, name: str) -> Tensors:
    kind, options = (RECIPES | RECIPES_WITHOUT_RULES)[name]
    history: Tensors = {}
    for model in (engine.shard_tower(tower()), engine.fully_shard(many_small())):
        optimizer = getattr(optim, kind)(model.parameters(), **{"lr": 1e-2, **options})
        take_steps(engine, model, optimizer, range(3))
        history |= {f"{type(model).__name__} {key}": t for key, t in engine.snapshot(model).items()}
        for param, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    assert isinstance(value, DTensor), key
                    assert value.placements == param.placements, key
    return history


@pytest.mark.parametrize("name", RECIPES)
def test_an_optimizer_of_torch_gives_the_bits_of_fsdp2(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(same_bits_as_fsdp2, _train, name)


def _does_alike(program: Any, *args: Any) -> None:
    """Requires both engines to end with the same numbers, or with the same kind of error."""
    outcomes: list[tuple[str, Tensors]] = []
    for engine in (SHARDGRAD, FSDP2):
        try:
            outcomes.append(("", program(engine, *args)))
        except Exception as error:
            outcomes.append((type(error).__name__, {}))
    (our_error, ours), (their_error, theirs) = outcomes
    assert our_error == their_error
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("name", RECIPES_WITHOUT_RULES)
def test_what_dtensor_cannot_do_fails_as_under_fsdp2(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(_does_alike, _train, name)


def _minimize(engine: Engine, line_search: str | None) -> Tensors:
    model = engine.fully_shard(stack(4, 6, 2))
    x, y = engine.inputs(0, 4), engine.inputs(1, 2)
    # On the mean of each rank's loss: a line search that saw different losses would tear ranks
    # apart.
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    losses = torch.stack([torch.as_tensor(optimizer.step(closure)) for _ in range(2)])
    return {"losses": losses, **engine.snapshot(model)}


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_does_what_it_does_under_fsdp2(two_ranks: Ranks, line_search: str | None) -> None:
    two_ranks.run(_does_alike, _minimize, line_search)


# -- under capture


CAPTURES: list[tuple[type[Optimizer], dict[str, Any], str | None, bool]] = [
    (optim.LBFGS, {}, "LBFGS cannot be part of a CUDA graph: it reads losses", False),
    (optim.Adafactor, {}, "it reads norms", False),
    (optim.Adagrad, {}, "it counts steps on the host", True),
    (optim.AdamW, {}, "capturable=False", True),
    (optim.SGD, {"momentum": 0.9}, "to create the momentum buffers", False),
    (optim.SGD, {"momentum": 0.9}, None, True),
    (optim.Muon, {}, "to create the momentum buffers", False),
    (optim.SGD, {}, None, False),
    (shardgrad.optim.AdamW, {}, None, False),
    (shardgrad.optim.SGD, {"lr": 0.1, "momentum": 0.9}, None, False),
]


@pytest.mark.parametrize(
    ("kind", "options", "words", "warm"),
    CAPTURES,
    ids=[f"{c[0].__name__} {c[1]} {c[3]}" for c in CAPTURES],
)
@on_ranks(1)
def test_a_step_that_a_graph_would_freeze_is_refused_in_words(
    kind: type[Optimizer], options: dict[str, Any], words: str | None, warm: bool
) -> None:
    model = shardgrad.fully_shard(stack(3, 2))
    plain = nn.Linear(3, 2)
    optimizer, other = kind([model[0].weight], **options), kind([plain.weight], **options)

    def closure() -> Tensor:
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    closure()
    if warm:
        optimizer.step()
    with mock.patch.object(optimizer_hooks, "is_capturing", return_value=True):
        if words is None:
            optimizer.step()
        else:
            refusal = pytest.raises(CaptureError, match=words)
            with unchanged(model.parameters()), refusal as raised:
                optimizer.step(closure)
            assert "weight" in str(raised.value.where)
        if kind is not optim.LBFGS:
            other.step()  # not ours: nothing is said
    if words is not None and kind is not optim.Adafactor:  # DTensor has no rule for its step
        optimizer.step(closure)
