"""The hooks of a sharded module, which unshard its parameters before they are needed and reshard
them afterwards.

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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch._C._functorch import peek_interpreter_stack
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.param_group import ParamState
from shardgrad.engine.root import RootContext, lazy_init
from shardgrad.engine.spans import span
from shardgrad.engine.unit import Unit, unit_of
from shardgrad.errors import CollectiveError, UnsupportedError

__all__ = ["HookedUnit", "forward_around", "forward_with", "like_forward", "outside_graphs"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_TENSORS = {torch.Tensor}  # the common arguments, which need no tree

# -1 unless autograd runs a backward on this thread: a forward is then a recomputation, or a hook's.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def outside_graphs(hook: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes `torch.compile` break its graph at `hook` and run it, and what it calls, as plain
    Python.

    `torch.compiler.disable` imports Dynamo (over a second and some 100 MB) and costs each hook more
    than its own decisions, so it is only used where Dynamo is watching the calling thread.
    """
    # Made at most once: `torch.compiler.disable` returns a new wrapper each time.
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


@dataclass(slots=True)
class _Call:
    """One forward of a unit: the unit that ran before it, and the graph task that its backward has
    begun in.
    """

    before: Unit | None
    begun_in: int = -1


class HookedUnit(Unit):
    """A unit whose hooks are registered on its modules.

    Attributes:
        pre_backward, post_backward: what autograd calls; a tool that watches may wrap them.
        hooks: handles of the two hooks of each module.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pre_backward: Callable[..., None] = self._pre_backward
        self.post_backward: Callable[..., None] = self._post_backward
        # Hooks, and no wrapper around the module: names in `state_dict`, `isinstance` and
        # attributes stay what they were. Ours comes first, so that the program's pre-forward hooks
        # see unsharded parameters.
        self.hooks = [
            [
                module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.post_forward),
            ]
            for module in self.modules
        ]

    @outside_graphs
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments:
        """Unshards the parameters, and returns the inputs, cast and watched."""
        # Which unit is the outermost is not known before one runs, so the first forward of all
        # makes the root, when every call of `fully_shard` has been made.
        is_transformed = peek_interpreter_stack() is not None
        if is_transformed and (self.context is None or not self.is_unsharded):
            self._refuse_transforms()
        context: RootContext = self.context or lazy_init(self)
        recorder.unit = self.name
        # Activation checkpointing runs a forward again inside of backward: that one belongs to no
        # iteration of its own, is not counted, and prefetches nothing.
        recomputing = _graph_task() != -1
        if not recomputing:
            args, kwargs = context.enter_forward(self, args, kwargs)
            self.running.append(module)
        if context.keep_unsharded:
            context.gather_through(self)
        self.unshard(context.comm_ctx)
        # The next unit's all-gather is launched before this one is waited for, so that it overlaps
        # with this unit's compute also where waiting blocks the host.
        if not recomputing and not self.waiting_modules:
            self.waiting_modules.update(self.modules)
            for unit in context.upcoming(self):
                unit.unshard(context.comm_ctx)
        self.wait_for_unshard(context.comm_ctx)
        if not context.scheduler.backward_running:  # what the program has frozen inside the forward
            self.refresh_trainable()
        args, kwargs = self.cast_inputs(args, kwargs)
        # Backward may recompute it.
        if torch.is_grad_enabled() or context.scheduler.enrolment is not None:
            args, kwargs = self._watch_inputs(context, args, kwargs, counted=not recomputing)
        return args, kwargs

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        """Returns the inputs of a forward in the dtype of its parameters, if the policy says so."""
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        with span("cast_forward_inputs", self.name):
            return _cast(dtype, args), _cast(dtype, kwargs)

    def _refuse_transforms(self) -> NoReturn:
        """Refuses work of the engine inside a transform of `torch.func`, which would transform it
        too: gathering writes to memory that the transform takes for a constant.
        """
        raise UnsupportedError(
            "a sharded module was called inside a transform of torch.func",
            expected="unsharded parameters, and inputs without gradients of their own",
            where=f"unit {self.name or 'root'!r}",
            fix="torch.autograd.grad and torch.autograd.functional.jacobian work; or call "
            "unshard() on each unit before torch.func.vmap",
        )

    def _watch_inputs(
        self, context: RootContext, args: tuple[Any, ...], kwargs: dict[str, Any], *, counted: bool
    ) -> _Arguments:
        """Puts a node under the inputs that need gradients, to learn when their gradients are all
        there.
        """
        for grads in self.grad_groups:
            if grads.params:
                context.scheduler.enter(grads)
        leaves, spec = list(args), None
        if kwargs or not _TENSORS.issuperset(map(type, args)):
            leaves, spec = tree_flatten((args, kwargs))
        found = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                found.append(place)
        # No node can say when the gradients are all there: they are once each parameter has one.
        if not found:
            return args, kwargs
        if counted:
            self.outstanding += 1
            for grads in self.grad_groups:
                grads.waits_for_unit = True
        if peek_interpreter_stack() is not None:
            self._refuse_transforms()
        inputs = map(leaves.__getitem__, found)
        # One node for all of them: autograd runs its backward once, after the last of their
        # gradients, and on the stream that forward was on.
        aliases = _InputsWatch.apply(self, counted, *inputs)  # type: ignore[no-untyped-call]
        for place, alias in zip(found, aliases, strict=True):
            leaves[place] = alias
        if spec is None:
            return tuple(leaves), kwargs
        watched: _Arguments = tree_unflatten(leaves, spec)
        return watched

    @outside_graphs
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshards if asked to, and returns the output, watched and cast."""
        context: RootContext | None = self.context
        if context is None:
            raise RuntimeError(f"post-forward of {self.name} before forward")
        recomputing = _graph_task() != -1
        if not recomputing and self.running:  # empty if a registered method has called forward
            self.running.pop()
        if not context.scheduler.backward_running:
            self.refresh_trainable()
        begins = _tensors_with_grad(output) if torch.is_grad_enabled() else []
        if torch.is_grad_enabled() and not begins and self._expects_backward():
            # No output says when backward comes, as where torch cannot look into the object that
            # has the tensors.
            self.held = True
        if not recomputing and module not in self.running:
            self.waiting_modules.discard(module)
            if not self.waiting_modules and context.reshards_after_forward(self):
                self._refuse_outputs_in_parameters(output)
                for group in self.groups:
                    group.reshard_after_forward()
        if torch.is_grad_enabled():
            # Any output may be the first whose gradient comes, and some may get none, so each has
            # the hook. Backward comes next to the unit that ran before.
            call = _Call(None if recomputing else context.ran_forward(self))
            for tensor in begins:
                tensor.register_hook(functools.partial(self.pre_backward, call))
                # A view that is changed in place loses its hook; the tensor that it is of does not.
                if tensor._base is not None and tensor._base.requires_grad:
                    tensor._base.register_hook(functools.partial(self._pre_backward_of_base, call))
        if not recomputing:
            context.leave_forward(self)
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else _cast(dtype, output)

    def _expects_backward(self) -> bool:
        """Returns whether gradients may go through a call: to its inputs, or to parameters."""
        return self.outstanding > 0 or any(grads.params for grads in self.grad_groups)

    def forward_failed(self, running: int) -> None:
        """Abandons forwards that have raised: all but the first `running` of those that ran."""
        del self.running[running:]
        if self.context is not None:
            # Collectives that are dropped now may fail as well; the first error is the one to tell.
            with suppress(CollectiveError):
                self.context.forward_failed(self)

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

    @outside_graphs
    def _pre_backward(self, call: _Call, grad: torch.Tensor) -> None:
        """Unshards the parameters before the first gradient enters the unit."""
        context: RootContext | None = self.context
        if context is None:
            raise RuntimeError(f"backward of {self.name} before forward")
        recorder.unit = self.name
        if context.keep_unsharded:
            context.gather_through(None)
        scheduler = context.scheduler
        # Autograd has no call that says that a backward begins: the first of our hooks does.
        if not scheduler.backward_running:
            context.require_awake()
            scheduler.begin_backward(in_autograd=True)
        task = _graph_task()
        # The hook runs for each output of the call; a graph that was retained has several
        # backwards.
        if begins := call.begun_in != task:
            call.begun_in = task
            self.open += 1
            for grads in self.grad_groups:
                if grads.params:
                    scheduler.expect(grads)
        # The program has said that backward needs no parameters of this unit, or that it unshards
        # them itself.
        if not self.unshard_in_backward:
            return
        with span("pre_backward", self.name):
            self.unshard(context.comm_ctx)
            if begins:
                # The next all-gather is launched before this one is waited for, as in forward.
                self.next_backward = call.before
                for unit in self.backward_prefetch or ([call.before] if call.before else ()):
                    if unit.unshard_in_backward:
                        unit.unshard(context.comm_ctx)
            self.wait_for_unshard(context.comm_ctx)

    def _pre_backward_of_base(self, call: _Call, grad: torch.Tensor) -> None:
        """Runs `pre_backward`, unless the gradient of an output has."""
        if call.begun_in != _graph_task():
            self.pre_backward(call, grad)

    def _post_backward(self, *, counted: bool = False) -> None:
        """All gradients of one call's inputs are there: nothing below needs this unit's
        parameters.
        """
        context: RootContext | None = self.context
        if context is None:
            raise RuntimeError(f"post-backward of {self.name} before forward")
        if counted and self.outstanding:
            self.outstanding -= 1
        # Where a tensor left the unit past its outputs, say by an attribute, no pre-backward has
        # opened the call that ends here.
        self.open = max(0, self.open - 1)
        with span("post_backward", self.name):
            # A unit called several times in a row is about to need its parameters again.
            again = self.next_backward is self
            # Another call's backward may be open on another stream, and a graph that is kept reads
            # the parameters again.
            keep = again or self.open > 0 or context.keep_unsharded or context.scheduler.reads_again
            if self.reshard_after_backward and not keep:
                # See [Note: Branches that send nothing back] in `grad_collector.py`.
                streams = context.comm_ctx.streams
                for grads in self.grad_groups:
                    grads.collector.order_before(streams.current(), streams)
                self.reshard()
            # All calls of this unit are over: no more gradients of its parameters come.
            if self.outstanding == self.open == 0 and context.scheduler.backward_running:
                for grads in self.grad_groups:
                    context.scheduler.close(grads)


