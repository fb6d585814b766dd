"""Programs for `shardgrad doctor --audit`: one that is right under each engine, and mistakes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn

import shardgrad


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


def batch(index: int, parts: Iterable[int]) -> torch.Tensor:
    seeds = [torch.Generator().manual_seed(100 * index + part) for part in parts]
    return torch.cat([torch.randn(4, 8, generator=seed) for seed in seeds])


def with_the_environment_of_a_launcher() -> nn.Module:
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    return net()


def _itself(
    model: nn.Module, run: Callable[[torch.Tensor], Any], *, max_norm: float = 0.1
) -> nn.Module:
    """Trains some steps, each rank on its own data, as a script does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        run(batch(index, [dist.get_rank()])).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
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
    numbers = {"norm": weights[0].norm().item(), "of this rank": dist.get_rank()}
    return {"numbers": numbers, "one": model, "other": model}


def needs_its_engine() -> nn.Module:
    model = fsdp2.fully_shard(net())
    model[0].weight.to_local()  # what plain parameters do not have
    return model


def seeded_by_rank() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    model = fsdp2.fully_shard(net())
    return _itself(model, model)


def unused_on_rank_1() -> nn.Module:
    model = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(8, 3)), nn.Linear(3, 3))
    return _itself(model, lambda x: model(x) if dist.get_rank() == 0 else model[0](x), max_norm=1e9)


def another_model_on_rank_1() -> nn.Module:
    model = shardgrad.fully_shard(nn.Linear(8, 3 + dist.get_rank() * _is_sharded()))
    return _itself(model, model)


def _is_sharded() -> bool:
    return shardgrad.fully_shard.__module__ == "shardgrad.fully_shard"


def rank_1_stays() -> nn.Module:
    if dist.get_rank() == 1:
        time.sleep(1000)
    return net()


def returns_a_list() -> Any:
    return {"norm": 2.0, "losses": [0.5]}


def broken() -> nn.Module:
    raise FileNotFoundError("data.bin")


a_number = 7
