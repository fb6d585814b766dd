"""What takes part in a graphed step, and what a graph has to know about it.

A graph repeats what a step launched. What the step launched was decided by Python, from facts of the host:
which parameters train, whether a gradient is there to be added to, whether a module is in training mode. So
whoever takes part tells its facts; a graph is replayed while they are what they were, and another one is
captured when they are not. And since a replay runs no Python, whoever takes part can put the host's side into
the state that the captured step left it in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardgrad.engine.grad_shard import GradFacts
from shardgrad.engine.param import Registration, managed_by
from shardgrad.engine.param_group import ParamGroup
from shardgrad.engine.replaced_params import adopt
from shardgrad.engine.root import RootContext, context_of
from shardgrad.engine.unit import units_under
from shardgrad.errors import CaptureError, OptionError
from shardgrad.optim.flat import FlatOptimizer
from shardgrad.optim.grad_scaler import GradScaler

__all__ = ["Capturable", "OutsideOptimizer", "capturable"]


class Capturable:
    """Something that a step uses and that has state. Subclass it for what is neither module nor optimizer."""

    def facts(self) -> Hashable:
        """Returns what is not fixed on the host and decides what a step launches. Called at every step."""
        return None

    def rest(self) -> None:
        """Leaves nothing half-done: called before a capture and at its end, inside it."""

    def broken_off(self) -> None:
        """Drops what a capture that failed has left on the host."""

    def hand_over(self) -> None:
        """Makes gradients what somebody outside may read: called inside a capture, before a cut."""

    def take_back(self) -> None:
        """Takes note that somebody outside may have written: called inside a capture, after a cut."""

    def image(self) -> Callable[[], None]:
        """Returns a function that puts the host's side back into its present state. Memory is not touched."""
        return _nothing

    def image_beyond_facts(self) -> Callable[[], None]:
        """Returns as `image` does; what `facts` tell need not be put back, since they will be as now."""
        return self.image()

    def replayed(self) -> None:
        """Takes note that a replay has changed what `tensors` returns."""

    def released(self) -> None:
        """Takes note that no graph depends on its facts any more."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the memory in which state lives from step to step, with names."""
        return iter(())

    def reports(self) -> dict[str, torch.Tensor]:
        """Returns device scalars that a progress display may want, by name."""
        return {}


def _nothing() -> None:
    pass


def capturable(value: Any) -> Capturable:
    """Returns `value` as a `Capturable`.

    Raises:
        OptionError: it is nothing that a step can have as state.
    """
    if isinstance(value, Capturable):
        return value
    if isinstance(value, nn.Module):
        return _Module(value)
    if isinstance(value, FlatOptimizer):
        return _FlatOptimizer(value)
    if isinstance(value, Optimizer):
        return _Optimizer(value)
    if isinstance(value, GradScaler):
        return _Scaler(value)
    if isinstance(value, torch.Generator):
        return Capturable()  # the graph itself knows it
    raise OptionError(
        f"graphed_step was given a {type(value).__name__}",
        expected="modules, optimizers, shardgrad.GradScaler, generators, or a shardgrad.graphs.Capturable",
        got=_hint(value),
        fix="graphed_step(model, optimizer)(function)",
    )


def _hint(value: Any) -> str:
    if isinstance(value, torch.amp.GradScaler):
        return "torch's GradScaler, which reads on the host whether to skip; shardgrad.GradScaler does not"
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return "a schedule; step it between calls, outside of the graph"
    if callable(value):
        return "a function, which goes into the second pair of parentheses"
    return repr(value)


_TRAINING = attrgetter("training")
_REQUIRES_GRAD = attrgetter("requires_grad")
_GRAD = attrgetter("grad")
_IS_LAST = attrgetter("is_last_backward")
_GRAD_SWITCHES = attrgetter("switches")
_CONTEXT = attrgetter("context")
_GENERATION = attrgetter("generation")
_GRAD_SHARD = attrgetter("shard")
_SWITCHES = attrgetter("reshard_after_forward", "reshard_after_backward", "unshard_in_backward")
_ADDRESS = torch.Tensor.data_ptr


