"""Shardgrad, over gloo, on simulated devices or on a GPU."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
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
from shardgrad.sharding import zero_copy
from tests.fuzz.programs import net as nets
from tests.fuzz.programs.net import FuzzBlock
from tests.fuzz.programs.program import Op, Program
from tests.fuzz.programs.script import PARTIAL, Script, Seen
from tests.fuzz.programs.streams import Streams

# What the engine has warned of on this thread, which stands for a rank.
_warned = threading.local()


@contextmanager
def noting_warnings() -> Iterator[None]:
    """Keeps what the engine warns of after a failed backward; `Sharded.lost` reads it."""

    def note(message: str, *_: Any, **__: Any) -> None:
        _warned.__dict__.setdefault("texts", []).append(message)

    noting = mock.patch("shardgrad.engine.unit.warnings", SimpleNamespace(warn=note))
    with noting, warnings.catch_warnings():
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
        graphs: False runs what a graph stands for eagerly.
    """

    libraries = {"torch": torch.optim, "shardgrad": shardgrad.optim}  # noqa: RUF012
    skips_nan = True

    def __init__(self, program: Program, rank: int, *, graphs: bool = True) -> None:
        super().__init__(program, rank)
        self._graphs = graphs
        self._device, self._streams = program.device, None
        self._steps: dict[Any, Any] = {}
        self._given: list[Tensor] | None = None  # inputs, in a graph
        self._updated: torch.Event | None = None
        # At each layer of a forward and a backward, which parameters modules show whole.
        self.shown: list[str] = []
        self._batches: dict[int, Tensor] = {}
        if program.on_device:
            self.plan.streams = self._streams = Streams(torch.accelerator.current_stream().device)
        self.make()

    # -- making

    def make(self) -> None:
        sharding = self.program.sharding
        self.net = nets.build(self.program, self.plan)
        if self._device != "cpu":
            self.net.to(self._device)
            self.net.tie()
        originals = list(self.net.parameters())  # which outlive the copies that are made of them
        self._nodes: list[Any] = []
        options: dict[str, Any] = {
            "mesh": _mesh(self._device, sharding.mesh, self.program.ranks),
            "reshard_after_forward": sharding.reshard,
            "zero_stage": sharding.stage,
            "comm": "symmetric_memory" if sharding.windows else "collectives",
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
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device != "cpu")
        if sharding.wire_dtype or sharding.gradients:
            policy = shardgrad.GradientPolicy(
                wire_dtype=getattr(torch, sharding.wire_dtype) if sharding.wire_dtype else None,
                **dict.fromkeys([sharding.gradients] if sharding.gradients else [], True),
            )
            options["gradient_policy"] = policy
            self.gradient = policy.attribute
        for unit in nets.units(self.net):
            if unit[0] is self.net and sharding.offload == "blocks":
                del options["offload_policy"]
            place = unit[0].block.stream if isinstance(unit[0], FuzzBlock) else 0
            whole = unit if len(unit) > 1 else unit[0]
            self.plan.streams.call(place, partial(self.fully_shard, whole, **options))
        self.units: list[Any] = [unit[0] for unit in nets.units(self.net)][::-1]  # the root first
        self.params = dict(self.net.named_parameters())
        self.optimizer = self.make_optimizer()
        self._set_units()
        for name, layer in self.net.named_modules() if sharding.reshard is not None else ():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(partial(self._watch, name))
        for op in self.program.ops:
            for call in range(op.n if op.do == "graphed" else 1):
                for each in op.inside if op.do == "graphed" else (op,):
                    self.batch(each.n + (PARTIAL if each.do == "partial" else 10 * call))
        if self._device != "cpu":
            # From here on only the engine's first step, and what it refuses, make the host wait.
            torch.accelerator.synchronize()
        del originals

    def fully_shard(self, unit: Any, **options: Any) -> None:
        shardgrad.fully_shard(unit, **options)

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

    def _watch(self, name: str, layer: nn.Module, args: Any, output: Tensor) -> None:
        def note(when: str, *_: Tensor) -> None:
            whole = [n for n, p in self.net.named_parameters() if not isinstance(p, DTensor)]
            self.shown.append(f"{when} of {name}: {', '.join(whole)}")

        note("forward")
        # Not a hook of the output: here, not under FSDP2, a root's parameters are whole in those.
        if output.grad_fn:
            output.grad_fn.register_prehook(partial(note, "backward"))

    # -- what differs from plain torch

    def batch(self, number: int) -> Tensor:
        """Returns a batch; all are on the device from the beginning, as a copy makes hosts wait."""
        if number not in self._batches:
            self._batches[number] = super().batch(number).to(self._device)
        return self._batches[number].detach()

    def before_forward(self) -> None:
        """Makes the nodes that accumulate gradients, each in its stream; forward finds them."""
        self._nodes.clear()
        if self._streams is None or self._given is not None:
            return
        for unit in self.units:
            place = unit.block.hooks if isinstance(unit, FuzzBlock) else -1
            groups = unit._unit.grad_groups if place >= 0 else ()
            whole = [param.unsharded for group in groups for param in group.params]
            with self._streams.at(max(place, 0)):
                self._nodes += [
                    torch.autograd.graph.get_gradient_edge(param).node
                    for param in whole
                    if param is not None and param.requires_grad
                ]

    def backward_of(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def gradients_of(self, loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        gradients = list(torch.autograd.grad(loss, inputs))
        if self._streams is not None:
            # They lie in the memory of the streams that forward ran in, as in plain torch, and may
            # be added to in any.
            for gradient in gradients:
                for stream in self._streams.known:
                    gradient.record_stream(stream)
        return gradients

    def clip_ours(self, params: list[nn.Parameter] | None, max_norm: float) -> Tensor:
        return shardgrad.clip_grad_norm_(self.net if params is None else params, max_norm)

    def cut(self, value: Tensor) -> Tensor:
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()

    def kept(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state

    def make_scaler(self, **options: Any) -> Any:
        return shardgrad.GradScaler(**options)

    def scale(self, scaler: Any) -> Any:
        if isinstance(scaler, shardgrad.GradScaler):
            return dict(scaler.buffers())["loss scale"].clone()
        return super().scale(scaler)

    def model_state(self) -> Mapping[str, Any]:
        return self.net.state_dict()

    def load_model(self, state: Mapping[str, Any], *, assign: bool = False) -> None:
        self.net.load_state_dict(state, assign=assign)
        self.params = dict(self.net.named_parameters())

    def cast(self, op: Op) -> Seen:
        self.net.to(getattr(torch, op.how)).double()
        return {}

    def lost(self) -> list[int]:
        """Returns the units of which the engine has said that gradients are gone, and forgets
        it.
        """
        texts: list[str] = _warned.__dict__.pop("texts", [])
        names = [unit._unit.name for unit in self.units] if texts else []
        gone: set[str] = set()
        for text in texts:
            _, is_named, rest = text.partition("In units ")
            gone.update(rest.partition(", they had been added")[0].split(", ") if is_named else ())
        return [i for i, name in enumerate(names) if gone.issuperset(name.split(", "))]

    # -- streams

    def move(self, op: Op) -> Seen:
        if self._streams is not None:
            self._streams.shift = op.n
        return {}

    def step(self, op: Op) -> Seen:
        chosen = self.program.optimizer
        if self._streams is None or self._given is not None or not chosen.event:
            self.plan.streams.call(chosen.stream, lambda: self.optimizer.step())
            return {}
        stream, self._updated = self._streams.at(chosen.stream), torch.Event(self._device)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            self.optimizer.step()
            self._updated.record()
        self.net.set_post_optim_event(self._updated)
        return {}

    def called(self, op: Op) -> Seen:
        """Does an operation in the stream of the caller."""
        return self.plan.streams.call(self.program.model.caller, partial(self.do, op))

    def do(self, op: Op) -> Seen:
        if self._updated is not None and (
            op.do not in ("forward", "train", "zero", "move", "graphed")
            or (op.how and op.do != "graphed")
        ):
            torch.accelerator.current_stream().wait_event(self._updated)
        return super().do(op)

    def edit(self, op: Op) -> Seen:
        self._keep_state()
        return super().edit(op)

    def renew(self, op: Op) -> Seen:
        self._keep_state()
        return super().renew(op)

    def _keep_state(self) -> None:
        """Tells the allocator that this stream comes after all uses of the state, which is dropped
        next: torch's lies in memory of the stream of its first step.
        """
        for values in self.optimizer.state.values() if self._streams is not None else ():
            for value in values.values():
                local = value.to_local() if isinstance(value, DTensor) else value
                if isinstance(local, Tensor) and local.device.type != "cpu":
                    local.record_stream(torch.accelerator.current_stream(local.device))

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

    def call_graph(self, inside: tuple[Op, ...]) -> Seen:
        """Calls the graph of these operations; its first call warms up."""
        inputs = [self._input(op) for op in inside if op.do in ("train", "evaluate", "scaled")]
        if not self._graphs:
            return self._do_inside(inside, inputs)
        key = self.net, self.optimizer, inside, *sorted(self.plan.skipped)
        if key not in self._steps:
            scalers = [self._scaler(False) for op in inside if op.do == "scaled"][:1]
            graphed = shardgrad.graphed_step(self.net, self.optimizer, *scalers, warmup=1)
            self._steps[key] = graphed(partial(self._do_inside, inside))
        return self._steps[key](inputs)

    def _do_inside(self, inside: tuple[Op, ...], inputs: list[Tensor]) -> Seen:
        self._given = list(inputs)
        try:
            return super().call_graph(inside)
        finally:
            self._given = None

    def _input(self, op: Op) -> Tensor:
        if self._given is None:
            return super()._input(op)
        self.plan.micro = op.n
        return self._given.pop(0)

    @property
    def captures(self) -> int:
        """Returns how many graphs there are."""
        return sum(step.captures for step in self._steps.values())

    def close(self) -> None:
        """Destroys graphs, which a process group has to outlive."""
        for step in self._steps.values():
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

    def divide(self, op: Op) -> Seen:
        unit = self.units[op.n // 2 % len(self.units)]
        unit.set_gradient_divide_factor((1.0, 3.0)[op.n % 2])
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


class OfFSDP2(Sharded):
    """A model that FSDP2 shards."""

    def fully_shard(self, unit: Any, **options: Any) -> None:
        del options["zero_stage"], options["comm"]
        fsdp.fully_shard(unit, **options)


def _columns(param: nn.Parameter, ranks: int) -> Shard | None:
    return Shard(1) if param.ndim == 2 and param.shape[1] % ranks == 0 else None


def _mesh(device: str, kind: str, ranks: int) -> DeviceMesh:
    # Virtual ranks have groups of their own in each program.
    return (_new_mesh if device == "sim" else _kept_mesh)(device, kind, ranks)


@cache
def _kept_mesh(device: str, kind: str, ranks: int) -> DeviceMesh:
    return _new_mesh(device, kind, ranks)


def _new_mesh(device: str, kind: str, ranks: int) -> DeviceMesh:
    shape = (ranks,) if kind == "flat" else (max(1, ranks // 2), min(2, ranks))
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
