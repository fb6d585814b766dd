"""One rank sends nothing, so nothing is copied for a message: the bits of FSDP2, with fewer bytes
moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardgrad
from tests.support.parity import SHARDGRAD, Engine, Tensors, same_bits_as_fsdp2, stack

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (24, 40, 24)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(engine: Engine, sizes: tuple[int, ...] = SIZES, **options: Any) -> nn.Sequential:
    model = stack(*sizes)
    for layer in model:
        if isinstance(layer, nn.Linear):
            engine.fully_shard(layer, **options)
    return engine.fully_shard(model, **options)


def train(
    engine: Engine,
    *,
    micro_batches: int = 1,
    sync_each: bool = True,
    change: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> Tensors:
    model = sharded(engine, **options)
    change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: Tensors = {}
    for step in range(3):
        for micro in range(micro_batches):
            engine.sync(model, sync_each or micro == micro_batches - 1)
            x = engine.inputs(step * micro_batches + micro, SIZES[0])
            model(x).float().square().mean().backward()
        found |= {f"step {step}, {name}": value for name, value in engine.snapshot(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


def by_three(model: Any) -> None:
    for layer in (model, model[0], model[2]):
        layer.set_gradient_divide_factor(3.0)


def columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=FP16, reduce_dtype=FP16)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=BF16)},  # which rounds gradients
        {"micro_batches": 3},
        {
            "micro_batches": 3,
            "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
        },
        {"micro_batches": 3, "sync_each": False},
        {"change": by_three},
        {
            "change": by_three,
            "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
        },
        {"shard_placement_fn": columns, "mp_policy": MixedPrecisionPolicy(param_dtype=BF16)},
    ],
    ids=str,
)
def test_one_rank_trains_to_the_bits_of_fsdp2(options: dict[str, Any]) -> None:
    same_bits_as_fsdp2(train, **options)


class Moved(TorchDispatchMode):
    """Counts the bytes that the ops of a step read and write in buffers of parameters and
    gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].removesuffix(".default")
        if func.namespace == "shardgrad":
            # Updates, and sums that are added to, read what they write.
            tensors = [
                each for arg in args[:4] for each in (arg if isinstance(arg, list) else [arg])
            ]
            sizes = [
                each.nbytes
                for each in tensors
                if isinstance(each, Tensor) and each.dtype != torch.int64
            ]
            param, grad, *states = sizes if name == "adam_" else (0, 0)
            self.nbytes[name] += 2 * (param + sum(states)) + grad if name == "adam_" else sum(sizes)
            if name in ("pack", "sum_chunks") and args[-1]:
                self.nbytes[name] += args[1].nbytes
        elif name == "copy_":
            self.nbytes[name] += args[0].nbytes + args[1].nbytes
        return func(*args, **(kwargs or {}))


def moved_by_a_step(**options: Any) -> dict[str, float]:
    """Returns the bytes of a step for each parameter, by op, the norm and the optimizer
    included.
    """
    model = sharded(SHARDGRAD, (256, 1024, 256), **options)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=1e-3)
    numel = sum(param.numel() for param in model.parameters())
    for step in range(2):
        with Moved() as moved:
            model(SHARDGRAD.inputs(step, 256)).float().sum().backward()
            shardgrad.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {name: nbytes / numel for name, nbytes in moved.nbytes.items()}


def test_a_step_in_bf16_moves_less_than_52_bytes_for_each_parameter() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    moved = moved_by_a_step(mp_policy=policy, reshard_after_forward=True)
    least = {"unpack": 2 * (4 + 2), "pack": 2 + 4, "norm_": 4, "adam_": 28}
    for name, nbytes in least.items():
        assert nbytes <= moved.pop(name) < nbytes + 0.5  # padding, flags
    assert sum(moved.values()) < 0.1  # factors and counters
    assert sum(least.values()) < 52
