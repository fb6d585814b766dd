"""Units and their root: what runs before and after the forward and backward of a sharded module.

An iteration calls these. The root is the outermost unit, unless a program runs a part of the model
by itself:

| function | runs | does |
| --- | --- | --- |
| `Unit.pre_forward` | before forward | unshard, wait, prefetch the next unit, cast |
| `RootContext.enter_forward` | in it, if outermost | takes over changes since the last iteration |
| `Unit.post_forward` | after forward | reshard if configured, hook the outputs, cast |
| `RootContext.leave_forward` | in it, if outermost | drops unused prefetches |
| `Unit.pre_backward` | first gradient of an output | unshard, wait, prefetch the previous unit |
| `grad_group._collect` | a parameter's gradient arrives | reduce once the group is complete |
| `Unit.post_backward` | all input gradients arrived | reshard, close the group's reduction |
| `RootContext.end_backward` | end of autograd's backward | reduces the rest, waits for gradients |

The next outermost forward, or backward, clears an iteration that an exception cut short. An inner
unit that runs first is the root of its own units; the real root later merges that context's state.

Hooks on the parameters collect the gradients, not hooks on the module, so gradients are reduced
whichever path the loss took.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, auto
from itertools import chain
from operator import attrgetter, is_
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
from shardgrad.engine.grad_group import GradGroup, ReductionScheduler, ReductionSettings
from shardgrad.engine.grad_shard import GradMemory
from shardgrad.engine.param_group import SHARDED, ParamGroup, graph_task
from shardgrad.engine.streams import is_capturing, wait_for_device
from shardgrad.engine.tracing import NOTHING, outside_graphs, span
from shardgrad.errors import AsleepError, UnsupportedError
from shardgrad.sharding.mesh import DataParallelMesh

# The attribute of a module that holds its unit.
UNIT = "_shardgrad_unit"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_IS_TRAINED = attrgetter("takes_part")
_TENSORS = {torch.Tensor}  # the usual arguments, which need no `tree_flatten`


@dataclass(slots=True)
class _Call:
    """One forward of a unit.

    Attributes:
        before: the unit that ran before it.
        begun_in: the graph task in which its backward began.
    """

    before: Unit | None
    begun_in: int = -1


class Unit:
    """One call of `fully_shard`: its modules, groups and settings.

    Attributes:
        context: shared by all units under one root; None before `lazy_init` (see `lazy_init.py`),
            which the first forward calls.
        pre_backward, post_backward: called by autograd; instrumentation may wrap them.
        hooks: the handles of each module's two hooks.
        input_dtype: the dtype to which floating-point inputs are cast; None for no cast.
        reshard_after_forward: None means True, except for the root and, on the CPU, for the unit
            that backward needs first.
        reshard_after_backward: False keeps parameters unsharded between micro-batches.
        reductions: the settings of reductions.
        unshard_in_backward: False skips the backward all-gather.
        forward_prefetch, backward_prefetch: units to prefetch instead of the next one in that
            direction.
        max_reductions: reductions that may be in flight; None for the default.
        partner: the context whose streams and staging to share once this unit is a root.
        stays_unsharded: a forward with grad enabled leaves the parameters unsharded, because the
            program has unsharded them and waited, or because no output can tell when backward
            begins.
        is_asleep: the memory of its shards is released (`features/sleep.py`).
        is_called_around: a call of one of its submodules is running outside the unit's forward. It
            may call forward, and needs the parameters afterwards.
        before_outermost_forward: called before an outermost forward with grad enabled; may refuse
            it.
        accept: called with all units once ranks have agreed on the model; a collective; may refuse
            them.
        next_backward: the unit whose backward is expected after the current one.
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
        self.stays_unsharded = self.is_asleep = False
        self.is_called_around = False
        self.context: RootContext | None = None
        self._lazy_init = lazy_init
        self.before_outermost_forward: Callable[[], None]
        self.accept: Callable[[Sequence[Unit]], None]
        self.reductions = ReductionSettings()
        self.set_groups(groups)
        # Calls with a node under their inputs whose backward has not ended, and whether there are
        # calls without one, as none of their inputs requires grad.
        self.outstanding = 0
        self.has_unwatched = False
        # Calls whose backward has begun but not ended; more than one if a module calls itself.
        self.open = 0
        self.next_backward: Unit | None = None
        self.waiting_modules: set[nn.Module] = set()
        # Modules whose forward is running, the innermost last.
        self.running: list[nn.Module] = []
        # Lists and dicts of which a running forward has copies: how many forwards were running,
        # and each with its copy, what that held, and by the id of each of these, the original.
        self.copies: list[tuple[int, Any, Any, list[Any], dict[int, Any]]] = []
        # Hooks instead of a wrapper keep state dict names, `isinstance` and attributes unchanged.
        # `prepend` lets the program's own pre-forward hooks see unsharded parameters.
        self.hooks = [
            [
                module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.post_forward),
            ]
            for module in self.modules
        ]

    def set_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Replaces the unit's groups and keeps the program's settings; only during construction."""
        self.groups = list(groups)
        self.grad_groups = [GradGroup(group, self.reductions) for group in groups]
        self.group_owning = {owner: g for g in groups for p in g.params for owner, _ in p.owners}

    def set_reshard_after_forward(self, flag: bool) -> None:
        """Changes the flag. Also cancels an integer `reshard_after_forward`."""
        self.reshard_after_forward = flag
        for group in self.groups:
            group.spec = replace(group.spec, mesh_after_forward=None)

    @property
    def is_root(self) -> bool:
        """True once `lazy_init` has made this unit the outermost one."""
        return self.context is not None and self.context.root is self

    # -- forward and backward

    @outside_graphs
    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        """Unshards the parameters. Returns the inputs, cast and with a node for their gradients."""
        # Activation checkpointing runs a forward again inside backward. That forward belongs to no
        # new iteration, is not counted, and prefetches nothing.
        recomputing = graph_task() != -1
        # A transform of `torch.func` would also transform an all-gather, which writes to memory
        # that it takes for a constant.
        is_transformed = peek_interpreter_stack() is not None
        with temporarily_clear_interpreter_stack() if is_transformed else NOTHING:
            # The first forward decides which unit is the root, because all calls of `fully_shard`
            # have been made by then.
            context = self.context or self._lazy_init(self)
            recorder.unit = self.name
            if not recomputing:
                if not self.running:
                    self.copies = []  # not those of a call that raised
                self.running.append(module)
                if context.forward_root in (None, self):
                    args, kwargs = context.enter_forward(self, args, kwargs)
            participation = context.participation
            if participation is not None:
                participation.gather_through(self)
            self.unshard(context.comm_ctx)
            # Launch the next unit's all-gather before waiting for this one, so that it overlaps
            # with this unit's compute even where waiting blocks the host.
            if not recomputing and not self.waiting_modules:
                self.waiting_modules.update(self.modules)
                for unit in context.upcoming(self):
                    unit.unshard(context.comm_ctx)
            self.wait_for_unshard(context.comm_ctx)
        if self.input_dtype is not None:
            args, kwargs = self.cast_inputs(args, kwargs)
        # Under `participate`, forwards without grad count too: reentrant checkpointing recomputes
        # them in backward.
        if not (torch.is_grad_enabled() or (participation is not None and participation.reduces)):
            return args, kwargs
        for grads in self.grad_groups:
            if participation is not None:
                participation.note(grads)
            if context.backward_running:
                context.expect(grads)
            else:
                context.entered[grads] = None
        # Inside a transform, no node can tell when the gradients have arrived.
        if is_transformed:
            return args, kwargs
        return self._watch_inputs(args, kwargs, counted=not recomputing)

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Returns the inputs of a forward in the parameters' dtype, if the policy casts inputs."""
        dtype = self.input_dtype
        if dtype is None:
            return args, kwargs
        with span("cast_forward_inputs", self.name):
            return self.lend((args, kwargs), (_cast(dtype, args), _cast(dtype, kwargs)))

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, counted: bool
    ) -> Arguments:
        """Puts one autograd node under the inputs that require grad.

        Its backward runs once the gradients of all these inputs have arrived.
        """
        leaves, spec = list(args), None
        if kwargs or not _TENSORS.issuperset(map(type, args)):
            leaves, spec = tree_flatten((args, kwargs))
        found = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                found.append(place)
        # Without such inputs, no node can tell when the gradients have arrived. They are complete
        # once each parameter has one.
        if not found:
            self.has_unwatched |= torch.is_grad_enabled()
            return args, kwargs
        if counted:
            self.outstanding += 1
            for grads in self.grad_groups:
                grads.waits_for_unit = True
        inputs = map(leaves.__getitem__, found)
        # One node for all inputs: autograd runs its backward once, after the last of their
        # gradients, and on the stream that forward used.
        aliases = _InputsWatch.apply(self, *inputs)  # type: ignore[no-untyped-call]
        for place, alias in zip(found, aliases, strict=True):
            leaves[place] = alias
        if spec is None:
            return tuple(leaves), kwargs
        return self.lend((args, kwargs), tree_unflatten(leaves, spec))

    def lend(self, given: Arguments, copies: Arguments) -> Arguments:
        """Returns what forward gets of its arguments: themselves, or copies with other tensors.

        Forward may write to a list or dict that its caller reads, at any depth.
        """
        (args, kwargs), (copied, named) = given, copies
        named = {name: self._passed(kwargs[name], value) for name, value in named.items()}
        return tuple(map(self._passed, args, copied)), named

    def _passed(self, given: Any, copy: Any) -> Any:
        """Returns an argument if none of its tensors is another one in the copy; else the copy, in
        which the same is true of each part. `return_copies` reads the copy after forward.
        """
        if all(map(is_, tree_leaves(given), tree_leaves(copy))):
            return given
        if isinstance(given, list | deque | dict):
            places = list(given) if isinstance(given, dict) else range(len(given))
            for place in places:
                copy[place] = self._passed(given[place], copy[place])
            olds, news = ([parts[place] for place in places] for parts in (given, copy))
            originals = dict(zip(map(id, news), olds, strict=True))
            self.copies.append((len(self.running), given, copy, news, originals))
        elif type(given) is tuple or hasattr(given, "_make"):  # a named tuple
            copy = getattr(given, "_make", tuple)(map(self._passed, given, copy))
        return copy

    def return_copies(self) -> None:
        """Makes the caller's lists, deques and dicts what a forward that ends has made of their
        copies.
        """
        # A copy may have been copied again. The copies of a forward that has called this one stay.
        while self.copies and (not self.running or self.copies[-1][0] > len(self.running)):
            _, given, copy, _, originals = self.copies.pop()
            given.clear()
            if isinstance(given, dict):
                for key, each in copy.items():
                    given[key] = originals.get(id(each), each)
            else:
                given.extend(originals.get(id(each), each) for each in copy)

    @outside_graphs
    def post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reshards if configured. Returns the output, hooked and cast."""
        context = self.context or self._lazy_init(self)
        is_transformed = peek_interpreter_stack() is not None
        with temporarily_clear_interpreter_stack() if is_transformed else NOTHING:
            recomputing, begins = graph_task() != -1, []
            if not recomputing and self.running:  # empty if a registered method has called forward
                self.running.pop()
            if self.copies:
                self.return_copies()
            if torch.is_grad_enabled():
                if is_transformed:
                    # The transform's graph has tensors of its own, and hooks on the outputs would
                    # not see its backward.
                    context.reads_again = True
                else:
                    begins = _tensors_with_grad(output)
                    # Without any, gradients may still pass through this call, to its inputs or to
                    # parameters, but no output can tell when backward begins. For example, torch
                    # cannot look into the object that contains the outputs.
                    if not begins:
                        is_trained = any(True in group.trainable for group in self.groups)
                        self.stays_unsharded |= is_trained or self.outstanding > 0
            if not recomputing and module not in self.running:
                self.waiting_modules.discard(module)
                if not self.waiting_modules:
                    after = context.after_forward(self)
                    if after is AfterForward.RESHARD:
                        self._refuse_outputs_in_parameters(output)
                        for group in self.groups:
                            group.reshard_after_forward()
                    elif after is AfterForward.SHOW_SHARDED:
                        self.show_sharded()
            before = None
            if begins and not recomputing:
                before, context.ran_last = context.ran_last, self
            # Any output may get its gradient first, and some may get none, so each has the hook.
            # Backward is expected to reach the unit that ran before next.
            if begins:
                self._watch_outputs(begins, before)
            if not recomputing and context.forward_root is self and not self.running:
                context.leave_forward(self)
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else _cast(dtype, output)

    def _watch_outputs(self, outputs: Sequence[torch.Tensor], before: Unit | None) -> None:
        """Makes the first gradient of any of these outputs call `pre_backward`."""
        call = _Call(before)
        for tensor in outputs:
            tensor.register_hook(functools.partial(self.pre_backward, call))
            # It runs before hooks that the program's forward has registered, which may use the
            # parameters. Autograd calls them in the order of the dictionary.
            hooks = tensor._backward_hooks or {}
            for earlier in list(hooks)[:-1]:
                hooks[earlier] = hooks.pop(earlier)
            # An in-place change of a view drops its hook, but not the hook of its base.
            if tensor._base is not None and tensor._base.requires_grad:
                tensor._base.register_hook(functools.partial(self._pre_backward_of_base, call))

    def watch_call(self, output: Any) -> None:
        """Makes backward unshard the parameters for a call that did not unshard them itself."""
        if torch.is_grad_enabled() and peek_interpreter_stack() is None:
            self._watch_outputs(_tensors_with_grad(output), None)

    def forward_failed(self, running: int) -> None:
        """Abandons forwards that raised: all but the first `running` of those that were running."""
        del self.running[running:]
        self.copies = [each for each in self.copies if each[0] <= running]
        if self.context is not None and self.context.forward_root is self and not self.running:
            # Dropping pending work may fail as well, for example in a collective or after a failed
            # capture. The program should see the first error.
            with suppress(RuntimeError):
                self.context.recover()

    def _refuse_outputs_in_parameters(self, output: Any) -> None:
        """Refuses outputs that are views of parameters whose memory is about to be freed."""
        freed = [group for group in self.groups if not group.stage.keeps_unsharded]
        for tensor in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
            while isinstance(tensor, torch.Tensor) and is_functorch_wrapped_tensor(tensor):
                tensor = get_unwrapped(tensor)  # what a transform of `torch.func` has wrapped
            for group in freed:
                if isinstance(tensor, torch.Tensor) and group.has_memory_of(tensor):
                    raise UnsupportedError(
                        "a unit returned a parameter, or a view of one, whose memory is freed "
                        "after its forward",
                        expected="outputs with memory of their own",
                        got=f"a tensor of shape {tuple(tensor.shape)} in the parameters' memory",
                        where=group.where,
                        fix="return parameter.clone(), or fully_shard(module, "
                        "reshard_after_forward=False)",
                    )

    @outside_graphs
    def pre_backward(self, call: _Call, grad: object) -> None:
        """Unshards the parameters before the first gradient enters the unit."""
        context = self.context or self._lazy_init(self)
        recorder.unit = self.name
        if context.participation is not None:
            context.participation.gather_through(None)
        # Autograd does not report the start of a backward: the engine's first hook marks it.
        if not context.backward_running or context.callback() is None:
            require_awake(context.units)
            context.begin_backward(in_autograd=True)
        task = graph_task()
        # The hook runs for each output of the call, and a retained graph has several backwards.
        if begins := call.begun_in != task:
            call.begun_in = task
            self.open += 1
            for grads in self.grad_groups:
                context.expect(grads)
        # The program has declared that backward does not need this unit's parameters, or that it
        # unshards them itself.
        if not self.unshard_in_backward:
            return
        with span("pre_backward", self.name):
            self.unshard(context.comm_ctx)
            if begins:
                # As in forward, launch the next all-gather before waiting for this one.
                self.next_backward = call.before
                for unit in self.backward_prefetch or ([call.before] if call.before else ()):
                    if unit.unshard_in_backward:
                        unit.unshard(context.comm_ctx)
            self.wait_for_unshard(context.comm_ctx)

    def _pre_backward_of_base(self, call: _Call, grad: object) -> None:
        """Runs `pre_backward` unless an output's gradient already has.

        The base may be the unit's input, whose gradient comes when the unit's backward is over.
        """
        if call.begun_in != graph_task():
            self.pre_backward(call, grad)

    @outside_graphs
    def post_backward(self) -> None:
        """Ends one call's backward: the gradients of its inputs have all arrived.

        Reshards the parameters, which nothing below needs, and closes the group once no call is
        left.
        """
        context = self.context or self._lazy_init(self)
        # A recomputed call was not counted. If a tensor left the unit other than through its
        # outputs, for example as an attribute, no pre-backward has opened this call.
        self.outstanding, self.open = max(0, self.outstanding - 1), max(0, self.open - 1)
        with span("post_backward", self.name):
            # A unit that is called several times in a row needs its parameters again at once.
            again = self.next_backward is self
            # Another call's backward may be open on another stream. A retained graph may read the
            # parameters when no hook unshards them: one that a backward has created, or one past
            # the outputs of this unit.
            is_read_again = context.reads_again or (self.stays_unsharded and context.retains_graph)
            keep = again or is_read_again or self.open or context.participation
            streams = context.comm_ctx.streams
            stream = streams.current()
            if self.reshard_after_backward and not keep:
                # See [Note: Branches that send nothing back] in `grad_group.py`.
                for grads in self.grad_groups:
                    grads.order_before(stream, streams)
                self.reshard()
            else:
                for grads in self.grad_groups:
                    grads.read_on[stream] = None
            is_over = self.outstanding == 0 and (self.open == 0 or self.has_unwatched)
            if is_over and context.backward_running:
                for grads in self.grad_groups:
                    if self.has_unwatched and len(grads.gradients) < len(grads.params):
                        # The backward of another call is still to come, and only the last gradient
                        # will tell its end.
                        grads.waits_for_unit = False
                    else:
                        # All calls of this unit have ended: no parameter gets another gradient.
                        context.close(grads)

    # -- unshard and reshard

    def unshard(self, comm_ctx: CommContext) -> None:
        """Starts the all-gathers of groups that are sharded."""
        for group in self.groups:
            group.unshard(comm_ctx)

    def wait_for_unshard(self, comm_ctx: CommContext) -> None:
        """Waits for the all-gathers; afterwards the current stream may read the parameters."""
        stream = comm_ctx.streams.current()
        for grads in self.grad_groups:
            grads.group.wait_for_unshard()
            # Others train now, or they are new objects.
            if grads.hooks_made_for is not grads.group.trainable:
                grads.hook()
            # Gradients that arrived on the former pack stream have recorded no event, so keep that
            # stream.
            if not grads.gradients:
                grads.pack_stream = stream

    def reshard(self, *, drop_kept: bool = False) -> None:
        """Reshards every group; see `ParamGroup.reshard`."""
        self.stays_unsharded = self.is_called_around = False
        for group in self.groups:
            group.reshard(drop_kept=drop_kept)

    def show_sharded(self) -> None:
        """Registers the sharded parameters of every group, but keeps the unsharded memory."""
        for group in self.groups:
            group.show_sharded()

    def refresh(self) -> None:
        """Takes over changes since the last iteration, before an outermost forward."""
        self.waiting_modules.clear()  # a forward may have raised, or called one of several modules
        for group in self.groups:
            # A few comparisons in C per group, so a steady step pays little. Weights are rarely
            # loaded, replaced or moved, so `replaced_params` is imported only then.
            if group.shard.is_meta or not group.registration.holds():
                if self.context is not None:
                    self.context.join_post_optim_event()
                from shardgrad.engine.replaced_params import adopt, require_data

                adopt(group)
                require_data(group)
            # Not left to `unshard`, which does not ask in a backward, where another rank, without a
            # batch, asks. In a steady step none are kept, and versions need not be compared.
            is_kept = group.is_filled or group.in_flight is not None or group.state is not SHARDED
            # torch refuses a backward of a graph that has saved the former weights.
            if is_kept and group.reshard_if_stale() and self.context is not None:
                self.context.open_graphs = 0

    def forget_calls(self) -> None:
        """Forgets the calls whose backward has not ended, when a backward ends or has failed."""
        self.outstanding, self.open, self.has_unwatched = 0, 0, False


class _InputsWatch(torch.autograd.Function):
    """Identity whose backward runs once the gradients of all its inputs have arrived."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # as where no unit is in between
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.unit.post_backward()
        return (None, *grads)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _apply_to_tensors(cast, value)