class _Module(Capturable):
    """A module: sharded, plain, or a mixture."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = list(module.modules())
        self._look()

    def _look(self) -> None:
        """Finds what is in the module; units learn of their root in the first forward."""
        self._units = units_under(self._module)
        self._groups = [group for unit in self._units for group in unit.groups]
        _refuse_what_no_graph_repeats(self._groups)
        self._grad_groups = [grads for unit in self._units for grads in unit.grad_groups]
        self._made_of = self._identities()
        contexts = map(context_of, self._units)
        self._contexts: list[RootContext] = list(dict.fromkeys(c for c in contexts if c is not None))
        params = [p for group in self._groups for p in group.params]
        self._sharded = [p.sharded for p in params]
        whole = {id(each) for p in params for each in (p.unsharded, p.post_forward)}
        self._plain = [p for p in self._module.parameters() if managed_by(p) is None and id(p) not in whole]
        self._buffers = list(self._module.buffers())
        self._registration = Registration(params)
        shards = map(_GRAD_SHARD, self._grad_groups)
        self._gradients = GradFacts([shard for shard in shards if shard is not None])

    def _identities(self) -> tuple[list[Any], ...]:
        """Returns what `_look` has to be repeated for, if one of them is another."""
        return (
            list(map(_CONTEXT, self._units)),
            list(map(_GRAD_SHARD, self._grad_groups)),
            list(map(_GENERATION, self._groups)),
        )

    def facts(self) -> Hashable:
        """See `Capturable`."""
        with torch._C.DisableTorchFunctionSubclass():  # sharded parameters answer three times as fast
            return self._read()

    def _read(self) -> Hashable:
        if not self._registration.holds():
            for group in self._groups:
                adopt(group)
        if self._identities() != self._made_of:
            self._look()
        return (
            tuple(map(_REQUIRES_GRAD, self._sharded)),
            tuple(map(_REQUIRES_GRAD, self._plain)),
            tuple(map(id, map(_GRAD, self._plain))),
            tuple(map(_ADDRESS, self._plain)),
            tuple(map(_ADDRESS, self._buffers)),
            tuple(map(_GENERATION, self._groups)),
            self._gradients.read(),
            self._switches(),
        )

    def _switches(self) -> tuple[Any, ...]:
        """Returns what a step may set, besides gradients."""
        return (
            tuple(map(_TRAINING, self._modules)),
            tuple(map(_SWITCHES, self._units)),
            tuple(map(_IS_LAST, self._contexts)),
            tuple(map(_GRAD_SWITCHES, self._grad_groups)),
        )

    def _set_switches(self, switches: tuple[Any, ...]) -> None:
        training, of_units, is_last, states = switches
        for module, flag in zip(self._modules, training, strict=True):
            module.training = flag
        for unit, (after_forward, after_backward, in_backward) in zip(self._units, of_units, strict=True):
            unit.reshard_after_forward = after_forward
            unit.reshard_after_backward = after_backward
            unit.unshard_in_backward = in_backward
        for context, flag in zip(self._contexts, is_last, strict=True):
            context.is_last_backward = flag
        for grads, state in zip(self._grad_groups, states, strict=True):
            grads.switches = state

    def rest(self) -> None:
        """See `Capturable`, and [Note: The border of a capture] in `engine/streams.py`."""
        for context in self._contexts:
            context.quiesce()
            context.comm_ctx.streams.forget_events()

    def broken_off(self) -> None:
        """See `Capturable`."""
        for context in self._contexts:
            context.comm_ctx.streams.forget_events()
            context.recover()

    def hand_over(self) -> None:
        """See `Capturable`."""
        for grads in self._grad_groups:
            if grads.shard is not None:
                grads.shard.pay()

    def take_back(self) -> None:
        """See `Capturable`."""
        for context in self._contexts:
            context.parameters_written()

    def image(self) -> Callable[[], None]:
        """See `Capturable`."""
        gradients = [(p, p.grad) for p in self._plain]
        shards = [grads.shard for grads in self._grad_groups if grads.shard is not None]
        bindings = [(shard, shard.binding()) for shard in shards]
        switches = self._switches()

        def restore() -> None:
            for param, grad in gradients:
                if param.grad is not grad:
                    param.grad = grad
            for shard, binding in bindings:
                shard.rebind(binding)
            if self._switches() != switches:
                self._set_switches(switches)

        return restore

    def image_beyond_facts(self) -> Callable[[], None]:
        """See `Capturable`."""
        restore, gradients, pending = self.image(), self._gradients, self._gradients.pending()

        def restore_pending() -> None:
            if not all(map(is_, gradients.pending(), pending)):
                restore()

        return restore_pending

    def reports(self) -> dict[str, torch.Tensor]:
        """See `Capturable`. A parameter counts as touched if any rank had a gradient for it."""
        flags = [grads.shard.flags for grads in self._grad_groups if grads.shard is not None]
        return {"touched parameters": torch.cat([f > 0 for f in flags]).sum()} if flags else {}

    def replayed(self) -> None:
        """See `Capturable`. Parameters that somebody keeps whole are stale now, as after a backward."""
        for group in self._groups:
            group.steps_taken += 1
            group.reshard(drop_kept=True)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Capturable`."""
        for name, param in self._module.named_parameters():
            if managed_by(param) is None:
                yield name, param.detach()
                if param.grad is not None:
                    yield f"gradient of {name}", param.grad
        yield from self._module.named_buffers()
        for group, grads in zip(self._groups, self._grad_groups, strict=True):
            yield f"shard of {group.name}", group.shard
            shard = grads.shard
            if shard is not None:
                yield f"gradient shard of {group.name}", shard.flat
                if shard.owed is not None:
                    yield f"factor that gradients of {group.name} owe", shard.owed
            for what, buffer in grads.buffers().items():
                yield f"{what} of {group.name}", buffer


