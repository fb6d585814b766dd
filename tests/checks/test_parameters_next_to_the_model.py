"""Trainable parameters next to a sharded model, in its optimizer: named, or looked after by the
program.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardgrad
from tests.support.parity import SHARDGRAD, WIDTH
from tests.support.ranks import on_ranks

Parts = tuple[nn.Module, nn.Module]


def parts() -> Parts:
    torch.manual_seed(0)
    model, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
    shardgrad.fully_shard(model)
    return model, head


def steps(modules: Parts, optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the warnings of some steps, each behind the file and line that it names."""
    model, head = modules
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            head(model(SHARDGRAD.inputs(step, WIDTH))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    own = [each for each in caught if issubclass(each.category, shardgrad.UnownedParameterWarning)]
    return [f"{each.filename}: {each.message}" for each in own]


@on_ranks(2)
def test_parameters_next_to_the_model_have_the_names_that_the_optimizer_knows() -> None:
    modules = parts()
    named = [
        *modules[0].named_parameters(prefix="model"),
        *modules[1].named_parameters(prefix="head"),
    ]
    (text,) = steps(modules, torch.optim.SGD(named, lr=0.1))
    assert f"head.weight, of shape (2, {WIDTH}); head.bias, of shape (2,)" in text, text


@on_ranks(2)
def test_parameters_that_are_added_to_the_optimizer_later_are_named() -> None:
    modules = parts()
    # A program that gives a module an optimizer may look after it there.
    assert steps(modules, torch.optim.SGD(modules[1].parameters(), lr=0.1)) == []
    optimizer = torch.optim.SGD(modules[0].parameters(), lr=0.1)
    assert steps(modules, optimizer) == []
    optimizer.add_param_group({"params": list(modules[1].parameters())})
    (text,) = steps(modules, optimizer)
    assert re.search("parameter 0 of group 1.*parameter 1 of group 1", text), text


def ignored() -> Parts:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 2)
    return shardgrad.fully_shard(
        nn.Linear(WIDTH, WIDTH), ignored_params=set(head.parameters())
    ), head


def ignored_inside() -> Parts:
    """`load_state_dict(assign=True)` puts others under the names that were ignored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    shardgrad.fully_shard(model, ignored_params=set(model[1].parameters()))
    model[1].load_state_dict(
        {name: value.clone() for name, value in model[1].state_dict().items()}, assign=True
    )
    return model, nn.Identity()


def frozen() -> Parts:
    model, head = parts()
    return model, head.requires_grad_(False)


def in_ddp() -> Parts:
    model, head = ignored()
    return model, DistributedDataParallel(head)


@pytest.mark.parametrize("build", [ignored, ignored_inside, frozen, in_ddp])
@on_ranks(2)
def test_parameters_that_the_program_looks_after_are_not_warned_of(
    build: Callable[[], Parts],
) -> None:
    modules = build()
    params = chain.from_iterable(module.parameters() for module in modules)
    assert steps(modules, torch.optim.SGD(params, lr=0.1)) == []
