"""Shardgrad, over gloo or on simulated devices."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import shardgrad
from shardgrad.engine import root
from shardgrad.sharding import zero_copy
from tests.fuzz.programs import net as nets
from tests.fuzz.programs.net import Net, Plan
from tests.fuzz.programs.program import Op, Program
from tests.fuzz.programs.script import Script, Seen

# What the engine has warned of on this thread, which stands for a rank.
_warned = threading.local()


@contextmanager
def noting_warnings() -> Iterator[None]:
    """Keeps what the engine warns of after a failed backward; `Sharded.lost` reads it."""

    def note(message: str, *_: Any, **__: Any) -> None:
        _warned.__dict__.setdefault("texts", []).append(message)

    with mock.patch.object(root, "warnings", SimpleNamespace(warn=note)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def zero_copy_as_in(program: Program) -> AbstractContextManager[object]:
    """Makes parameters travel by themselves, however small, if the program says so; for all
    threads.
    """
    least = 1 if program.sharding.zero_copy else zero_copy.ZERO_COPY_NBYTES
    return mock.patch.object(zero_copy, "ZERO_COPY_NBYTES", least)


class Sharded(Script):
    """A model that shardgrad shards.

    Args:
        program: what to do.
        rank: of this process or thread.
        build: makes the model on the CPU.
        device: "cpu" or "sim".
        call: runs a function in a stream.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        build: Callable[[Plan], Net],
        *,
        device: str = "cpu",
        call: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(program, rank, build)
        self._device = device
        self._steps: list[Any] = []
        if call is not None:
            self.plan.call = call
        self.make()

    # -- making

    def make(self) -> None:
        sharding = self.program.sharding
        self.net = self._build(self.plan)
        if self._device != "cpu":
            self.net.to(self._device)
            self.net.tie()
        options: dict[str, Any] = {
            "mesh": _mesh(self._device, sharding.mesh, self.program.ranks),
            "reshard_after_forward": sharding.reshard,
            "zero_stage": sharding.stage,
        }
        if sharding.param_dtype or sharding.reduce_dtype:
            options["mp_policy"] = MixedPrecisionPolicy(
                getattr(torch, sharding.param_dtype or "float64"),
                getattr(torch, sharding.reduce_dtype) if sharding.reduce_dtype else None,
            )
        if sharding.columns:
            ranks = self.program.ranks if sharding.mesh == "flat" else 2
            options["shard_placement_fn"] = lambda p: _columns(p, ranks)
        if sharding.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if sharding.wire_dtype:
            options["gradient_policy"] = shardgrad.GradientPolicy(
                wire_dtype=getattr(torch, sharding.wire_dtype)
            )
        for unit in nets.units(self.net):
            shardgrad.fully_shard(unit if len(unit) > 1 else unit[0], **options)
        self.units: list[Any] = [unit[0] for unit in nets.units(self.net)][::-1]  # the root first
        self.params = dict(self.net.named_parameters())
        is_flat = self.program.optimizer.library == "shardgrad"
        self.optimizer = self._make_optimizer(shardgrad.optim if is_flat else torch.optim)
        self._set_units()

    def _set_units(self) -> None:
        sharding = self.program.sharding
        if sharding.divide:
            for unit in self.units:
                unit.set_gradient_divide_factor(sharding.divide)
        if sharding.reductions:
            self.net.set_reduce_scatter_max_input_buffers(sharding.reductions)
        blocks: list[Any] = [b for b in self.net.blocks if isinstance(b, fsdp.FSDPModule)]
        if sharding.prefetch in ("forward", "both"):
            for i, block in enumerate(blocks[:-1]):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        if sharding.prefetch in ("backward", "both"):
            for i, block in enumerate(blocks[1:], start=1):
                block.set_modules_to_backward_prefetch(blocks[max(0, i - 2) : i][::-1])

    # -- what differs from plain torch

    def to_device(self, x: Tensor) -> Tensor:
        return x.to(self._device)

    def backward_of(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def gradients_of(self, loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(loss, inputs))

    def clip_ours(self, params: list[nn.Parameter] | None, max_norm: float) -> Tensor:
        return shardgrad.clip_grad_norm_(self.net if params is None else params, max_norm)

    def cut(self, value: Tensor) -> Tensor:
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()

    def skip_nan(self, op: Op) -> None:
        shardgrad.clip_grad_norm_(self.net, 0.1)
        self.optimizer.step()
        self.zero(op)

    def make_scaler(self, **options: Any) -> Any:
        return shardgrad.GradScaler(**options)

    def scale(self, scaler: Any) -> Any:
        if isinstance(scaler, shardgrad.GradScaler):
            return dict(scaler.buffers())["loss scale"].clone()
        return super().scale(scaler)

    def model_state(self) -> Mapping[str, Any]:
        return self.net.state_dict()

    def load_model(self, state: Mapping[str, Any]) -> None:
        self.net.load_state_dict(state)

    def lost(self) -> list[int]:
        """Returns the units of which the engine has said that gradients are gone, and forgets
        it.
        """
        texts: list[str] = _warned.__dict__.pop("texts", [])
        names = [unit._unit.name for unit in self.units] if texts else []
        gone: set[str] = set()
        for text in texts:
            _, is_named, rest = text.partition("In units ")
            gone.update(rest.partition(" they had been added")[0].split(", ") if is_named else ())
        return [i for i, name in enumerate(names) if gone.issuperset(name.split(", "))]

    # -- what only shardgrad has

    def participate(self, op: Op) -> Seen:
        self.plan.by_rank = True
        seen: Seen = {}
        try:
            with shardgrad.participate(self.net):
                if op.how == "all" or (self.rank + op.n) % 2 == 0:
                    loss, _ = self._loss(Op("train", op.n))
                    loss.backward()
                    seen = {"loss": loss.detach()}
        finally:
            self.plan.by_rank = False
        return seen

    def graphed(self, op: Op) -> Seen:
        """Steps of training in a graph; the first calls warm up."""
        if not self._steps or self._steps[-1][0] is not self.net:
            self._steps.append((self.net, self._graphed_step()))
        step = self._steps[-1][1]
        x = self._input(Op("train", 7))
        return {f"loss {i}": step(x).detach().clone() for i in range(op.n)}

    def _graphed_step(self) -> Any:
        net, optimizer = self.net, self.optimizer

        @shardgrad.graphed_step(net, optimizer, warmup=1)
        def step(x: Tensor) -> Tensor:
            loss = nets.loss_of(net(x), 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    def close(self) -> None:
        """Destroys graphs, which a process group has to outlive."""
        for _, step in self._steps:
            step.close()

    # -- settings

    def sync(self, op: Op) -> Seen:
        self.net.set_requires_gradient_sync(bool(op.n))
        return {}

    def sync_unit(self, op: Op) -> Seen:
        unit = self.units[op.n // 2 % len(self.units)]
        unit.set_requires_gradient_sync(bool(op.n % 2), recurse=False)
        return {}

    def all_reduce(self, op: Op) -> Seen:
        self.net.set_requires_all_reduce(bool(op.n))
        return {}

    def last(self, op: Op) -> Seen:
        self.net.set_is_last_backward(bool(op.n))
        return {}

    def keep(self, op: Op) -> Seen:
        """Keeps parameters unsharded after backward."""
        self.net.set_reshard_after_backward(not op.n)
        return {}

    def whole(self, op: Op) -> Seen:
        """Keeps parameters unsharded after forward."""
        self.net.set_reshard_after_forward(not op.n)
        return {}

    def unshard(self, op: Op) -> Seen:
        self.units[op.n % len(self.units)].unshard(async_op=op.how == "async")
        return {}

    def reshard(self, op: Op) -> Seen:
        self.units[op.n % len(self.units)].reshard()
        return {}


def _columns(param: nn.Parameter, ranks: int) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.shape[1] % ranks == 0 else None


@cache
def _gloo_mesh(kind: str, ranks: int) -> DeviceMesh:
    return _new_mesh("cpu", kind, ranks)


def _mesh(device: str, kind: str, ranks: int) -> DeviceMesh:
    # Virtual ranks have groups of their own in each program.
    return _gloo_mesh(kind, ranks) if device == "cpu" else _new_mesh(device, kind, ranks)


def _new_mesh(device: str, kind: str, ranks: int) -> DeviceMesh:
    shape = (ranks,) if kind == "flat" else (max(1, ranks // 2), min(2, ranks))
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
