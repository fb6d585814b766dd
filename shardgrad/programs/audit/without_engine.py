"""A program without its engine: each rank keeps the whole model, and gradients are averaged.

What shards or replicates a model is replaced, before the program is imported: DDP, FSDP1, FSDP2,
DeepSpeed's engine, and this project's. What stands in has their methods, leaves the model as it is,
and averages gradients with plain all-reduces: at the end of each backward, and again when an
optimizer steps, of all parameters it holds. A mean of means is the mean, so that `no_sync` and the
number of micro-batches do not matter, and what an engine does not see is averaged too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.autograd import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_params: dict[nn.Parameter, None] = {}  # of all models, in the order that all ranks wrap them in
_is_queued = False


def remove_engines() -> None:
    """Replaces engines in this process, for good; call it before the program is imported."""
    import shardgrad

    for module in (nn.parallel, nn.parallel.distributed, torch.distributed.fsdp):
        for name in ("DistributedDataParallel", "FullyShardedDataParallel"):
            if hasattr(module, name):
                setattr(module, name, _Wrapper)
    for module in (torch.distributed.fsdp, shardgrad):
        setattr(module, "fully_shard", _fully_shard)  # noqa: B010  (for mypy)
    setattr(shardgrad, "graphed_step", lambda *_, **__: lambda step: step)  # noqa: B010
    setattr(shardgrad, "participate", _nothing)  # noqa: B010
    if find_spec("deepspeed") is not None:
        deepspeed: Any = import_module("deepspeed")
        deepspeed.initialize = _initialize
        deepspeed.zero.GatheredParameters = _nothing
    register_optimizer_step_pre_hook(_before_step)


# -- gradients


def _take(model: nn.Module) -> None:
    """Gives all ranks the values of rank 0, and averages the model's gradients from now on."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)
    for param in model.parameters():
        if param not in _params:
            _params[param] = None
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(_after_backward)


def _after_backward(_: torch.Tensor) -> None:
    global _is_queued
    if not _is_queued:
        _is_queued = True
        Variable._execution_engine.queue_callback(_average_all)


def _average_all() -> None:
    global _is_queued
    _is_queued = False
    _average(_params)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    _average(param for group in optimizer.param_groups for param in group["params"])


def _average(params: Iterable[torch.Tensor]) -> None:
    for param in params:
        has = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has)
        if has:
            mean = torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
            dist.all_reduce(mean)
            param.grad = mean.div_(dist.get_world_size())


# -- what stands in


@contextmanager
def _nothing(*_: Any, **__: Any) -> Any:
    yield


class _Wrapper(nn.Module):
    """Stands in for DDP and FSDP1."""

    summon_full_params = staticmethod(_nothing)
    state_dict_type = staticmethod(_nothing)

    def __init__(self, module: nn.Module, *_: Any, **__: Any) -> None:
        super().__init__()
        self.module = module
        _take(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Handle:
    def wait(self) -> None:
        """Nothing is on its way."""


def _fully_shard(module: Any, **_: Any) -> Any:
    """Stands in for `fully_shard`."""
    for each in module if isinstance(module, (list, tuple)) else [module]:
        _take(each)
        each.__class__ = type(f"FSDP{type(each).__name__}", (type(each),), _methods())
    return module


def _methods() -> dict[str, Callable[..., _Handle]]:
    """Returns the methods of a sharded module, which do nothing."""
    from shardgrad import FSDPModule

    public = {*vars(torch.distributed.fsdp.FSDPModule), *vars(FSDPModule)}
    return {name: lambda *_, **__: _Handle() for name in public if not name.startswith("_")}


class _Engine(_Wrapper):
    """Stands in for DeepSpeed's engine, which steps with the last of `accumulated` micro-batches,
    or where it is told to.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, accumulated: int) -> None:
        super().__init__(module)
        self.optimizer, self._accumulated = optimizer, accumulated
        self._steps = 0
        self._is_boundary: bool | None = None

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._is_boundary = is_boundary

    def backward(self, loss: torch.Tensor, **options: Any) -> torch.Tensor:
        (loss / self._accumulated).backward(**options)
        return loss

    def step(self) -> None:
        self._steps += 1
        is_last = self._steps % self._accumulated == 0
        if is_last if self._is_boundary is None else self._is_boundary:
            self.optimizer.step()
            self.optimizer.zero_grad()


def _initialize(
    *_: Any, model: nn.Module, optimizer: Optimizer, config: Any = None, **__: Any
) -> tuple[_Engine, Optimizer, None, None]:
    """Stands in for `deepspeed.initialize`."""
    settings = config if isinstance(config, dict) else {}
    engine = _Engine(model, optimizer, int(settings.get("gradient_accumulation_steps", 1)))
    return engine, optimizer, None, None
