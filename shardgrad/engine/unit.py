"""A unit: the hooks that put its parameters in place before they are needed and away when they are not.

Hooks, in the order they fire in a step:

| hook             | fires                             | does                                             |
|------------------|-----------------------------------|--------------------------------------------------|
| `pre_forward`    | before forward                    | unshard, wait, prefetch the next unit, cast      |
| `post_forward`   | after forward                     | reshard if asked to, watch outputs, cast         |
| `pre_backward`   | first gradient of an output       | unshard, wait, prefetch the unit before          |
| `_arrive`        | a parameter's gradient is there   | in `scheduler.py`: pack and reduce when complete |
| `post_backward`  | gradients of all inputs are there | reshard, close the group's reduction             |
| `end_backward`   | autograd is done                  | in `root_context.py` |

Gradients are caught at the parameters, not at the module: whatever path a loss took through the unit's
unsharded parameters, they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardgrad.diagnosis.flight_recorder import journal
from shardgrad.engine.collect_params import Guest
from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.dynamo import outside_graphs
from shardgrad.engine.param_group import ParamGroup, ShardState
from shardgrad.engine.replaced_params import require_data
from shardgrad.engine.root import establish_context
from shardgrad.engine.root_context import RootContext, inside_backward
from shardgrad.engine.scheduler import GroupReducer
from shardgrad.engine.trace import span
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["Unit"]


@dataclass(slots=True)
class _Call:
    """One forward of a unit: its place in the order, and whether its backward has begun."""

    place: int
    begun: bool = False


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Unit:
    """One call of `fully_shard`: its modules, groups and switches.

    Attributes:
        name: fully qualified from the root.
        modules: the modules given to `fully_shard`; several share one unit.
        reshard_after_forward: None means True, except for the root and the unit that backward needs first.
        reshard_after_backward: False keeps parameters whole between micro-batches.
        unshard_in_backward: False skips the backward all-gather.
        forward_prefetch: units to unshard early in forward instead of the recorded next one.
        backward_prefetch: units to unshard early in backward instead of the one before.
        max_reductions: reductions that may be in flight; None if nobody asked.
        partner: whose streams and staging are to be shared once this unit is a root.
        hooks: those on each of the modules' forwards, the one before it and the one after.
        pre_backward: what autograd calls when the first gradient of a forward's output arrives. A tool that
            watches may put another function in its place, around it.
        post_backward: the same for the moment when all gradients of a forward's inputs are there.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.name = ""
        self.modules = tuple(modules)
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.max_reductions: int | None = None
        self.partner: Runtime | None = None
        self.context: RootContext | None = None
        self.guests: list[Guest] = []
        self.groups: list[ParamGroup] = []
        self.reducers: list[GroupReducer] = []
        self.set_groups(groups)
        self._methods_running = 0
        self._outstanding = 0
        self._next_backward: Unit | None = None
        self._waiting_modules: set[nn.Module] = set()
        self.pre_backward: Callable[..., None] = self._pre_backward
        self.post_backward: Callable[..., None] = self._post_backward
        self.hooks = [
            [
                module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.post_forward),
            ]
            for module in self.modules
        ]

    def set_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Replaces the unit's groups, which are for what the program has set so far; only while building."""
        self.groups = list(groups)
        earlier, self.reducers = self.reducers, [GroupReducer(group) for group in groups]
        for reducer in self.reducers if earlier else ():
            reducer.follow(earlier[0])
        self._group_of = {owner: g for g in groups for p in g.params for owner, _ in p.owners}

    def set_reshard_after_forward(self, flag: bool) -> None:
        """Changes the flag; a reshard to fewer ranks, asked for by an int, is given up."""
        self.reshard_after_forward = flag
        for group in self.groups:
            group.post_forward_mesh = None

    def group_owning(self, module: nn.Module) -> ParamGroup | None:
        """Returns a group that owns a parameter `module` registers, or None."""
        return self._group_of.get(module)

    # -- placing parameters -----------------------------------------------------------------------------

    def unshard(self, context: RootContext) -> None:
        """Starts the all-gathers of parameters that are not whole."""
        for group in self.groups:
            group.unshard(context.runtime)

    def wait_for_unshard(self, context: RootContext) -> None:
        """Ends them; parameters are whole for the current stream afterwards."""
        stream = context.runtime.streams.current()
        for group, reducer in zip(self.groups, self.reducers, strict=True):
            group.wait_for_unshard()
            reducer.arrivals.home = stream

    def reshard(self, *, for_good: bool = False) -> None:
        """Shows the shards, and frees whole parameters; those that a stage keeps only `for_good`."""
        for group in self.groups:
            group.reshard(for_good=for_good)

    def let_host_write(self) -> None:
        """Makes the host wait until shards that live there have been read."""
        for group in self.groups:
            group.let_host_write()

    @property
    def is_root(self) -> bool:
        """True once this unit has been found to be the outermost one."""
        return self.context is not None and self.context.root is self

    def _reshards_after_forward(self, context: RootContext) -> bool:
        if context.keep_gathered:
            return False
        if self.reshard_after_forward is None:
            return not self.is_root and not context.is_needed_next(self)
        return self.reshard_after_forward

    def refresh(self) -> bool:
        """Before an outermost forward: take note of what the program changed since the last one.

        Parameters that were replaced are taken over, whole ones that are stale are dropped, and those that
        began or ceased to require grad get their place among the gradients.

        Returns:
            True if parameters were replaced: their shard has been written on the current stream.
        """
        replaced = False
        for group, reducer in zip(self.groups, self.reducers, strict=True):
            replaced |= group.adopt()
            require_data(group)
            group.reshard_if_stale()
            if group.refresh_trainable():
                reducer.attach()
        return replaced

    # -- forward ----------------------------------------------------------------------------------------

    @outside_graphs
    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        """Makes the parameters whole, and returns the inputs, cast and watched."""
        context = self.context or establish_context(self)
        journal.unit = self.name
        recomputing = inside_backward()
        if not recomputing:
            args, kwargs = context.enter_forward(self, args, kwargs)
        context.gather_through(self)
        self.unshard(context)
        if not recomputing and not self._waiting_modules:
            self._waiting_modules.update(self.modules)
            self._prefetch_forward(context)
        self.wait_for_unshard(context)
        args, kwargs = self._cast_inputs(args, kwargs)
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(context, args, kwargs, counted=not recomputing)
        return args, kwargs

    @contextmanager
    def running_method(self) -> Iterator[None]:
        """While active, a registered method runs, which may call forward as often as it likes."""
        self._methods_running += 1
        try:
            yield
        finally:
            self._methods_running -= 1

    @property
    def may_nest(self) -> bool:
        """True if a forward of this unit inside another one is no remainder of one that failed."""
        return self._methods_running > 0

    def _prefetch_forward(self, context: RootContext) -> None:
        following = context.upcoming(self)
        if context.keep_gathered:
            return
        targets = self.forward_prefetch or ([following] if following is not None else [])
        for unit in targets:
            unit.unshard(context)

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        with span("cast_forward_inputs", self.name):
            return _cast(dtype, args), _cast(dtype, kwargs)

    def _watch_inputs(
        self, context: RootContext, args: tuple[Any, ...], kwargs: dict[str, Any], *, counted: bool
    ) -> _Arguments:
        """Puts a node under the inputs that need gradients, to learn when their gradients are all there."""
        for reducer in self.reducers:
            if reducer.group.has_trainable:
                context.scheduler.enter(reducer)
        if not kwargs and all(isinstance(arg, torch.Tensor) for arg in args):
            return tuple(self._watch(args, counted=counted)), kwargs  # the common case, without a tree
        leaves, spec = tree_flatten((args, kwargs))
        return tree_unflatten(self._watch(leaves, counted=counted), spec)  # type: ignore[no-any-return]

    def _watch(self, leaves: Sequence[Any], *, counted: bool) -> Sequence[Any]:
        watched = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not watched:
            return leaves
        if counted:
            self._outstanding += 1
        aliases = _InputsWatch.apply(self, counted, *(leaves[i] for i in watched))  # type: ignore[no-untyped-call]
        replaced = list(leaves)
        for i, alias in zip(watched, aliases, strict=True):
            replaced[i] = alias
        return replaced

    @outside_graphs
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshards if asked to, and returns the output, watched and cast."""
        context = self.context
        if context is None:
            raise RuntimeError(f"post_forward of {self.name} without pre_forward")
        recomputing = inside_backward()
        if not recomputing:
            self._waiting_modules.discard(module)
            if not self._waiting_modules and self._reshards_after_forward(context):
                for group in self.groups:
                    group.reshard_after_forward()
        if torch.is_grad_enabled():
            call = _Call(0 if recomputing else context.ran_forward(self))
            for tensor in _tensors_with_grad(output):
                tensor.register_hook(partial(self.pre_backward, call))
        if not recomputing:
            context.leave_forward(self)
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else _cast(dtype, output)

    def finish_forward(self) -> None:
        """After the outermost forward: what was gathered ahead and not run is dropped."""
        context = self.context
        if context is None:
            return
        self._waiting_modules.clear()
        if self._reshards_after_forward(context):
            for group in self.groups:
                group.reshard_after_forward()
        for group in self.groups:
            if not context.keep_gathered:
                group.cancel_unshard()

    # -- backward ---------------------------------------------------------------------------------------

    @outside_graphs
    def _pre_backward(self, call: _Call, grad: torch.Tensor) -> None:
        """Makes the parameters whole before the first gradient enters the unit."""
        context = self.context
        if context is None:
            raise RuntimeError(f"backward of {self.name} before forward")
        journal.unit = self.name
        context.gather_through(None)
        context.scheduler.begin_backward(in_autograd=True)
        for reducer in self.reducers:
            if reducer.group.has_trainable:
                context.scheduler.expect(reducer)
        if not self.unshard_in_backward:
            return
        with span("pre_backward", self.name):
            self.unshard(context)
            if not call.begun:
                call.begun = True
                self._prefetch_backward(context, call.place)
            self.wait_for_unshard(context)

    def _prefetch_backward(self, context: RootContext, place: int) -> None:
        self._next_backward = context.before(place)
        targets = self.backward_prefetch or ([] if self._next_backward is None else [self._next_backward])
        for unit in targets:
            if unit.unshard_in_backward:
                unit.unshard(context)

    def _post_backward(self, *, counted: bool = False) -> None:
        """All gradients of one call's inputs are there: nothing below needs this unit's parameters."""
        context = self.context
        if context is None:
            raise RuntimeError(f"post-backward of {self.name} before forward")
        if counted and self._outstanding:
            self._outstanding -= 1
        with span("post_backward", self.name):
            # A unit called several times in a row is about to need its parameters again.
            again = self._next_backward is self and self._outstanding > 0
            if self.reshard_after_backward and not again and not context.keep_gathered:
                streams = context.runtime.streams
                for reducer in self.reducers:
                    reducer.arrivals.order_before(streams.current(), streams)
                self.reshard()
            if self._outstanding == 0 and context.scheduler.backward_running:
                for reducer in self.reducers:
                    context.scheduler.close(reducer)

    def finish_backward(self) -> None:
        """At the end of a backward: parameters still whole are freed, unless they are to be kept."""
        self._outstanding = 0
        self._next_backward = None
        if self.reshard_after_backward:
            self.reshard()

    def abandon(self) -> None:
        """Forgets a failed iteration: parameters are resharded."""
        self._waiting_modules.clear()
        self.finish_backward()
        self.reshard(for_good=True)

    @property
    def is_unsharded(self) -> bool:
        """True if every group's parameters are whole."""
        return all(group.state is ShardState.UNSHARDED for group in self.groups)


class _InputsWatch(torch.autograd.Function):
    """Identity whose backward runs when the gradients of all watched inputs are there."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, counted: bool, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.counted = counted
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.unit.post_backward(counted=ctx.counted)
        return (None, None, *grads)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, value)


def _tensors_with_grad(output: Any) -> list[torch.Tensor]:
    """Returns the tensors in an output that backward may start from."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    _apply_to_tensors(collect, output)
    return found