def _refuse_what_no_graph_repeats(groups: Iterable[ParamGroup]) -> None:
    for group in groups:
        where = f"unit {group.name}" if group.name else None
        if group.shard_memory.is_offloaded:
            raise CaptureError(
                "CPUOffloadPolicy and graphed_step exclude each other: the optimizer runs on the host, which "
                "no graph repeats",
                expected=f"shards on {group.mesh.device}",
                got=f"shards on {group.shard_memory.device}",
                where=where,
                fix="offload_policy=OffloadPolicy(), or call the step without graphed_step",
            )
        if not group.is_flat:
            raise CaptureError(
                "a parameter with fsdp_pre_all_gather cannot be in a graphed step: what its methods decide "
                "in Python, and memory they keep to themselves, no graph repeats",
                expected="parameters without all-gather extensions",
                got=", ".join(param.name for param in group.params),
                where=where,
                fix="call the step without graphed_step",
            )


class _FlatOptimizer(Capturable):
    """One of `shardgrad.optim`: whatever can change is in device memory."""

    def __init__(self, optimizer: FlatOptimizer) -> None:
        self._optimizer = optimizer

    def facts(self) -> Hashable:
        """See `Capturable`."""
        return self._optimizer.facts()

    def image(self) -> Callable[[], None]:
        """See `Capturable`."""
        return self._optimizer.image()

    def released(self) -> None:
        """See `Capturable`."""
        self._optimizer.forget_captures()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Capturable`."""
        for what, tensor in self._optimizer.buffers():
            yield f"{what} of {type(self._optimizer).__name__}", tensor

    def reports(self) -> dict[str, torch.Tensor]:
        """See `Capturable`."""
        return {"skipped steps": self._optimizer.skipped_steps}


class _Optimizer(Capturable):
    """Any other optimizer. Numbers in its groups are constants of a graph, and so facts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def facts(self) -> Hashable:
        """See `Capturable`."""
        numbers = tuple(
            (key, _fixed(value))
            for group in self._optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        )
        members = tuple(len(group["params"]) for group in self._optimizer.param_groups)
        return numbers, members, tuple(tensor.data_ptr() for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Capturable`."""
        for number, of in enumerate(self._optimizer.state.values()):
            for key, value in of.items():
                if isinstance(value, torch.Tensor):
                    local = getattr(value, "_local_tensor", value)
                    yield f"{key} of parameter {number} of {type(self._optimizer).__name__}", local


def _fixed(value: Any) -> Hashable:
    """Returns what a graph has of a hyperparameter: a number itself, of a tensor the address."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value if isinstance(value, Hashable) else repr(value)


class OutsideOptimizer(_Optimizer):
    """An optimizer whose steps run between the pieces of a graph: nothing about it has to be fixed."""

    def facts(self) -> Hashable:
        """See `Capturable`."""
        return None


class _Scaler(Capturable):
    """`shardgrad.GradScaler`."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    def facts(self) -> Hashable:
        """See `Capturable`."""
        return self._scaler.facts()

    def image(self) -> Callable[[], None]:
        """See `Capturable`."""
        return self._scaler.image()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Capturable`."""
        return self._scaler.buffers()

    def reports(self) -> dict[str, torch.Tensor]:
        """See `Capturable`."""
        return {name: tensor for name, tensor in self._scaler.buffers() if name == "loss scale"}
