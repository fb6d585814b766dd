"""States on the host between steps: the same training, bit for bit, and the same state dicts.

That copies are in order, and what a device holds, is shown by
`tests/cuda_runtime/test_host_states.py` and `tests/gpu/test_gpu_optimizers.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shardgrad
from shardgrad.optim import SGD, Adam, AdamW, Muon
from tests.support.parity import SHARDGRAD, Tensors, assert_same_bits, stack
from tests.support.ranks import on_ranks
from tests.support.two_engines import whole

KINDS: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
    "adamw": (torch.float32, AdamW, {}),
    "adam with a master": (torch.bfloat16, Adam, {"master": "float32"}),
    "adamw with a remainder": (
        torch.bfloat16,
        AdamW,
        {"master": "remainder", "moment_dtype": torch.bfloat16},
    ),
    "adamw rounding stochastically": (torch.bfloat16, AdamW, {"stochastic_rounding": True}),
    "sgd": (torch.float32, SGD, {}),
    "sgd with momentum": (torch.float32, SGD, {"momentum": 0.9, "nesterov": True}),
    "muon": (torch.float32, Muon, {}),
    "muon with a master": (torch.bfloat16, Muon, {"master": "float32"}),
    "muon with a remainder": (torch.bfloat16, Muon, {"master": "remainder"}),
}


def built(name: str, *, on_host: bool) -> tuple[torch.nn.Module, Any]:
    """Returns two units of several segments, and a parameter that no unit shards."""
    dtype, kind, options = KINDS[name]
    model = stack(6, 8, 8, 5).to(dtype)
    free = model[4].weight
    SHARDGRAD.shard(model[0], model[2])
    shardgrad.fully_shard(model, ignored_params={free, model[4].bias})
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": matrices[:1], "lr": 0.05}, {"params": matrices[1:]}]
    return model, kind(groups, lr=0.1, states_on_host=on_host, **options)


def train(model: torch.nn.Module, optim: Any, steps: range) -> Tensors:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
    dtype = next(model.parameters()).dtype
    for step in steps:
        SHARDGRAD.loss(model, step, 6, dtype=dtype).backward()
        optim.found_inf = torch.tensor(float(step % 3 == 1))
        optim.step()
        schedule.step()
        model.zero_grad()
    return contents(model, optim)


def contents(model: torch.nn.Module, optim: Any) -> Tensors:
    """Returns this rank's part of weights and states."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number, state in optim.state_dict()["state"].items():
        found |= {f"{key} of {number}": value.clone() for key, value in state.items()}
    return {name: getattr(value, "to_local", lambda v=value: v)() for name, value in found.items()}


@pytest.mark.parametrize("name", KINDS)
@on_ranks(2)
def test_states_on_the_host_change_no_bit_and_their_dicts_go_there_and_back(name: str) -> None:
    """With a schedule, and with steps that are skipped."""
    model, optim = built(name, on_host=False)
    right = train(model, optim, range(5)) | train(model, optim, range(5, 8))
    for first in (False, True):
        model, optim = built(name, on_host=first)
        train(model, optim, range(5))
        other, other_optim = built(name, on_host=not first)
        other.load_state_dict(model.state_dict())
        other_optim.load_state_dict(copy.deepcopy(optim.state_dict()))
        assert_same_bits(train(other, other_optim, range(5, 8)), right)


@on_ranks(2)
def test_states_on_the_host_have_nothing_to_give_back() -> None:
    """So a step of an optimizer that sleeps at level 1 is one of an optimizer that does not."""
    model = stack(6, 5)
    shardgrad.fully_shard(model, offload_policy=shardgrad.SleepPolicy())
    optim = AdamW(model.parameters(), states_on_host=True)
    for level in (1, 2):
        SHARDGRAD.loss(model, level, 6).backward()
        optim.step()
        optim.zero_grad()
        before = whole(model, optim)
        shardgrad.sleep(model, optim, level=level)
        saved = optim.state_dict()
        shardgrad.wake(model, optim)
        optim.load_state_dict(saved)
        assert_same_bits(whole(model, optim), before)
