"""What `fully_shard` refuses is left as it was; where it runs, and in which mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import shardgrad
from tests.support.parity import SHARDGRAD, assert_same_bits, stack, train_squares
from tests.support.ranks import on_ranks


def with_param(param: nn.Parameter) -> nn.Module:
    module = stack(5, 7)
    module.extra = param
    return module


def hooked() -> nn.Module:
    module = stack(5, 7)
    module[0].bias.register_post_accumulate_grad_hook(print)
    return module


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, device="meta"))


def child_of_a_root() -> nn.Module:
    return SHARDGRAD.fully_shard(stack(5, 7, 3))[0]


# What makes a module, and options that go with it.
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "scalar": (lambda: with_param(nn.Parameter(torch.tensor(1.0))), {}),
    "devices": (on_two_devices, {}),
    "hook": (hooked, {}),
    "dtype": (lambda: stack(5, 7), {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.int32)}),
    "claimed": (child_of_a_root, {}),
    "twice": (lambda: stack(5, 7), {}),
    "indivisible": (lambda: stack(5, 7, 3), {"reshard_after_forward": 3}),
}


def fingerprint(module: nn.Module) -> list[Any]:
    """Returns everything that sharding changes, in a comparable form."""
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


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_is_refused_is_left_as_it_was(name: str) -> None:
    """What is said of it stands in tests/mistakes."""
    build, options = REFUSED[name]
    module = build()
    before = fingerprint(module)
    with pytest.raises(shardgrad.ShardgradError, match=r"(?s)expected:.*got:.*try:"):
        shardgrad.fully_shard([module] * (1 + (name == "twice")), **options)
    assert fingerprint(module) == before


@on_ranks(2)
def test_a_model_built_and_sharded_in_inference_mode_trains() -> None:
    trained = []
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            model = shardgrad.fully_shard(stack(5, 7, 3))
        trained.append(train_squares(SHARDGRAD, model, 5, steps=2))
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
