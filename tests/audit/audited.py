"""Programs for `shardgrad doctor --audit`: one that is right under each engine, and mistakes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn

import shardgrad

_Built = tuple[nn.Module, torch.optim.Optimizer, Callable[[int, list[int]], object]]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


def batch(index: int, parts: Iterable[int]) -> torch.Tensor:
    seeds = [torch.Generator().manual_seed(100 * index + part) for part in parts]
    return torch.cat([torch.randn(4, 8, generator=seed) for seed in seeds])


def sharded() -> _Built:
    model = net()
    for layer in (model[0], model[2], model):
        shardgrad.fully_shard(layer)
    optimizer = shardgrad.optim.AdamW(model.parameters(), lr=0.1)

    def step(index: int, parts: list[int]) -> None:
        model(batch(index, parts)).square().mean().backward()
        shardgrad.clip_grad_norm_(model, 0.01)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def with_the_environment_of_a_launcher() -> _Built:
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    return sharded()


def _trained(
    model: nn.Module, run: Callable[[torch.Tensor], Any], after: Callable[[], None]
) -> _Built:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(index: int, parts: list[int]) -> None:
        run(batch(index, parts)).square().mean().backward()
        after()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def replicated() -> _Built:
    model = nn.parallel.DistributedDataParallel(net())
    return _trained(model, model, lambda: None)


def fsdp2_sharded() -> _Built:
    model = fsdp2.fully_shard(net())
    return _trained(model, model, lambda: None)


def past_the_wrapper() -> _Built:
    model = nn.parallel.DistributedDataParallel(net())
    return _trained(model, model.module, lambda: None)


def summed() -> _Built:
    model = net()

    def add_up() -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad)

    return _trained(model, model, add_up)


def seeded_by_rank() -> _Built:
    torch.manual_seed(dist.get_rank())
    model = fsdp2.fully_shard(net())
    return _trained(model, model, lambda: None)


def only_the_data_of_rank_0() -> _Built:
    model = net()

    def from_rank_0() -> None:
        for param in model.parameters():
            dist.broadcast(param.grad, 0)

    return _trained(model, model, from_rank_0)


def one_step_late() -> _Built:
    model = net()
    former: list[torch.Tensor] = []

    def swap() -> None:
        own = []
        for param in model.parameters():
            dist.all_reduce(param.grad)
            own.append(param.grad.div_(dist.get_world_size()).clone())
        if former and dist.get_world_size() > 1:
            for param, late in zip(model.parameters(), former, strict=True):
                param.grad = late
        former[:] = own

    return _trained(model, model, swap)


def unused_on_rank_1() -> _Built:
    model = nn.ModuleDict({"always": nn.Linear(8, 3), "sometimes": nn.Linear(8, 3)})

    def run(x: torch.Tensor) -> torch.Tensor:
        out = model["always"](x)
        if dist.get_rank() == 0:  # where the samples are that need the other layer
            out = torch.cat([out[:4] + model["sometimes"](x[:4]), out[4:]])
        return out

    def average() -> None:
        for param in model["always"].parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())

    return _trained(model, run, average)


def forgotten_by_the_optimizer() -> _Built:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_world_size() > 1:
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model = nn.parallel.DistributedDataParallel(model)

    def step(index: int, parts: list[int]) -> None:
        model(batch(index, parts)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def another_model_on_rank_1() -> _Built:
    model = shardgrad.fully_shard(nn.Linear(8, 3 + dist.get_rank()))
    return _trained(model, model, lambda: None)


def _itself(model: nn.Module, run: Callable[[torch.Tensor], Any]) -> nn.Module:
    """Trains some steps, each rank on its own data, as a script does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        run(batch(index, [dist.get_rank()])).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


def trains_with_ddp() -> nn.Module:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(net())
    _itself(model, model)
    dist.destroy_process_group()
    return model


def trains_with_fsdp1() -> nn.Module:
    model = fsdp2.FullyShardedDataParallel(
        net(), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        model(batch(index, [dist.get_rank()])).square().mean().backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model


def trains_with_fsdp2() -> nn.Module:
    model = fsdp2.fully_shard(net())
    return _itself(model, model)


def trains_with_shardgrad() -> nn.Module:
    model = shardgrad.fully_shard(net())
    return _itself(model, model)


def trains_past_the_wrapper() -> nn.Module:
    model = nn.parallel.DistributedDataParallel(net())
    return _itself(model, model.module)


def trains_and_returns_losses() -> dict[str, Any]:
    model = fsdp2.fully_shard(net())
    _itself(model, model)
    weights = [
        param.full_tensor() if hasattr(param, "full_tensor") else param
        for param in model.parameters()
    ]
    return {"norms": {"first": weights[0].norm().item()}}


def needs_its_engine() -> nn.Module:
    model = fsdp2.fully_shard(net())
    model[0].weight.to_local()  # what plain parameters do not have
    return model


def without_a_step() -> Any:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def broken() -> _Built:
    raise FileNotFoundError("data.bin")


a_number = 7
