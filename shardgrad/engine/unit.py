"""A unit: the hooks that unshard its parameters before they are needed and reshard them afterwards.

| hook | fires, in this order in a step | does |
| --- | --- | --- |
| `pre_forward` | before forward | unshard, wait, prefetch the next unit, cast |
| `post_forward` | after forward | reshard if asked to, watch outputs, cast |
| `pre_backward` | first gradient of an output | unshard, wait, prefetch the unit before |
| `collect` | a parameter's gradient is there | in `grad_group.py`: reduce when all are there |
| `post_backward` | gradients of all inputs are there | reshard, close the group's reduction |
| `end_backward` | autograd is done | in `root.py` |

Gradients are caught at the parameters, not at the module, so whatever path a loss took, they are
reduced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_group import GradGroup
from shardgrad.engine.param import Owner
from shardgrad.engine.param_group import ParamGroup, ParamState
from shardgrad.engine.replaced_params import adopt, require_data
from shardgrad.engine.scheduler import ReductionScheduler
from shardgrad.engine.spans import NO_SPAN, profiler, span
from shardgrad.errors import UnsupportedError
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["Guest", "Root", "Unit", "attach_unit", "outside_graphs", "unit_of", "units_under"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_ATTRIBUTE = "_shardgrad_unit"
# Functions that run a forward, their module as `self`, by name and file.
_CALL = nn.Module._call_impl.__code__
_CALLS = {(_CALL.co_name, _CALL.co_filename), ("forward_method", __file__)}
# -1 unless autograd runs a backward on this thread: a forward is then a recomputation, or a hook's.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def outside_graphs(hook: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes `torch.compile` break its graph at `hook` and run it, and what it calls, as plain
    Python.

    `torch.compiler.disable` imports Dynamo (over a second and some 100 MB) and costs each hook more
    than its own decisions, so it is only used where Dynamo is watching the calling thread.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(hook)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if get_eval_frame_callback() is None:
            return hook(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(hook, recursive=True)
        return disabled(*args, **kwargs)

    # For a graph that would inline it.
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    # And where a compiled module runs it as a separate frame: what it calls decides for itself.
    code = call.__code__  # type: ignore[attr-defined]
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return call


class Root(Protocol):
    """What a unit asks of the context that all units under one root share; see `RootContext` in
    `root.py`.
    """

    root: Unit
    comm_ctx: CommContext
    scheduler: ReductionScheduler
    keep_unsharded: bool

    def require_awake(self) -> None:
        """Refuses to use shards whose memory is given back."""

    def enter_forward(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments:
        """Opens a forward if `unit` is the outermost one running; returns its inputs, on the
        device.
        """

    def leave_forward(self, unit: Unit) -> None:
        """Closes the forward that `unit` opened."""

    def has_failed_in(self, unit: Unit) -> bool:
        """Returns whether a forward of this unit ends by an exception; the outermost reshards."""

    def gather_through(self, unit: Unit | None) -> None:
        """Unshards every unit up to and including this one, if `keep_unsharded`; None for all."""

    def upcoming(self, unit: Unit) -> Unit | None:
        """Returns the unit that followed in the recorded forward."""

    def is_needed_next(self, unit: Unit) -> bool:
        """Returns whether backward will begin with this unit."""

    def ran_forward(self, unit: Unit) -> int:
        """Notes a forward that will have a backward; returns its place in the order."""

    def before(self, place: int) -> Unit | None:
        """Returns the unit whose backward is expected after the one at `place`."""


@dataclass
class Guest:
    """A parameter registered in unit `unit_name` that `owner_name` claimed; a common ancestor takes
    it.
    """

    name: str
    param: nn.Parameter
    owners: list[Owner]
    owner_name: str
    unit_name: str


@dataclass(slots=True)
class _Call:
    """One forward of a unit: its place in the order, and the graph task that its backward has begun
    in.
    """

    place: int
    begun_in: int = -1


class Unit:
    """One call of `fully_shard`: its modules, groups and switches.

    Attributes:
        context: shared by all units under one root; None before `lazy_init`, which the first
            forward calls.
        reshard_after_forward: None is True, except for the root and, on the CPU, what backward
            needs first.
        reshard_after_backward: False keeps parameters unsharded between micro-batches.
        unshard_in_backward: False skips the backward all-gather.
        forward_prefetch, backward_prefetch: units to unshard early instead of the next one in that
            direction.
        max_reductions: reductions that may be in flight; None for the default.
        partner: whose streams and staging are to be shared once this unit is a root.
        methods_running: registered methods that run; a forward inside one is no remainder of one
            that failed.
        held: the program has unsharded them, and waited: a forward with gradients leaves them so.
        require_complete: called before an outermost forward with gradients; may refuse it.
        accept: called once ranks have agreed on the model, with all units; a collective; may refuse
            them.
        pre_backward, post_backward: what autograd calls; a tool that watches may wrap them.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        lazy_init: Callable[[Unit], Root],
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
        self.partner: CommContext | None = None
        self.held = False
        self.context: Root | None = None
        self.guests: list[Guest] = []
        self.require_complete: Callable[[], None] = lambda: None
        self.accept: Callable[[Sequence[Unit]], None] = lambda units: None
        self.groups: list[ParamGroup] = []
        self.grad_groups: list[GradGroup] = []
        self.set_groups(groups)
        self._lazy_init = lazy_init
        self.methods_running = 0
        self._outstanding = 0
        self._outstanding_before = 0  # the latest forward
        # Calls whose backward has begun and not ended; several if a module calls itself.
        self._open = 0
        self._next_backward: Unit | None = None
        self._waiting_modules: set[nn.Module] = set()
        # Forwards that have not come to their end, the innermost last.
        self._running: list[nn.Module] = []
        self.pre_backward: Callable[..., None] = self._pre_backward
        self.post_backward: Callable[..., None] = self._post_backward
        self.hooks = [
            [
                module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True),
                # Also after a forward that has raised: what it has gathered is resharded then.
                module.register_forward_hook(self.post_forward, always_call=True),
            ]
            for module in self.modules
        ]

    def set_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Replaces the unit's groups and keeps what the program has set so far; only while
        building.
        """
        self.groups = list(groups)
        earlier, self.grad_groups = self.grad_groups, [GradGroup(group) for group in groups]
        for grads in self.grad_groups if earlier else ():
            grads.follow(earlier[0])
        self._group_of = {owner: g for g in groups for p in g.params for owner, _ in p.owners}

    def set_reshard_after_forward(self, flag: bool) -> None:
        """Changes the flag; a reshard to fewer ranks, asked for by an int, is given up."""
        self.reshard_after_forward = flag
        for group in self.groups:
            group.reshard_fully_after_forward()

    def group_owning(self, module: nn.Module) -> ParamGroup | None:
        """Returns a group that owns a parameter `module` registers, or None."""
        return self._group_of.get(module)

    @property
    def is_root(self) -> bool:
        """True once this unit has been found to be the outermost one."""
        return self.context is not None and self.context.root is self

    @property
    def is_unsharded(self) -> bool:
        """True if modules register the unsharded parameters of every group."""
        return all(group.state is ParamState.UNSHARDED for group in self.groups)

    # -- unshard and reshard

    def unshard(self, context: Root) -> None:
        """Starts the all-gathers of parameters that are not unsharded."""
        context.require_awake()
        for group in self.groups:
            group.unshard(context.comm_ctx)

    def wait_for_unshard(self, context: Root) -> None:
        """Ends them; parameters are unsharded for the current stream afterwards."""
        stream = context.comm_ctx.streams.current()
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            group.wait_for_unshard()
            grads.unsharded_for(stream)

    def reshard(self, *, drop_kept: bool = False) -> None:
        """Reshards every group; see `ParamGroup.reshard`."""
        self.held = False
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            grads.carry_requires_grad()
            group.reshard(drop_kept=drop_kept)

    def show_sharded(self) -> None:
        """Registers the sharded parameters of every group, and keeps what is gathered."""
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            grads.carry_requires_grad()
            group.show_sharded()

    def refresh(self) -> bool:
        """Takes over, before an outermost forward, what changed; True if the current stream wrote
        shards.
        """
        replaced, self._outstanding_before = False, self._outstanding
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            if not group.registration.holds():
                replaced |= adopt(group)
            if group.shard.is_meta:
                require_data(group)
            group.reshard_if_stale()
            grads.refresh_trainable()
        return replaced

    def _reshards_after_forward(self, context: Root) -> bool:
        if (
            context.keep_unsharded
            or context.scheduler.reads_again
            or (self.held and torch.is_grad_enabled())
        ):
            return False
        flag = self.reshard_after_forward
        return (
            flag
            if flag is not None
            else context.root is not self and not context.is_needed_next(self)
        )

    # -- forward

    @outside_graphs
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments:
        """Unshards the parameters, and returns the inputs, cast and watched."""
        context = self.context or self._lazy_init(self)
        recorder.unit = self.name
        recomputing = _graph_task() != -1
        if not recomputing:
            args, kwargs = context.enter_forward(self, args, kwargs)
            self._running.append(module)
        if context.keep_unsharded:
            context.gather_through(self)
        self.unshard(context)
        # The next unit's all-gather is launched before this one is waited for, so that it overlaps
        # with this unit's compute also where waiting blocks the host.
        if not recomputing and not self._waiting_modules:
            self._waiting_modules.update(self.modules)
            self._prefetch_forward(context)
        self.wait_for_unshard(context)
        if not context.scheduler.backward_running:  # what the program has frozen inside the forward
            for grads in self.grad_groups:
                grads.refresh_trainable()
        dtype = self.mp_policy.param_dtype
        if dtype is not None and self.mp_policy.cast_forward_inputs:
            with (
                span("cast_forward_inputs", self.name) if profiler._is_profiler_enabled else NO_SPAN
            ):
                args, kwargs = _cast(dtype, args), _cast(dtype, kwargs)
        # Backward may recompute it.
        if torch.is_grad_enabled() or context.scheduler.enrolment is not None:
            args, kwargs = self._watch_inputs(context, args, kwargs, counted=not recomputing)
        return args, kwargs

    def like_forward(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs a bound method between `pre_forward` and `post_forward`.

        The method may call forward as often as it likes.
        """

        def forward_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = unit.pre_forward(self, args, kwargs)
            unit.methods_running += 1
            try:
                output = method(*args, **kwargs)
            except Exception:
                unit.post_forward(self, args, None)
                raise
            finally:
                unit.methods_running -= 1
            return unit.post_forward(self, args, output)

        unit = self
        return forward_method

    @property
    def is_running(self) -> bool:
        """True if a forward, or a registered method, of this unit has not come to its end."""
        return bool(self._running)

    @property
    def runs_in_itself(self) -> bool:
        """True if a module of this unit calls itself, or a registered method of its own.

        Only the stack tells that from a forward that was interrupted: Ctrl-C runs no hooks.
        """
        if not self._running:
            return False
        running = 0
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if (code.co_name, code.co_filename) in _CALLS:
                running += frame.f_locals.get("self") in self.modules
            frame = frame.f_back
        return running > 1

    def _prefetch_forward(self, context: Root) -> None:
        following = context.upcoming(self)
        if context.keep_unsharded:
            return
        for unit in self.forward_prefetch or (() if following is None else (following,)):
            unit.unshard(context)

    def _watch_inputs(
        self, context: Root, args: tuple[Any, ...], kwargs: dict[str, Any], *, counted: bool
    ) -> _Arguments:
        """Puts a node under the inputs that need gradients, to learn when their gradients are all
        there.
        """
        for grads in self.grad_groups:
            if grads.params:
                context.scheduler.enter(grads)
        if not kwargs and not [arg for arg in args if not isinstance(arg, torch.Tensor)]:
            # The common case, without a tree.
            return tuple(self._watch(args, counted=counted)), kwargs
        leaves, spec = tree_flatten((args, kwargs))
        watched: _Arguments = tree_unflatten(self._watch(leaves, counted=counted), spec)
        return watched

    def _watch(self, leaves: Sequence[Any], *, counted: bool) -> Sequence[Any]:
        found = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not found:
            return leaves
        if counted:
            self._outstanding += 1
            for grads in self.grad_groups:
                grads.waits_for_unit = True
        inputs = [leaves[i] for i in found]
        aliases = _InputsWatch.apply(self, counted, *inputs)  # type: ignore[no-untyped-call]
        replaced = list(leaves)
        for i, alias in zip(found, aliases, strict=True):
            replaced[i] = alias
        return replaced

    @outside_graphs
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshards if asked to, and returns the output, watched and cast."""
        context = self.context
        if context is None:
            raise RuntimeError(f"post_forward of {self.name} without pre_forward")
        recomputing = _graph_task() != -1
        if not recomputing and self._running:  # empty if a registered method has called forward
            self._running.pop()
        if output is None and context.has_failed_in(self):
            return None
        if not context.scheduler.backward_running:
            for grads in self.grad_groups:
                grads.refresh_trainable()
        if not recomputing and module not in self._running:
            self._waiting_modules.discard(module)
            if not self._waiting_modules and self._reshards_after_forward(context):
                self._refuse_outputs_in_parameters(output)
                for group in self.groups:
                    group.reshard_after_forward()
        if torch.is_grad_enabled():
            call = _Call(0 if recomputing else context.ran_forward(self))
            for tensor in _tensors_with_grad(output):
                tensor.register_hook(functools.partial(self.pre_backward, call))
        if not recomputing:
            context.leave_forward(self)
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else _cast(dtype, output)

    def _refuse_outputs_in_parameters(self, output: Any) -> None:
        """Refuses outputs that are views of parameters, whose memory is about to be freed."""
        tensors = (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)
        for group in self.groups:
            if group.stage.keeps_unsharded:
                continue
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and group.has_memory_of(tensor):
                    raise UnsupportedError(
                        "a unit returns a parameter, or a view of one, whose memory it frees after "
                        "its forward",
                        expected="outputs with memory of their own",
                        got=f"a tensor of shape {tuple(tensor.shape)} in the parameters' memory",
                        where=f"unit {self.name or 'root'!r}",
                        fix="return parameter.clone(), or fully_shard(module, "
                        "reshard_after_forward=False)",
                    )

    def finish_forward(self, context: Root) -> None:
        """After the outermost forward: what was gathered ahead and not run is dropped."""
        self._waiting_modules.clear()
        self._running.clear()
        for group in self.groups:
            if not group.has_gathered:
                continue
            if self._reshards_after_forward(context):
                group.reshard_after_forward()
            if not context.keep_unsharded:
                group.cancel_unshard()
        if not (torch.is_grad_enabled() or self.held or context.keep_unsharded):
            self.show_sharded()

    # -- backward

    @outside_graphs
    def _pre_backward(self, call: _Call, grad: torch.Tensor) -> None:
        """Unshards the parameters before the first gradient enters the unit."""
        context = self.context
        if context is None:
            raise RuntimeError(f"backward of {self.name} before forward")
        recorder.unit = self.name
        if context.keep_unsharded:
            context.gather_through(None)
        scheduler = context.scheduler
        if not scheduler.backward_running:
            scheduler.begin_backward(in_autograd=True)
        task = _graph_task()
        # The hook runs for each output of the call; a graph that was retained has several
        # backwards.
        if begins := call.begun_in != task:
            call.begun_in = task
            self._open += 1
            for grads in self.grad_groups:
                if grads.params:
                    scheduler.expect(grads)
        if not self.unshard_in_backward:
            return
        with span("pre_backward", self.name) if profiler._is_profiler_enabled else NO_SPAN:
            self.unshard(context)
            if begins:
                self._prefetch_backward(context, call.place)
            self.wait_for_unshard(context)

    def _prefetch_backward(self, context: Root, place: int) -> None:
        following = self._next_backward = context.before(place)
        for unit in self.backward_prefetch or (() if following is None else (following,)):
            if unit.unshard_in_backward:
                unit.unshard(context)

    def _post_backward(self, *, counted: bool = False) -> None:
        """All gradients of one call's inputs are there: nothing below needs this unit's
        parameters.
        """
        context = self.context
        if context is None:
            raise RuntimeError(f"post-backward of {self.name} before forward")
        if counted and self._outstanding:
            self._outstanding -= 1
        self._open = max(0, self._open - 1)
        with span("post_backward", self.name) if profiler._is_profiler_enabled else NO_SPAN:
            # A unit called several times in a row is about to need its parameters again.
            again = self._next_backward is self and self._outstanding > 0
            # Another call's backward may be open on another stream, and a graph that is kept reads
            # the parameters again.
            keep = (
                again or self._open > 0 or context.keep_unsharded or context.scheduler.reads_again
            )
            if self.reshard_after_backward and not keep:
                # See [Note: Branches that send nothing back] in `grad_collector.py`.
                streams = context.comm_ctx.streams
                for grads in self.grad_groups:
                    grads.collector.order_before(streams.current(), streams)
                self.reshard()
            # All calls of this unit are over: no more gradients of its parameters come.
            if self._outstanding == self._open == 0 and context.scheduler.backward_running:
                for grads in self.grad_groups:
                    context.scheduler.close(grads)

    def finish_backward(self) -> None:
        """Frees, at the end of a backward, unsharded parameters that are not to be kept."""
        self._outstanding = self._open = 0
        self._next_backward = None
        is_read_again = self.context is not None and self.context.scheduler.reads_again
        if self.reshard_after_backward:
            self.reshard() if not is_read_again else self.show_sharded()

    def abandon_forward(self) -> None:
        """Forgets a forward that failed, and the calls in it: parameters are resharded."""
        self._outstanding = min(self._outstanding, self._outstanding_before)
        self._waiting_modules.clear()
        self._running.clear()
        self.reshard(drop_kept=True)


class _InputsWatch(torch.autograd.Function):
    """Identity whose backward runs when the gradients of all watched inputs are there."""

    @staticmethod
    def forward(
        ctx: Any, unit: Unit, counted: bool, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
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


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` made of a module, or None."""
    unit: Unit | None = module.__dict__.get(_ATTRIBUTE)
    return unit


def attach_unit(unit: Unit) -> None:
    """Makes `unit_of` find it."""
    for module in unit.modules:
        module.__dict__[_ATTRIBUTE] = unit


def units_under(module: nn.Module) -> list[Unit]:
    """Returns the units in a module tree in traversal order, the module's own first; each once."""
    found: dict[Unit, None] = {}
    seen: set[Any] = {None}  # also a child, of a module that was assigned None
    # By hand, for every micro-batch: `modules()` takes five times as long.
    left: list[Any] = [module]
    while left:
        child = left.pop()
        if child not in seen:
            seen.add(child)
            if _ATTRIBUTE in child.__dict__:
                found[child.__dict__[_ATTRIBUTE]] = None
            left += reversed(child._modules.values())
    return list(found)