def forward_with(module: nn.Module, user: nn.Module) -> None:
    """Makes the parameters of a unit's `module` unsharded while `user` runs as well, which reads
    them without calling `module`.
    """
    unit = unit_of(module)
    if not isinstance(unit, HookedUnit):
        return

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        return unit.pre_forward(module, args, kwargs)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return unit.post_forward(module, args, output)

    # Inside of the hooks of the user's own unit, if it has one.
    user.register_forward_pre_hook(before, with_kwargs=True)
    user.register_forward_hook(after, prepend=True)


def forward_around(module: nn.Module, unit: HookedUnit) -> None:
    """Makes a call of `module` around the forward of the unit that owns its parameters, as by a
    method of the model, gather and reshard as that forward does.
    """
    # Whether each call that runs around the unit's forward has gathered, the innermost last. One
    # that raises leaves its entry: `after` does not come.
    calls: list[bool] = []
    is_hooked = False

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        nonlocal is_hooked
        if unit.running or torch.compiler.is_compiling():
            return None
        owner = unit.group_owning(module)
        if owner is None:
            return None
        is_cut_short = False
        if _graph_task() == -1:
            owner.reshard_if_stale()
            # Of a backward that was cut short, the unit's forward clears what is left.
            is_cut_short = unit.context is not None and unit.context.scheduler.backward_running
        gathers = is_cut_short or owner.state is not ParamState.UNSHARDED
        if gathers:  # no other call runs, or it would have gathered
            calls.clear()
        calls.append(gathers)
        if not is_hooked:  # now, since a call inside of the unit's forward needs no such hook
            module.register_forward_hook(after)
            is_hooked = True
        if not gathers:
            return unit.cast_inputs(args, kwargs)
        args, kwargs = unit.pre_forward(unit.modules[0], args, kwargs)
        # Nothing may be left open if the call raises.
        unit.running.clear()
        unit.is_called_around = True
        if unit.context.forward_root is unit:
            unit.context.forward_root = None
        return args, kwargs

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if unit.running or not calls:
            return None
        if calls.pop():
            unit.is_called_around = False
            if unit.context.forward_root is None:
                unit.context.forward_root = unit
            return unit.post_forward(unit.modules[0], args, output)
        is_plain = torch.is_grad_enabled() and peek_interpreter_stack() is None
        # Its parameters may be resharded by the backward of another call.
        for tensor in _tensors_with_grad(output) if is_plain else ():
            tensor.register_hook(functools.partial(unit.pre_backward, _Call(None)))
        return None

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def like_forward(unit: HookedUnit, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs a bound method between `pre_forward` and `post_forward`.

    The method may call forward as often as it likes.
    """

    def forward_method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = len(unit.running)
        try:
            args, kwargs = unit.pre_forward(self, args, kwargs)
            return unit.post_forward(self, args, method(*args, **kwargs))
        except BaseException:
            unit.forward_failed(running)
            raise

    return forward_method


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
