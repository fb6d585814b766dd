"""Units, and the root that they share: what runs before and after a sharded module's forward and
backward.

An iteration, of which the outermost unit is the root unless a program runs a part by itself:

| what | fires, in this order in a step | does |
| --- | --- | --- |
| `Unit.pre_forward` | before forward | unshard, wait, prefetch the next unit, cast |
| `RootContext.enter_forward` | in it, if outermost | looks for what has changed since |
| `Unit.post_forward` | after forward | reshard if asked to, watch outputs, cast |
| `RootContext.leave_forward` | in it, if outermost | drops what was prefetched for nothing |
| `Unit.pre_backward` | first gradient of an output | unshard, wait, prefetch the unit before |
| `collect` | a parameter's gradient is there | in `grad_group.py`: reduce when all are there |
| `Unit.post_backward` | gradients of all inputs are there | reshard, close the group's reduction |
| `RootContext.end_backward` | autograd is done | reduces what is left, waits for the gradients |

An iteration that an exception cut short is cleared by the next outermost forward. If an inner unit
ran first, it was a root of its units; the real root takes over what it had noted.

Gradients are caught at the parameters, not at the module, so whatever path a loss took, they are
reduced.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors, _to_kwargs
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.grad_group import GradGroup, ReductionScheduler
from shardgrad.engine.grad_shard import GradMemory
from shardgrad.engine.param_group import ParamGroup, ParamState
from shardgrad.engine.streams import is_capturing, wait_for_device
from shardgrad.engine.tracing import NOTHING, outside_graphs, span
from shardgrad.errors import AsleepError, UnsupportedError
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = [
    "UNIT",
    "RootContext",
    "Unit",
    "unit_of",
    "units_under",
]

# Where a module keeps its unit.
UNIT = "_shardgrad_unit"

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_GRAD_SHARD = attrgetter("shard")
_TENSORS = {torch.Tensor}  # the common arguments, which need no tree

# -1 unless autograd runs a backward on this thread: a forward is then a recomputation, or a hook's.
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def _outside_transforms() -> AbstractContextManager[object]:
    """Returns the context for work of the engine, which a transform of `torch.func` would transform
    too: gathering writes to memory that the transform takes for a constant.
    """
    return NOTHING if peek_interpreter_stack() is None else temporarily_clear_interpreter_stack()


def _inside(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that a transform of `torch.func` has wrapped."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


@dataclass(slots=True)
class _Call:
    """One forward of a unit: the unit that ran before it, and the graph task that its backward has
    begun in.
    """

    before: Unit | None
    begun_in: int = -1


class Unit:
    """One call of `fully_shard`: its modules, groups and switches.

    Attributes:
        context: what all units under one root share; None before `lazy_init`, which the first
            forward calls: see `lazy_init.py`.
        pre_backward, post_backward: what autograd calls; a tool that watches may wrap them.
        hooks: handles of the two hooks of each module.
        input_dtype: that floating-point inputs are cast to; None to leave them as they are.
        reshard_after_forward: None is True, except for the root and, on the CPU, what backward
            needs first.
        reshard_after_backward: False keeps parameters unsharded between micro-batches.
        unshard_in_backward: False skips the backward all-gather.
        forward_prefetch, backward_prefetch: units to unshard early instead of the next one in that
            direction.
        max_reductions: reductions that may be in flight; None for the default.
        partner: whose streams and staging are to be shared once this unit is a root.
        held: the program has unsharded them, and waited, or no output will say when backward comes:
            a forward with gradients leaves them so.
        is_called_around: a call of one of its parts runs, which may call forward and then goes on
            with the parameters.
        before_outermost_forward: called before an outermost forward with gradients; may refuse it.
        accept: called once ranks have agreed on the model, with all units; a collective; may refuse
            them.
        next_backward: the unit whose backward is expected after the one that runs.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        lazy_init: Callable[[Unit], RootContext],
    ) -> None:
        self.name = ""
        self.modules = tuple(modules)
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.input_dtype = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.max_reductions: int | None = None
        self.partner: CommContext | None = None
        self.held = False
        self.is_called_around = False
        self.context: RootContext | None = None
        self._lazy_init = lazy_init
        self.before_outermost_forward: Callable[[], None] = lambda: None
        self.accept: Callable[[Sequence[Unit]], None] = lambda units: None
        self.groups: list[ParamGroup] = []
        self.grad_groups: list[GradGroup] = []
        self.set_groups(groups)
        self.outstanding = 0
        # Calls whose backward has begun and not ended; several if a module calls itself.
        self.open = 0
        self.next_backward: Unit | None = None
        self.waiting_modules: set[nn.Module] = set()
        # Forwards that have not come to their end, the innermost last.
        self.running: list[nn.Module] = []
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

    def set_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Replaces the unit's groups and keeps what the program has set so far; only while
        building.
        """
        self.groups = list(groups)
        earlier, self.grad_groups = self.grad_groups, [GradGroup(group) for group in groups]
        # Whatever the program has set so far, such as `set_requires_gradient_sync(False)`, holds
        # for the new groups as well.
        for grads in self.grad_groups if earlier else ():
            grads.follow(earlier[0])
        self.group_owning = {owner: g for g in groups for p in g.params for owner, _ in p.owners}

    def set_reshard_after_forward(self, flag: bool) -> None:
        """Changes the flag; a reshard to fewer ranks, asked for by an int, is given up."""
        self.reshard_after_forward = flag
        for group in self.groups:
            group.reshard_fully_after_forward()

    @property
    def is_root(self) -> bool:
        """True once this unit has been found to be the outermost one."""
        return self.context is not None and self.context.root is self

    @property
    def is_unsharded(self) -> bool:
        """True if modules register the unsharded parameters of every group."""
        return all(group.state is ParamState.UNSHARDED for group in self.groups)

    # -- forward and backward

    @outside_graphs
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments:
        """Unshards the parameters, and returns the inputs, cast and watched."""
        with _outside_transforms():
            context, args, kwargs = self._enter(module, args, kwargs)
        if self.input_dtype is not None:
            args, kwargs = self.cast_inputs(args, kwargs)
        # Backward may recompute it.
        if torch.is_grad_enabled() or context.scheduler.enrolment is not None:
            args, kwargs = self._watch_inputs(context, args, kwargs, counted=_graph_task() == -1)
        return args, kwargs

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[RootContext, tuple[Any, ...], dict[str, Any]]:
        # Which unit is the outermost is not known before one runs, so the first forward of all
        # makes the root, when every call of `fully_shard` has been made.
        context = self.context or self._lazy_init(self)
        recorder.unit = self.name
        # Activation checkpointing runs a forward again inside of backward: that one belongs to no
        # iteration of its own, is not counted, and prefetches nothing.
        recomputing = _graph_task() != -1
        if not recomputing:
            args, kwargs = context.enter_forward(self, args, kwargs)
            self.running.append(module)
        if context.gather_through is not None:
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
        return context, args, kwargs

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        """Returns the inputs of a forward in the dtype of its parameters, if the policy says so."""
        dtype = self.input_dtype
        if dtype is None:
            return args, kwargs
        with span("cast_forward_inputs", self.name):
            return _cast(dtype, args), _cast(dtype, kwargs)

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
        if not found or peek_interpreter_stack() is not None:
            return args, kwargs
        if counted:
            self.outstanding += 1
            for grads in self.grad_groups:
                grads.waits_for_unit = True
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
        is_transformed = peek_interpreter_stack() is not None
        with _outside_transforms():
            self._leave(module, output, is_transformed=is_transformed)
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else _cast(dtype, output)

    def _leave(self, module: nn.Module, output: Any, *, is_transformed: bool) -> None:
        context = self.context or self._lazy_init(self)
        recomputing = _graph_task() != -1
        if not recomputing and self.running:  # empty if a registered method has called forward
            self.running.pop()
        if not context.scheduler.backward_running:
            self.refresh_trainable()
        watches = torch.is_grad_enabled() and not is_transformed
        begins = _tensors_with_grad(output) if watches else []
        if is_transformed and torch.is_grad_enabled():
            # Its graphs have tensors of the transform's, in which no hook would hear of backward.
            context.scheduler.reads_again = True
        elif (
            watches and not begins and (self.outstanding or any(g.params for g in self.grad_groups))
        ):
            # Gradients may go through the call, to its inputs or to parameters, and no output says
            # when backward comes, as where torch cannot look into the object that has the tensors.
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
            before = None
            if not recomputing:
                before, context.ran_last = context.ran_last, self
            self._watch_outputs(begins, before)
        if not recomputing:
            context.leave_forward(self)

    def _watch_outputs(self, outputs: Sequence[torch.Tensor], before: Unit | None) -> None:
        """Has `pre_backward` called with the first gradient that comes to one of these."""
        call = _Call(before)
        for tensor in outputs:
            tensor.register_hook(functools.partial(self.pre_backward, call))
            # A view that is changed in place loses its hook; the tensor that it is of does not.
            if tensor._base is not None and tensor._base.requires_grad:
                tensor._base.register_hook(functools.partial(self._pre_backward_of_base, call))

    def watch_call(self, output: Any) -> None:
        """Unshards the parameters in the backward of a call that has gathered nothing itself."""
        # That of a recomputation follows at once: nothing reshards them in between.
        is_plain = _graph_task() == -1 and peek_interpreter_stack() is None
        if torch.is_grad_enabled() and is_plain:
            self._watch_outputs(_tensors_with_grad(output), None)

    def forward_failed(self, running: int) -> None:
        """Abandons forwards that have raised: all but the first `running` of those that ran."""
        del self.running[running:]
        if self.context is not None and self.context.forward_root is self and not self.running:
            # What is dropped now may fail as well, such as a collective, or all of a capture that
            # has ended; the first error is the one to tell.
            with suppress(RuntimeError):
                self.context.recover()

    def _refuse_outputs_in_parameters(self, output: Any) -> None:
        """Refuses outputs that are views of parameters, whose memory is about to be freed."""
        tensors = (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)
        for group in self.groups:
            if group.stage.keeps_unsharded:
                continue
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and group.has_memory_of(_inside(tensor)):
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
        context = self.context or self._lazy_init(self)
        recorder.unit = self.name
        if context.gather_through is not None:
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
                # Of what was frozen since the forward, autograd then adds nothing to what waits.
                grads.group.carry_requires_grad()
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

    @outside_graphs
    def _post_backward(self, *, counted: bool = False) -> None:
        """All gradients of one call's inputs are there: nothing below needs this unit's
        parameters.
        """
        context = self.context or self._lazy_init(self)
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
            keep = context.scheduler.reads_again or context.gather_through is not None
            if self.reshard_after_backward and not (again or self.open > 0 or keep):
                # See [Note: Branches that send nothing back] in `grad_group.py`.
                streams = context.comm_ctx.streams
                for grads in self.grad_groups:
                    grads.order_before(streams.current(), streams)
                self.reshard()
            # All calls of this unit are over: no more gradients of its parameters come.
            if self.outstanding == self.open == 0 and context.scheduler.backward_running:
                for grads in self.grad_groups:
                    context.scheduler.close(grads)

    # -- unshard and reshard

    def unshard(self, comm_ctx: CommContext) -> None:
        """Starts the all-gathers of parameters that are not unsharded."""
        for group in self.groups:
            group.unshard(comm_ctx)

    def wait_for_unshard(self, comm_ctx: CommContext) -> None:
        """Ends them; parameters are unsharded for the current stream afterwards."""
        stream = comm_ctx.streams.current()
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            group.wait_for_unshard()
            if grads.hooked is not group.params[0].unsharded:  # new objects
                grads.hook()
            # Gradients that are here already, and came on the former pack stream, have left no
            # event.
            if grads.count == 0:
                grads.pack_stream = stream

    def reshard(self, *, drop_kept: bool = False) -> None:
        """Reshards every group; see `ParamGroup.reshard`."""
        self.held = self.is_called_around = False
        for group in self.groups:
            group.reshard(drop_kept=drop_kept)

    def show_sharded(self) -> None:
        """Registers the sharded parameters of every group, and keeps what is gathered."""
        for group in self.groups:
            group.show_sharded()

    def refresh(self) -> None:
        """Takes over, before an outermost forward, what changed."""
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            # A few comparisons in C for each group: a steady step pays little for what rarely
            # happens, weights that were loaded, replaced or moved. Who adopts them is imported
            # then.
            if group.shard.is_meta or not group.registration.holds():
                from shardgrad.engine.replaced_params import adopt, require_data

                adopt(group)
                require_data(group)
            group.reshard_if_stale()
            if group.carry_requires_grad() is not grads.trainable or grads.holds_frozen:
                grads.refresh_trainable()

    def refresh_trainable(self) -> None:
        """Takes over what the program has frozen or thawed inside a forward."""
        for group, grads in zip(self.groups, self.grad_groups, strict=True):
            if group.carry_requires_grad() is not grads.trainable or grads.holds_frozen:
                grads.refresh_trainable()

    def finish_backward(self, *, is_read_again: bool) -> None:
        """Frees, at the end of a backward, unsharded parameters that are not to be kept."""
        self.outstanding = self.open = 0
        if self.reshard_after_backward:
            self.show_sharded() if is_read_again else self.reshard()

    def abandon(self) -> None:
        """Forgets a forward or a backward that failed, and the calls in it: parameters are
        resharded.
        """
        # A loss of a forward before it may still go backward: a unit that has several calls in that
        # is reduced as often.
        self.outstanding = self.open = 0
        self.waiting_modules.clear()
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


class RootContext:
    """Shared by every unit under one root: `units`, in construction order, the root first, and
    their `grad_groups`.

    Attributes:
        gather_through: unshards every unit up to and including one (None: all), while ranks may run
            different units (`features/participation.py`); nothing is resharded then before the
            backward is over. Else None.
        forward_root: the outermost unit whose forward runs; None between forwards.
        is_asleep: True while the shards' memory is given back (`features/sleep.py`).
        post_optim_event: what the next forward's all-gathers wait for, if the program said so.
    """

    def __init__(self, units: Sequence[Unit], comm_ctx: CommContext) -> None:
        self.units = list(units)
        self.root = self.units[0]
        self.grad_groups = [grads for unit in self.units for grads in unit.grad_groups]
        self.comm_ctx = comm_ctx
        self.scheduler = ReductionScheduler(comm_ctx, self.end_backward)
        self.gather_through: Callable[[Unit | None], None] | None = None
        self.is_asleep = False
        self.post_optim_event: torch.Event | None = None
        self._generations: list[int] = []  # of the groups, when a forward had an event last
        self._written = comm_ctx.parameters_ready
        self.forward_root: Unit | None = None
        self._order: list[Unit] = []
        self._order_frozen = False
        self._position = 0
        # On the CPU, the unit that ran last in the recorded forward: backward begins with it.
        self._stays: Unit | None = None
        self.ran_last: Unit | None = None  # of the forwards that have no backward yet
        # The host has to wait for these before a program may write their shards.
        self._offloaded = [
            g for unit in self.units for g in unit.groups if g.shard_memory.is_offloaded
        ]

    # -- forward

    def enter_forward(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Opens a forward if `unit` is the outermost one running, also where it calls itself, as a
        registered method does that calls forward.

        Streams: later all-gathers start after the current stream, where the optimizer wrote the
        parameters.
        """
        if self.is_asleep:
            self.require_awake()
        # A backward that is still open was cut short: a recomputation does not come here.
        is_cut_short = self.scheduler.backward_running
        if not (self.forward_root in (None, unit) or is_cut_short):
            return args, kwargs
        # A program that captures by `torch.cuda.graph` itself; `graphed_step` has quiesced already.
        if self.crosses_border():
            # No event of outside can be waited for inside of a capture.
            self.comm_ctx.streams.forget_events()
            self.quiesce()
        if is_cut_short:
            self.recover()
        # Here, since nobody is told of `zero_grad()`: it sets attributes to None. Before parameters
        # that begin or cease to train get other places.
        self.free_gradients()
        # Between iterations a program may load weights, freeze layers, or step an optimizer: all of
        # it is looked for once, here, and not by each unit.
        for each in self.units:
            each.refresh()
        if torch.is_grad_enabled():
            unit.before_outermost_forward()
        device = self.comm_ctx.device
        # As FSDP2's root does: what lies on the host comes along.
        if device.type != "cpu":
            with span("inputs_to_device", unit.name):
                (args,), (kwargs,) = _to_kwargs(args, kwargs, device, False)
        self.forward_root, self._position = unit, 0
        if not self._order_frozen:
            self._order.clear()
        # FSDP2's `set_post_optim_event`: all-gathers need not wait for what else the current stream
        # has been given. Values that were adopted since were copied there, so then they wait for
        # both.
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            before, streams = self._generations, self.comm_ctx.streams
            self._generations = [group.generation for each in self.units for group in each.groups]
            if self._generations != before:
                streams.event_of(event).wait(streams.current())
                event = None
        self.parameters_written(event)
        return args, kwargs

    def crosses_border(self) -> bool:
        """Notes whether what follows is captured; returns whether that has changed.

        The one place that decides whether the memory of the root's gradients is known to a graph.
        """
        is_captured = is_capturing(self.comm_ctx.device)
        if is_captured == self.comm_ctx.is_captured:
            return False
        self.comm_ctx.is_captured = is_captured
        for shard in map(_GRAD_SHARD, self.grad_groups):
            if shard is not None:
                shard.look(is_captured=is_captured)
        return True

    def require_awake(self) -> None:
        """Refuses to use shards whose memory is given back.

        Raises:
            AsleepError: nothing was launched.
        """
        if self.is_asleep:
            raise AsleepError.of(f"the model {type(self.root.modules[0]).__name__}")

    def free_gradients(self) -> None:
        """Frees the memory of gradients that are None: [Note: Memory of gradients] in
        `grad_shard.py`.

        Streams: those that it was allocated on wait for the current one, and for the optimizer's.
        Capture: safe; memory that is there is kept at its address, and none is freed.
        """
        free = []
        for shard in map(_GRAD_SHARD, self.grad_groups):
            is_held = shard is not None and shard.memory is GradMemory.HELD
            if is_held and shard.are_absent():
                free.append(shard)
        if not free or self.scheduler.in_flight:
            return
        streams, event = self.comm_ctx.streams, self.post_optim_event
        reader = streams.current()
        # Memory on the host has no stream.
        for stream in {shard.stream for shard in free} - {None}:
            if event is not None:
                streams.event_of(event).wait(stream)
            if stream != reader:
                read = streams.event()
                read.record(reader)
                read.wait(stream)
        for shard in free:
            shard.free(reader)

    def parameters_written(self, event: torch.Event | None = None) -> None:
        """Makes later all-gathers start after `event`, or else after the current stream."""
        streams = self.comm_ctx.streams
        if event is None:
            self._written.record(streams.current())
        self.comm_ctx.parameters_ready = self._written if event is None else streams.event_of(event)

    def size_reduce_ring(self) -> None:
        """Lets as many reductions be in flight as one of the units asked for."""
        if asked := [unit.max_reductions for unit in self.units if unit.max_reductions is not None]:
            self.comm_ctx.reduce_ring.resize(max(asked))

    def use(self, lead: CommContext) -> None:
        """Shares another root's streams and staging from now on; what is in flight is completed."""
        # What is in flight was sent through the streams and slots that are left here.
        if self.comm_ctx.streams is not lead.streams:
            self.quiesce()
            # Roots that take turns, as the stages of a pipeline on one rank do, need one set of
            # staging and one order of collectives.
            self.comm_ctx = self.scheduler.comm_ctx = lead.for_another_root()
            self._written = self.comm_ctx.parameters_ready

    def upcoming(self, unit: Unit) -> Sequence[Unit]:
        """Returns the units to prefetch while `unit` runs: what the program has set, or the one
        that followed in the root's first forward.

        A forward that departs from it gets no prefetch until it is back, and changes nothing:
        evaluation cannot spoil training's order. Under `participate`, ranks would pair up the wrong
        all-gathers, so there is none.
        """
        if self.gather_through is not None:
            return ()
        following: Sequence[Unit] = ()
        if not self._order_frozen:
            # The root's first forward: nothing is prefetched, and the order is noted.
            self._order.append(unit)
        elif self._order[self._position : self._position + 1] == [unit]:
            self._position += 1
            following = self._order[self._position : self._position + 1]
        return unit.forward_prefetch or following

    def reshards_after_forward(self, unit: Unit) -> bool:
        """Returns whether to reshard `unit` after its forward.

        Unless the program has said so, not the root, nor the unit that backward begins with.
        """
        is_kept = self.gather_through is not None
        if is_kept or self.scheduler.reads_again or unit.is_called_around:
            return False
        # The program has called `unshard()` itself, and reads the parameters after forward too.
        if unit.held and torch.is_grad_enabled():
            return False
        if unit.reshard_after_forward is not None:
            return unit.reshard_after_forward
        return unit is not self.root and not (unit is self._stays and torch.is_grad_enabled())

    def leave_forward(self, unit: Unit) -> None:
        """Closes the forward that `unit` opened; what was prefetched and not used is dropped."""
        if self.forward_root is not unit or unit.running:
            return
        self.forward_root, is_kept = None, self.gather_through is not None
        # The first whole forward of the root decides what is prefetched from now on.
        if unit is self.root and not (self._order_frozen or is_kept):
            self._order_frozen = True
            # On a device the loss is often the peak, and the all-gather overlaps with the head's
            # backward.
            if self._order and self.comm_ctx.gather_ring.keeps:
                self._stays = self._order[-1]
        for each in self.units:
            each.waiting_modules.clear()
            for group in each.groups:
                # Left behind by a branch that was skipped, or prefetched for a unit that did not
                # run.
                if group.is_filled or group.state is ParamState.UNSHARDING:
                    if self.reshards_after_forward(each):
                        group.reshard_after_forward()
                    if not is_kept:
                        group.cancel_unshard()
            # What the engine keeps for its own next use does not show: losses, clipping and
            # optimizers find sharded parameters, as if nothing had been kept.
            is_first = each is self._stays and each.reshard_after_forward is None
            is_hidden = not torch.is_grad_enabled() or (is_first and each is not self.root)
            if is_hidden and not (each.held or each.is_called_around or is_kept):
                each.show_sharded()
        self._wait_until_read()

    def _wait_until_read(self) -> None:
        for group in self._offloaded:
            group.wait_until_read()

    # -- backward

    @outside_graphs
    def end_backward(self, *, wait: bool = True) -> None:
        """Ends a backward: frees what is still unsharded, reduces what is left, waits for the
        gradients.

        Streams: the stream that called backward waits for every reduction.
        """
        with span("root_post_backward_callback", self.root.name), torch.no_grad():
            self.scheduler.reads_again = self.scheduler.keeps_graph
            # Parameters are freed before the last groups are reduced: their memory is what these
            # reductions take.
            for unit in self.units:
                unit.finish_backward(is_read_again=self.scheduler.reads_again)
            self.scheduler.drain(self.grad_groups, wait=wait and self.scheduler.is_last_backward)
            self.ran_last = None
            self._wait_until_read()

    # -- between iterations

    def recover(self) -> None:
        """Clears a forward or a backward that an exception cut short. Every parameter is resharded.

        Gradients that a failed backward left half-written are dropped with a warning; what they
        were added to becomes None. See [Note: States of a group's gradients] in `grad_group.py`.
        """
        is_backward = self.scheduler.backward_running
        if is_backward and not self.comm_ctx.is_captured:
            # Autograd joins the streams of a backward only at its end.
            wait_for_device(self.comm_ctx.device)
        self._abandon()
        if is_backward:
            lost = self.scheduler.abandon_backward(self.grad_groups)
            added = (
                f" In units {', '.join(lost)} they had been added to what was there, which is None "
                "now."
            )
            warnings.warn(
                "a backward failed half-way: the gradients that it has computed are dropped, those "
                f"of earlier backwards are kept.{added if lost else ''} zero_grad() drops all of "
                "them.",
                RuntimeWarning,
                stacklevel=2,
            )

    def abort(self) -> None:
        """Drops all that is under way: a capture failed, and nothing in it has run."""
        self.crosses_border()
        self._abandon()
        self.scheduler.abort(self.grad_groups)

    def _abandon(self) -> None:
        self.forward_root = self.ran_last = self.gather_through = None
        self.scheduler.enrolment = None
        for unit in self.units:
            unit.abandon()

    def quiesce(self) -> None:
        """Leaves nothing in flight and no parameter unsharded; clears an iteration cut short.

        Streams: the current stream waits for what was in flight. Capture: safe.
        """
        self.crosses_border()
        if self.forward_root is not None or self.scheduler.backward_running:
            self.recover()
        self.scheduler.join()
        for unit in self.units:
            unit.reshard(drop_kept=True)
        self._wait_until_read()


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` made of a module, or None."""
    unit: Unit | None = module.__dict__.get(UNIT)
    return unit


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
            if UNIT in child.__dict__:
                found[child.__dict__[UNIT]] = None
            left += reversed(child._modules.values())
    return list(found)
