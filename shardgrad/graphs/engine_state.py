"""The engine's side of the capture protocol: adapters for sharded models, their optimizers and loss
scaler.

This is the only file of `graphs/` that knows parameter groups, gradient shards and the root
context.

[Note: Gradients in a graph's pool]
If gradients are None both when a graph begins and when it ends, their memory
([Note: Memory of gradients] in `engine/grad_shard.py`) is allocated inside the capture and freed at
its end. It then lies in the graph's memory pool, like that of activations, and other graphs do not
use its address. Gradients that exist at a border of a graph, where it begins, ends, or is split,
need memory that no other graph of the pool uses. If they exist when a capture begins, or existed at
a border in an eager call before it, their memory is fixed before the capture. If a capture
nevertheless finds gradients in its own memory at a border, it is dropped (`CaptureAgain`) and the
call runs eagerly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from itertools import chain, repeat, starmap
from operator import attrgetter, getitem, is_, is_not
from typing import Any

import torch
from torch import nn

from shardgrad.engine.grad_group import SWITCHES, ReductionSettings
from shardgrad.engine.grad_shard import GradMemory, GradShard
from shardgrad.engine.param_group import SHARDED, Registration, fsdp_param_of
from shardgrad.engine.replaced_params import adopt
from shardgrad.engine.streams import is_capturing
from shardgrad.engine.unit import RootContext, require_awake, units_under
from shardgrad.errors import CaptureError
from shardgrad.graphs.capturable import KEPT, Capturable, CaptureAgain, capturable, nothing
from shardgrad.graphs.closed_over import ADDRESS
from shardgrad.optim.flat import FlatOptimizer
from shardgrad.optim.grad_scaler import GradScaler
from shardgrad.sharding.dtensor import local_of

# Guards are read at every call for every parameter. These make each of them one pass in C.
_REQUIRES_GRAD = attrgetter("requires_grad")
_GRAD = attrgetter("grad")
_CONTEXT = attrgetter("context")
_MEMORY = attrgetter("memory")
_WAITING = attrgetter("sums", "partial.tensor")
_END = (object(),)


class ModuleState(Capturable):
    """A module whose parameters are sharded, plain, or both.

    Args:
        module: the model, or a part of it.

    Raises:
        CaptureError: `fully_shard` was given options that exclude graphs.
    """

    is_guarded = True

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The shards that had memory before the present capture; None outside of captures. See
        # [Note: Gradients in a graph's pool].
        self._with_memory: set[GradShard] | None = None
        # `requires_grad` of `_trainable` at the beginning of this call, and at the latest border.
        self._trains: tuple[bool, ...] = ()
        self._trains_now: tuple[bool, ...] = ()
        self._collect()

    def _collect(self) -> None:
        """Collects the objects that guards and snapshots read."""
        self._units = units_under(self._module)
        self._groups = [group for unit in self._units for group in unit.groups]
        for group in self._groups:
            if group.shard_memory.is_offloaded:
                raise CaptureError(
                    "graphed_step does not support CPUOffloadPolicy: the optimizer runs on the "
                    "host, and a graph repeats only device work",
                    expected=f"shards on {group.mesh.device}",
                    got=f"shards on {group.shard_memory.device}",
                    where=group.where,
                    fix="offload_policy=OffloadPolicy(), or call the step without graphed_step",
                )
        self._grad_groups = [grads for unit in self._units for grads in unit.grad_groups]
        self._contexts: list[RootContext] = list(
            dict.fromkeys(filter(None, map(_CONTEXT, self._units)))
        )
        params = [p for group in self._groups for p in group.params]
        self._plain = [p for p in self._module.parameters() if fsdp_param_of(p) is None]
        self._sharded = [p.sharded for p in params]
        self._attributes = [p.group.gradient_policy.attribute for p in params]
        self._trainable = [*self._sharded, *self._plain]
        self._addressed = [*self._plain, *self._module.buffers()]
        self._registration = Registration(params)
        # Nothing of a TorchScript module can be replaced, and it has no dictionaries.
        self._modules = tuple(
            [m for m in self._module.modules() if not isinstance(m, torch.jit.ScriptModule)]
        )
        # Other host state that a step may set: (dictionary, key) of each value.
        of_unit = "reshard_after_forward", "reshard_after_backward", "unshard_in_backward"
        switches: Any = (
            (self._modules, ("training",)),
            (self._units, of_unit),
            ([unit.reductions for unit in self._units], vars(ReductionSettings())),
            (self._grad_groups, SWITCHES),
            ([grads.partial for grads in self._grad_groups], ("is_live",)),
            (self._contexts, ("is_last_backward",)),
        )
        self._switches = [
            (vars(one), name) for owners, names in switches for one in owners for name in names
        ]
        # The dictionaries that register submodules, buffers, and parameters that are not sharded.
        # Most of a large model's are empty, and are only asked whether they still are.
        self._registers: list[dict[str, Any]] = []
        self._empty: list[dict[str, Any]] = []
        plain = set(map(id, self._plain))
        for module in self._modules:
            for register in (module._modules, module._buffers, module._parameters):
                if not register:
                    self._empty.append(register)
                elif register is not module._parameters or plain & set(map(id, register.values())):
                    self._registers.append(register)
        self._collected_from = list(self._origins())
        self._generations = tuple([group.generation for group in self._groups])

    def _follow(self) -> None:
        """Adopts parameters that the program has replaced, and collects again if any object that
        `_collect` starts from is another one.
        """
        is_in_place = self._registration.holds()
        if not is_in_place:
            for group in self._groups:
                adopt(group)
        is_alike = is_in_place and not any(self._empty)
        if not (is_alike and all(map(is_, self._origins(), self._collected_from))):
            self._collect()

    def _origins(self) -> Iterator[Any]:
        """Yields the objects that `_collect` starts from. They change when the program replaces
        modules, buffers, or parameters that are not sharded, and when units get their root context
        in the first forward. `_END` comes last, so that sequences of different lengths compare
        unequal.
        """
        registered = chain.from_iterable(map(dict.values, self._registers))
        return chain(registered, map(_CONTEXT, self._units), _END)

    def guards(self) -> Hashable:
        """See `Capturable`."""
        shards = self._shards()
        if GradMemory.FREEABLE in map(_MEMORY, shards):  # after an eager call
            for context in self._contexts:
                context.free_gradients()
            self.at_eager_border()  # gradients that exist now: a capture would use their addresses
        with torch._C.DisableTorchFunction():  # makes DTensor attributes 3 times as fast
            grads = [None if g is None else g.data_ptr() for g in map(_GRAD, self._plain)]
            bound = self._bound()
            # A shard without memory has neither live flags nor a verdict.
            memory = [s.memory is not GradMemory.NONE and _memory_of(s) for s in shards]
            # Gradients that wait get other memory when parameters get other places.
            waiting = chain.from_iterable(map(_WAITING, self._grad_groups))
            return (
                ("modules", self._modules),
                ("replaced parameters", self._generations),
                ("requires_grad", self._trains_now),
                ("addresses", *[tuple(map(read, self._addressed)) for read in ADDRESS]),
                ("gradients", tuple(grads), bound),
                ("memory of gradients", tuple(memory)),
                ("memory of sums", tuple(map(torch.Tensor.data_ptr, waiting))),
                ("switches", *starmap(getitem, self._switches)),
            )

    def _bound(self) -> Hashable:
        """Copies gradients that the program has assigned into the shards, and updates live flags.

        Returns:
            Which gradients exist; () if none does, as after `zero_grad()`.
        """
        # In one pass, as most programs set all gradients to None before the next call.
        if not any(map(is_not, map(getattr, self._sharded, self._attributes), repeat(None))):
            return ()
        return tuple([tuple(shard.settle()) for shard in self._shards()])

    def quiesce(self) -> None:
        """See `Capturable`, and [Note: The border of a capture] in `engine/streams.py`."""
        for context in self._contexts:
            context.join_post_optim_event()
        for context in self._contexts:
            context.quiesce()
            context.comm_ctx.streams.forget_events()
        self._bound()  # in a capture, so that replays do it, too
        self._refuse_replaced()
        self._note_requires_grad()
        for shard in self._allocated_in_capture():
            if not shard.are_absent():
                raise CaptureAgain(
                    "gradients exist at a border of a graph, in memory that the graph owns"
                )
            # Inside the capture, the memory may still be in use.
            if not is_capturing(shard.flat.device):
                shard.free(shard.current_stream())

    def _refuse_replaced(self) -> None:
        """Called at a border of a graph. Refuses a step that has replaced registered objects, which
        a replay would not do.
        """
        now = chain.from_iterable(map(dict.items, chain(self._empty, self._registers)))
        for (name, one), old in zip(now, self._collected_from, strict=False):
            if one is not old:
                raise CaptureError(
                    f"the step replaces {name}, which a replay would not do",
                    fix=f"write buffers in place: self.{name}.copy_(...); "
                    "replace parameters and modules between calls",
                )

    def _allocated_in_capture(self) -> list[GradShard]:
        known = self._with_memory
        if known is None:
            return []
        return [shard for shard in self._shards() if shard.has_memory and shard not in known]

    def abort_capture(self) -> None:
        """See `Capturable`."""
        for context in self._contexts:
            context.comm_ctx.streams.forget_events()
            context.post_optim_event = None  # one that is set was recorded in the capture
            context.abort()
        for shard in self._allocated_in_capture():
            shard.unbind()
            shard.free(shard.current_stream())

    def after_eager_region(self) -> None:
        """See `Capturable`."""
        for context in self._contexts:
            # The root's forward notes a border, but the next graph may contain only a backward.
            context.crosses_border()
            context.parameters_written()

    def begin_call(self) -> str:
        """See `Capturable`."""
        self._with_memory = None
        for context in self._contexts:
            require_awake(context.units)
        self._follow()
        for group in self._groups:
            if group.in_flight or group.state is not SHARDED:
                group.cancel_unshard()  # a replay writes the shard that it reads
                group.show_sharded()  # a replay reads there what unsharded parameters were set to
        for context in self._contexts:
            context.join_post_optim_event()
        self._note_requires_grad()
        before, self._trains = self._trains, self._trains_now
        # Gradients may get other places, whose tables are copied from the host.
        return "" if before == self._trains else "requires_grad changed before an earlier call"

    def _note_requires_grad(self) -> None:
        with torch._C.DisableTorchFunction():  # makes DTensor attributes 3 times as fast
            self._trains_now = tuple(map(_REQUIRES_GRAD, self._trainable))

    def at_eager_border(self) -> None:
        """See `Capturable`."""
        for shard in self._shards():
            if shard.memory is GradMemory.FREEABLE and not shard.are_absent():
                shard.memory = GradMemory.FIXED

    def before_replays(self) -> Callable[[], bool]:
        """See `Capturable`."""
        self._with_memory = {shard for shard in self._shards() if shard.has_memory}
        overwritten = defaultdict[GradShard, set[int]](set)  # filled by the capture

        def note(shard: GradShard, before: list[int], places: list[int]) -> None:
            overwritten[shard].update(places)
            # What only the step keeps is gone after it, but each replay would overwrite it.
            if not set(places).isdisjoint(set(shard.kept_places()).difference(before)):
                raise CaptureAgain(KEPT)

        for shard in self._shards():
            shard.on_overwrite = partial(note, shard, shard.kept_places())
        return lambda: all(
            each.isdisjoint(shard.kept_places()) for shard, each in overwritten.items()
        )

    def _shards(self) -> list[GradShard]:
        return [each.shard for each in self._grad_groups if each.shard is not None]

    def snapshot(self) -> Callable[[], None]:
        """See `Capturable`."""
        registered = ((register, name) for register in self._registers for name in register)
        # Without sharded parameters: the engine decides whether their sharded or unsharded tensor
        # is registered.
        values = [
            (owner, name, owner[name])
            for owner, name in chain(registered, self._switches)
            if fsdp_param_of(owner[name]) is None
        ]
        attributes = [
            *((p, "grad", p.grad) for p in self._plain),
            *((p, "requires_grad", p.requires_grad) for p in self._trainable),
        ]
        states = [(shard, shard.host_state()) for shard in self._shards()]

        def restore() -> None:
            for owner, name, value in values:
                owner[name] = value
            for param, name, value in attributes:
                setattr(param, name, value)
            for shard, state in states:
                shard.restore(state)

        return restore

    def known_to_graph(self) -> Any:
        """See `Capturable`. A change of `requires_grad` replaces the group's tensors."""
        return [grads.known_to_graph() for grads in self._grad_groups]

    def replayed(self) -> None:
        """See `Capturable`. Also drops unsharded parameters that are kept: they are stale now, as
        after an optimizer step.
        """
        for group in self._groups:
            group.replays += 1
            if group.is_filled:
                group.reshard(drop_kept=True)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Capturable`."""
        for name, param in self._module.named_parameters():
            if fsdp_param_of(param) is None:
                yield name, param
                if param.grad is not None:
                    yield f"gradient of {name}", param.grad
        yield from self._module.named_buffers()
        for grads in self._grad_groups:
            group = grads.group
            unit = group.where
            yield from ((f"shard of {p.name}", local_of(p.sharded)) for p in group.params)
            shard = grads.shard
            if shard is not None and shard.has_memory:
                yield f"gradient shard of {unit}", shard.flat
            for what, buffer in grads.buffers().items():
                yield f"{what} of {unit}", buffer


def _memory_of(shard: GradShard) -> Hashable:
    """Returns the address of the gradients, if a graph may use it; the live flags; and the
    verdicts ([Note: Verdicts] in `engine/grad_shard.py`), of which the stale ones are dropped.
    """
    shard.drop_stale_verdict()
    # Host memory is FIXED as well, but no graph uses it.
    is_known = shard.memory is GradMemory.FIXED and shard.stream is not None
    address = shard.flat.data_ptr() if is_known else 0
    return (
        address,
        tuple(shard.flagged),
        *shard.judged,
        *map(torch.Tensor.data_ptr, shard.judged.values()),
    )


class OptimState(Capturable):
    """Adapts an optimizer or a loss scaler of `shardgrad.optim`, whose values that change between
    steps are in device memory.
    """

    is_guarded = True

    def __init__(self, value: FlatOptimizer | GradScaler) -> None:
        self._value = value

    def guards(self) -> Hashable:
        """See `Capturable`."""
        return self._value.guards()

    def snapshot(self) -> Callable[[], None]:
        """See `Capturable`."""
        return self._value.snapshot() if isinstance(self._value, GradScaler) else nothing

    def known_to_graph(self) -> Any:
        """See `Capturable`."""
        return self._value.tables() if isinstance(self._value, FlatOptimizer) else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Capturable`."""
        for what, tensor in self._value.buffers():
            yield f"{what} of {type(self._value).__name__}", tensor


capturable.register(nn.Module, ModuleState)
capturable.register(FlatOptimizer, OptimState)
capturable.register(GradScaler, OptimState)
