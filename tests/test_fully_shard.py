"""Bad input: a typed error of the builtin type FSDP2 raises, a way out, and an untouched module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import shardgrad
from shardgrad import errors
from tests.support.parity import SHARDGRAD, assert_same_bits, stack
from tests.support.ranks import on_ranks


@dataclass
class Case:
    """Something that must be refused.

    Attributes:
        build: makes the module.
        error: ours.
        builtin: what FSDP2 raises in its place.
        says: part of the message.
        options: makes the keyword arguments of fully_shard from the module.
    """

    build: Callable[[], Any]
    error: type[Exception]
    builtin: type[Exception]
    says: str
    options: Callable[[Any], dict[str, Any]] = field(default=lambda module: {})


def with_param(param: nn.Parameter) -> nn.Module:
    module = stack(5, 7)
    module.extra = param
    return module


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, device="meta"))


def child_of_a_root() -> nn.Module:
    return SHARDGRAD.fully_shard(stack(5, 7, 3))[0]


def plain() -> nn.Module:
    return stack(5, 7, 3)


CASES = {
    "scalar": Case(
        lambda: with_param(nn.Parameter(torch.tensor(1.0))),
        errors.UnsupportedParameterError,
        ValueError,
        "Change extra to a 1D tensor with numel equal to 1",
    ),
    "devices": Case(on_two_devices, errors.DeviceError, ValueError, "1.weight on meta"),
    "claimed": Case(child_of_a_root, errors.ParameterClaimedError, ValueError, "weight"),
    "indivisible": Case(
        plain,
        errors.OptionError,
        ValueError,
        "it should be a factor of 2, not 3",
        lambda _: {"reshard_after_forward": 3},
    ),
}


def fingerprint(module: Any) -> Any:
    """Returns everything that sharding changes, in a comparable form."""
    if not isinstance(module, nn.Module):
        return None
    modules = []
    for name, each in module.named_modules():
        params = [
            (key, id(p), p.data_ptr(), sorted(p.__dict__))
            for key, p in each._parameters.items()
            if p is not None
        ]
        hooks = {
            key: len(value)
            for key, value in each.__dict__.items()
            if key.endswith("_hooks") and value is not None
        }
        modules.append((name, id(each), type(each), params, hooks, sorted(each.__dict__)))
    return modules


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_bad_input_is_refused_with_a_way_out_and_changes_nothing(name: str) -> None:
    case = CASES[name]
    module = case.build()
    options = case.options(module)
    before = fingerprint(module)
    with pytest.raises(case.error) as caught:
        shardgrad.fully_shard(module, **options)
    assert isinstance(caught.value, shardgrad.ShardgradError)
    assert isinstance(caught.value, case.builtin)
    text = str(caught.value)
    assert case.says in text, text
    for label in ("expected:", "got:", "try:"):
        assert label in text, text
    assert fingerprint(module) == before


@on_ranks(2)
def test_a_model_built_and_sharded_in_inference_mode_trains() -> None:
    trained = []
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            model = shardgrad.fully_shard(stack(5, 7, 3))
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            model(SHARDGRAD.inputs(step, 5)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        trained.append(SHARDGRAD.snapshot(model))
    assert_same_bits(*trained)


@on_ranks(2)
def test_a_cuda_build_on_a_machine_without_a_gpu_takes_the_cpu() -> None:
    built_for = torch._C._accelerator_getAccelerator
    # What a CUDA build says, GPU or not.
    torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
    try:
        model = shardgrad.fully_shard(stack(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        assert {param.device.type for param in model.parameters()} == {"cpu"}
        assert shardgrad.GraphPool().device.type == "cpu"
    finally:
        torch._C._accelerator_getAccelerator = built_for