def _tensors_with_grad(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of an output that require grad."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    parts: Iterable[Any] = ()
    # Not torch's `_apply_to_tensors`, which builds the containers again: a dataclass may refuse.
    if is_dataclass(output):
        parts = (getattr(output, field.name, None) for field in fields(output))
    elif isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, list | tuple | set):
        parts = output
    return list(chain.from_iterable(map(_tensors_with_grad, parts)))


class AfterForward(Enum):
    """What becomes of a unit's parameters after its forward."""

    RESHARD = auto()
    # Keep the memory for backward; the rest of the forward sees sharded parameters.
    SHOW_SHARDED = auto()
    KEEP = auto()


class RootContext(ReductionScheduler):
    """State shared by all units under one root.

    Attributes:
        units: in construction order, the root first.
        forward_root: the outermost unit whose forward is running; None between forwards.
        ran_forward: an outermost forward has ended, and no other forward or backward began since.
        post_optim_event: the event that the next forward's all-gathers wait for, if the program set
            one.
    """

    def __init__(self, units: Sequence[Unit], comm_ctx: CommContext) -> None:
        self.units = list(units)
        self.root = self.units[0]
        super().__init__(comm_ctx, [grads for unit in self.units for grads in unit.grad_groups])
        self.post_optim_event: torch.Event | None = None
        self.forward_root: Unit | None = None
        self.ran_forward = False
        self._order: list[Unit] = []
        self._order_frozen = False
        self._position = 0
        self.ran_last: Unit | None = None  # of those that await a backward

    # -- forward

    def enter_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Opens a forward; no other unit's forward is running.

        A unit may also call itself, as a registered method does that calls forward.

        Streams: later all-gathers wait for the current stream, where the optimizer wrote the
        parameters.
        """
        require_awake(self.units)
        # Only for programs that call `torch.cuda.graph` themselves: `graphed_step` quiesces before.
        if self.crosses_border():
            # A capture cannot wait for events recorded outside of it.
            self.comm_ctx.streams.forget_events()
            self.quiesce()
        if self.backward_running:
            self.recover()
        self.take_over_changes()
        if torch.is_grad_enabled():
            unit.before_outermost_forward()
            self.open_graphs += 1
        device = self.comm_ctx.device
        # As FSDP2's root does, move inputs from the host to the device.
        if device.type != "cpu":
            with span("inputs_to_device", unit.name):
                (moved,), (named,) = _to_kwargs(args, kwargs, device, False)
                args, kwargs = unit.lend((args, kwargs), (moved, named))
        self.forward_root, self._position = unit, 0
        if not self._order_frozen:
            self._order.clear()
        # FSDP2's `set_post_optim_event`: all-gathers need not wait for later work of the current
        # stream.
        event, self.post_optim_event = self.post_optim_event, None
        self.parameters_written(event)
        return args, kwargs

    def take_over_changes(self) -> None:
        """Takes over what the program has changed since the last iteration: it may load weights,
        freeze layers, step an optimizer or reset gradients, all without notice.

        Every rank must call it, because it decides which units are all-gathered again.
        """
        self.free_gradients()
        # Free what the program has not asked to keep, so that it is gathered again: the root after
        # an evaluation, the unit that backward begins with, and, after an evaluation, what a stage
        # keeps. Modules have shown the shards since, and torch does not count every write to them
        # (`torch._foreach_*_`, `p.data.copy_()`).
        is_free, is_evaluated = self.ran_forward and not self.reads_again, self.ran_last is None
        self.ran_forward = False  # until this one has; a method that calls forward opens it again
        for unit in self.units:
            if is_free and unit.reshard_after_forward is None:
                for group in unit.groups:
                    if group.state is SHARDED:
                        group.reshard(drop_kept=is_evaluated)
            unit.refresh()

    def crosses_border(self) -> bool:
        """Notes whether a graph is being captured from here on; returns whether that has changed.

        Only this decides whether a graph knows the memory of the root's gradients.
        """
        is_captured = is_capturing(self.comm_ctx.device)
        if is_captured == self.comm_ctx.is_captured:
            return False
        self.comm_ctx.is_captured = is_captured
        for grads in self.grad_groups:
            if grads.shard is not None:
                grads.shard.look(is_captured=is_captured)
        return True

    def free_gradients(self) -> None:
        """Frees gradient memory whose gradients are None: [Note: Memory of gradients].

        Streams: the streams it was allocated on wait for the current one, and for
        `post_optim_event`.
        Capture: safe; memory that exists stays at its address and is not freed.
        """
        free = []
        for grads in self.grad_groups:
            shard = grads.shard
            if shard is not None and shard.memory is GradMemory.FREEABLE and shard.are_absent():
                free.append(shard)
        if not free or self.in_flight:
            return
        streams, event = self.comm_ctx.streams, self.post_optim_event
        reader = streams.current()
        for stream in {shard.stream for shard in free}:
            if event is not None:
                streams.event_of(event).wait(stream)
            streams.order(reader, stream)
        for shard in free:
            shard.free(reader)

    def parameters_written(self, event: torch.Event | None = None) -> None:
        """Makes later all-gathers wait for `event`, or for the current stream if it is None."""
        streams = self.comm_ctx.streams
        if event is None:
            self.comm_ctx.parameters_ready.record(streams.current())
        else:
            streams.event_of(event).wait(streams.gather)

    def join_post_optim_event(self) -> None:
        """Makes the current stream wait for the event that the program has set, if it has."""
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None:
            streams = self.comm_ctx.streams
            streams.event_of(event).wait(streams.current())

    def size_reduce_ring(self) -> None:
        """Sets the number of reductions in flight to the largest that a unit asks for."""
        if asked := [unit.max_reductions for unit in self.units if unit.max_reductions is not None]:
            self.comm_ctx.reduce_ring.resize(max(asked))

    def use(self, lead: CommContext) -> None:
        """Shares another root's streams and staging from now on; completes work in flight first."""
        # The work in flight uses the streams and slots that this context is about to leave.
        if self.comm_ctx.streams is not lead.streams:
            self.quiesce()
            # Roots that take turns, such as pipeline stages on one rank, need one set of staging
            # buffers and one order of collectives.
            self.comm_ctx = lead.for_another_root()
            self.size_reduce_ring()

    def upcoming(self, unit: Unit) -> Sequence[Unit]:
        """Returns the units to prefetch while `unit` runs.

        These are the ones that the program has set, or else the unit that came next in the root's
        first forward. A forward that departs from that order prefetches nothing until it returns to
        it, and does not change the order: an evaluation cannot spoil training's order. Under
        `participate` nothing is prefetched, because ranks would pair up the wrong all-gathers.
        """
        if self.participation is not None:
            return ()
        following: Sequence[Unit] = ()
        if not self._order_frozen:
            # The root's first forward records the order and prefetches nothing.
            self._order.append(unit)
        elif self._order[self._position : self._position + 1] == [unit]:
            self._position += 1
            following = self._order[self._position : self._position + 1]
            # Programs average a frozen teacher in forward, just before it runs, and torch does not
            # count every such write (`p.data`): gather its first unit only then.
            is_trained = any(map(_IS_TRAINED, unit.grad_groups))
            for each in following:
                if is_trained and not any(map(_IS_TRAINED, each.grad_groups)):
                    following = ()
        return unit.forward_prefetch or following

    def after_forward(self, unit: Unit) -> AfterForward:
        """Returns what becomes of the parameters of `unit` after its forward.

        By default all units are resharded, except the root and the unit that backward begins with.
        """
        is_kept = self.participation is not None or unit.is_called_around
        # The program has called `unshard()`, and also reads the parameters after forward.
        is_held = unit.stays_unsharded and torch.is_grad_enabled()
        if is_kept or is_held or self.reads_again:
            return AfterForward.KEEP
        # An evaluation may come before a backward that cannot gather them again.
        reshards, shows_sharded = unit.reshard_after_forward, unit.stays_unsharded
        if reshards is None:
            reshards = unit is not self.root
            # Backward begins with the unit that ran last in the recorded forward. Only on the CPU:
            # on a device the peak is often at the loss, and the all-gather overlaps with the
            # backward of the head.
            is_last = self._order_frozen and unit in self._order[-1:]
            shows_sharded |= is_last and self.comm_ctx.gather_ring.keeps and torch.is_grad_enabled()
        if not reshards:
            return AfterForward.KEEP
        return AfterForward.SHOW_SHARDED if shows_sharded else AfterForward.RESHARD

    def leave_forward(self, unit: Unit) -> None:
        """Closes the forward that `unit` opened, and drops prefetched parameters that were not
        used.
        """
        self.forward_root, is_kept = None, self.participation is not None
        self.ran_forward = True
        # The root's first complete forward decides what later forwards prefetch.
        self._order_frozen |= unit is self.root and not is_kept
        for each in self.units:
            for group in each.groups:
                # A skipped branch has left them unsharded, or they were prefetched for a unit that
                # did not run.
                if group.is_filled or group.in_flight is not None:
                    if self.after_forward(each) is AfterForward.RESHARD:
                        group.reshard_after_forward()
                    group.cancel_unshard()
            # After an evaluation, losses, clipping and optimizers find sharded parameters.
            if not torch.is_grad_enabled() and not (
                each.stays_unsharded or each.is_called_around or is_kept
            ):
                each.show_sharded()
        self.comm_ctx.shards_read.wait_on_host()

    # -- backward

    @outside_graphs
    def end_backward(self, *, wait: bool = True) -> None:
        """Ends a backward: frees unsharded parameters, reduces the remaining groups, waits for
        gradients.

        Streams: the stream that called backward waits for every reduction.
        """
        with span("root_post_backward_callback", self.root.name), torch.no_grad():
            is_last = self.is_last_backward
            # The graph of a forward that is running is still to be read.
            if not (self.retains_graph or self.forward_root):
                self.open_graphs = max(0, self.open_graphs - 1)
            self.reads_again = self.keeps_graph or (self.reads_again and self.open_graphs > 0)
            # Free parameters before reducing the last groups, which reuse their memory.
            for unit in self.units:
                if unit.running:  # a forward differentiates a part of the model
                    continue
                unit.forget_calls()
                is_kept = self.reads_again or (unit.stays_unsharded and self.retains_graph)
                if unit.reshard_after_backward and not is_kept:
                    settings = unit.reductions
                    # If no gradients wait, an update follows, which torch may not count.
                    is_final = settings.requires_sync and settings.requires_all_reduce
                    unit.reshard(drop_kept=is_last and is_final)
                elif self.reads_again or is_last:
                    # Modules show the sharded parameters, which have the gradients, so that torch's
                    # clipping finds them. Between micro-batches, pipeline schedules use the
                    # unsharded ones.
                    unit.show_sharded()
            self.drain(wait=wait)
            self.ran_last, self.ran_forward = None, False
            self.comm_ctx.shards_read.wait_on_host()

    # -- between iterations

    def recover(self) -> None:
        """Clears a forward or backward that an exception cut short, and reshards every parameter.

        Drops gradients that a failed backward has half written, with a warning. Gradients that they
        were added to become None. See [Note: States of a group's gradients] in `grad_group.py`.
        """
        is_backward = self.backward_running
        if is_backward and not self.comm_ctx.is_captured:
            # Autograd synchronizes the streams of a backward only at its end.
            wait_for_device(self.comm_ctx.device)
        self._abandon()
        if is_backward:
            lost = self.abandon_backward()
            added = (
                f" In units {', '.join(lost)}, they had been added to earlier gradients, which are "
                "now None."
            )
            warnings.warn(
                "a backward failed: its gradients are dropped, and those of earlier backwards are "
                f"kept.{added if lost else ''} To drop all of them, call zero_grad().",
                RuntimeWarning,
                stacklevel=2,
            )

    def abort(self) -> None:
        """Drops all pending work after a failed capture, of which nothing has run."""
        self.crosses_border()
        self._abandon()
        self.drop_reductions()

    def _abandon(self) -> None:
        participation = self.participation
        self.forward_root = self.ran_last = self.participation = None
        for unit in self.units:
            # A loss of an earlier forward may still run backward. A unit with several calls in it
            # is then reduced once per call.
            unit.forget_calls()
            if participation is None:
                unit.reshard(drop_kept=True)
            else:  # other ranks may not have failed, and keep what they have gathered
                unit.show_sharded()

    def quiesce(self) -> None:
        """Completes everything in flight and reshards all parameters; clears an iteration cut
        short.

        Streams: the current stream waits for the work in flight. Capture: safe.
        """
        self.crosses_border()
        if self.forward_root is not None or self.backward_running:
            self.recover()
        self.join()
        for unit in self.units:
            unit.reshard(drop_kept=True)
        self.comm_ctx.shards_read.wait_on_host()


def require_awake(units: Iterable[Unit]) -> None:
    """Refuses to use shards whose memory is released.

    Raises:
        AsleepError: before anything is launched.
    """
    for unit in units:  # another root may share one of them
        if unit.is_asleep:
            raise AsleepError.of(f"the model {type(unit.modules[0]).__name__}")


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit of a module that `fully_shard` was called on, else None."""
    unit: Unit | None = module.__dict__.get(UNIT)
    return unit


def units_under(module: nn.Module) -> list[Unit]:
    """Returns each unit of a module tree once, in traversal order, the module's own first."""
    found: dict[Unit, None] = {}
    seen: set[Any] = {None}  # None: a child module that was set to None
    # Runs for every micro-batch; a manual traversal is five times as fast as `modules()`.
    left: list[Any] = [module]
    while left:
        child = left.pop()
        if child not in seen:
            seen.add(child)
            if UNIT in child.__dict__:
                found[child.__dict__[UNIT]] = None
            left += reversed(child._modules.values())
    return list(found)
