"""Looking at a live model: plain, wrapped by another engine, or sharded by FSDP2 or here."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardgrad.engine.root import unit_of
from shardgrad.migration.advice import Advice

__all__ = ["examine"]

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def examine(model: nn.Module) -> list[Advice]:
    """Returns what would change if this model were sharded here.

    Nothing is changed and nothing communicated: it can be called on one rank, on meta, before or after
    another engine has had the model.
    """
    return [*_wrappers(model), *_ties(model), *_parameters(model)]


def _wrappers(model: nn.Module) -> Iterator[Advice]:
    for name, module in model.named_modules():
        where = name or "the model"
        if isinstance(module, DistributedDataParallel):
            yield Advice(where, "change", "wrapped by DistributedDataParallel", "shard module.module instead")
        elif isinstance(module, torch_fsdp.FullyShardedDataParallel):
            yield Advice(where, "change", "wrapped by FSDP1", "build it again, and shard each block")
        elif unit_of(module) is None and isinstance(module, torch_fsdp.FSDPModule):
            yield Advice(where, "change", "sharded by FSDP2", "one engine for a model: build it again")


def _ties(model: nn.Module) -> Iterator[Advice]:
    users: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                users.setdefault(param, []).append(f"{name}.{attribute}" if name else attribute)
    for names in users.values():
        if len(names) > 1:
            yield Advice(
                names[0],
                "check",
                f"tied: {', '.join(names)}",
                "works; the closest unit that holds all of them owns it",
            )


def _parameters(model: nn.Module) -> Iterator[Advice]:
    for name, param in model.named_parameters():
        if param.dtype not in _FLOATING:
            yield Advice(
                name, "change", f"has dtype {param.dtype}", "pass it in ignored_params, or make it a buffer"
            )
        elif param.ndim == 0:
            yield Advice(name, "change", "is a scalar", "give it shape (1,)")
        elif not param.is_contiguous():
            yield Advice(name, "change", "is not contiguous", "param.data = param.data.contiguous()")
