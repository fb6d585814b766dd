"""`FSDPModule`, the class that a sharded module gets, with its methods."""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from types import new_class
from typing import Any, ClassVar, Generic, Literal, NoReturn, TypeVar, cast

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.fsdp import UnshardHandle

from shardgrad.compat.torch_views import StateView, state_of
from shardgrad.engine.calls import like_forward
from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.lazy_init import lazy_init
from shardgrad.engine.tracing import outside_graphs
from shardgrad.engine.unit import UNIT, Unit, require_awake, units_under
from shardgrad.errors import (
    DeepcopyError,
    EngineError,
    ForwardMethodError,
    OptionError,
    OptionTypeError,
    PickleError,
)
from shardgrad.policies import GradientReductionHandle

_sharded_classes: dict[type, type] = {}


def swap_class(module: nn.Module) -> None:
    """Turns `module` into an `FSDP<Original>`, whose MRO is (itself, FSDPModule, Original, ...)."""
    cls = type(module)
    sharded = _sharded_classes.get(cls)
    if sharded is None:
        # FSDP2's own class comes last in the bases: `isinstance` holds, and index 2 of the MRO is
        # the original class, as Dynamo expects.
        bases = (_laid_out_like(cls), cls, torch_fsdp.FSDPModule)
        sharded = _sharded_classes[cls] = type(
            f"FSDP{cls.__name__}", bases, {"__deepcopy__": _refuse_deepcopy}
        )
    module.__class__ = sharded
    # With this registration, torch's composable `replicate` skips such modules as children and
    # refuses them as roots.
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


def _laid_out_like(cls: type) -> type:
    """Returns `FSDPModule`, or a subclass of it whose instances have the memory layout of `cls`.

    Python allows assigning `__class__` only between classes of the same layout, which is decided by
    the class that adds the `__dict__`. Usually that is `nn.Module`. A base without a `__dict__` in
    front of it (ABC, Generic, Protocol, a mixin with empty `__slots__`) has to come first here as
    well.
    """
    adds_dict, first = cls, cls.__base__
    while first is not None and first.__dictoffset__:
        adds_dict, first = first, first.__base__
    if first is object or first is None:
        return FSDPModule
    if adds_dict is not cls:
        first = adds_dict
    own = {
        name: member
        for name, member in vars(FSDPModule).items()
        if name not in ("__dict__", "__weakref__")
    }
    # A class cannot derive from Generic without a parameter.
    bases: tuple[Any, ...] = (first, FSDPModule)
    if cast(Any, first) is Generic:
        bases = (Generic[TypeVar("T")], FSDPModule)
    return new_class(FSDPModule.__name__, bases, exec_body=lambda members: members.update(own))


def _refuse_deepcopy(self: nn.Module, memo: Any) -> NoReturn:
    raise DeepcopyError(
        "FSDP does not support deepcopy. Please use state dict for serialization.",
        expected="copy.deepcopy before fully_shard, or state_dict()",
        got=f"copy.deepcopy of {type(self).__name__}",
        fix="build a second model, shard it the same way, and "
        "second.load_state_dict(model.state_dict())",
    )


def _start_unshard(unit: Unit) -> CommContext:
    """Starts the all-gather of a unit's parameters as they are now, after the current stream."""
    context = lazy_init(unit)
    require_awake(context.units)
    unit.refresh()
    context.parameters_written()
    unit.unshard(context.comm_ctx)
    return context.comm_ctx


class _UnshardHandle(UnshardHandle):
    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Makes the parameters unsharded for the current stream. Further calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is None:
            return
        # Again, because a forward since then may have skipped this unit and dropped the prefetch,
        # or a step may have changed the parameters.
        comm_ctx = _start_unshard(unit)
        unit.stays_unsharded = True
        unit.wait_for_unshard(comm_ctx)


class _NothingForDDP:
    """Raises when DDP iterates over the names of parameters to ignore."""

    def __iter__(self) -> NoReturn:
        raise EngineError(
            "DistributedDataParallel wraps a sharded module, which reduces its gradients itself",
            expected="one engine",
            got="DistributedDataParallel(a sharded module)",
            fix="remove DDP; for replicas of shards, fully_shard over a 2-D mesh (HSDP)",
        )


class FSDPModule:
    """The methods of a sharded module, with the names and meanings of FSDP2's.

    A sharded module is an instance of this class, of its original class, and of
    `torch.distributed.fsdp.FSDPModule`.

    For example, to reduce gradients once for two micro-batches:

        model.set_requires_gradient_sync(False)
        model(first).mean().backward()
        model.set_requires_gradient_sync(True)
        model(second).mean().backward()
    """

    _orig_cls_mro_index = 2

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds the original class, so that slicing a sharded container returns a plain one."""
        original = cls.__mro__[cls._orig_cls_mro_index]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward. If it raises, the forward is abandoned and its parameters are resharded."""
        original: Any = type(self).__mro__[self._orig_cls_mro_index]
        unit: Unit = self.__dict__[UNIT]
        running = len(unit.running)
        try:
            return original.__call__(self, *args, **kwargs)
        except BaseException:  # includes Ctrl-C; no forward hook runs on an exception
            unit.forward_failed(running)
            raise

    # -- unsharding and resharding

    def reshard(self) -> None:
        """Frees this unit's unsharded parameters and registers the sharded ones. Not recursive."""
        unit = self._unit
        unit.reshard(drop_kept=True)
        if unit.context is not None:
            unit.context.comm_ctx.shards_read.wait_on_host()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers this unit's parameters. Not recursive; a collective.

        After the wait they stay unsharded, also after a forward with grad enabled, until a backward
        or `reshard` reshards them. A pipeline stage needs this: it runs backward in two parts, and
        both need unsharded parameters.

        Args:
            async_op: return a handle without waiting; the next forward also waits for the
                all-gather.

        Streams: the all-gather starts after the work already queued on the current stream.
        """
        handle = _UnshardHandle(self._unit)
        if async_op:
            _start_unshard(self._unit)
            return handle
        handle.wait()
        return None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """True keeps the memory, and so the addresses, of unsharded parameters across reshards."""
        for unit in self._units(recurse):
            for group in unit.groups:
                group.keeps_memory = keep

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False skips the all-gather in backward, which an embedding does not need."""
        self._unit.unshard_in_backward = unshard_in_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Changes `reshard_after_forward`, also that of the root.

        Raises:
            OptionError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise OptionError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}",
                expected="True or False",
                got=repr(reshard_after_forward),
                fix="pass an int to fully_shard itself to reshard to fewer ranks",
            )
        for unit in self._units(recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """False keeps parameters unsharded from one micro-batch's backward to the next forward."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the units to prefetch in this unit's forward, instead of the recorded next one."""
        self._unit.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets the units to prefetch in this unit's backward, instead of the default one."""
        self._unit.backward_prefetch = _units_of(modules)

    # -- reducing gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False lets a device go on after a backward while reductions are still in flight.

        Gradients are bound, but wait for the next backward that is the last before you read them.
        The backward waits all the same if this rank has not touched every parameter of a unit, or
        if shards are on the host.

        Stages 1 and 2 of `zero_stage` then keep unsharded parameters.
        """
        from shardgrad.compat.backward_finalization import set_is_last_backward

        set_is_last_backward(self._unit, is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """True leaves gradients accumulated, or reductions in flight, until `finalize_backward`.

        Call it on the root, before forward; it is a collective if nothing has run yet. With False,
        `set_is_last_backward` takes effect again.

        Raises:
            RootError: not the root.
            BackwardFinalizationError: a backward is running, or has left unreduced gradients.
        """
        from shardgrad.compat.backward_finalization import set_manual

        set_manual(self._unit, enabled)

    @outside_graphs
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduces the gradients that backwards have left, and reshards, by the current settings.

        Call it on the root, after `set_manual_backward_finalization(True)` and all backwards. A
        collective.

        Args:
            async_op: return a handle without waiting; call its `wait` before using the gradients.

        Streams: as in a backward; the current stream waits for the gradients, here or in `wait`.

        Raises:
            RootError: not the root.
            BackwardFinalizationError: this mode is off, a backward is running, or an earlier call
                was not waited for.
        """
        from shardgrad.compat.backward_finalization import finalize

        return finalize(self._unit, async_op=async_op)

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False accumulates gradients on each rank, in the reduce dtype, without communication."""
        for unit in self._units(recurse):
            unit.reductions.requires_sync = requires_gradient_sync
            unit.reductions.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False, under HSDP, skips the all-reduce and keeps the reduce-scattered partial sum."""
        for unit in self._units(recurse):
            unit.reductions.requires_all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides this unit's summed gradients by `factor` instead of the number of ranks.

        Raises:
            OptionError: zero or negative.
        """
        value: Any = factor
        if not isinstance(value, Real | torch.Tensor) or not factor > 0:
            raise OptionError(
                "the gradient divide factor must be positive",
                expected="a number above 0",
                got=repr(factor),
                fix="set_gradient_divide_factor(1.0) to sum instead of averaging",
            )
        self._unit.reductions.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Passes sums instead of averages to the all-reduce hook.

        Also lets reductions use symmetric memory; see `set_symm_mem_for_comm`. Collectives do not
        change: the engine always sums, and divides at the end.
        """
        self._set_collectives(only_sums=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Has no effect: unused parameters send zeros, and keep None if no rank used them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters below, whether their units are sharded or
        unsharded.

        Also drops gradients of micro-batches that wait unreduced on this rank, or whose reductions
        are in flight. In plain torch they would be in `.grad`. FSDP2 inherits torch's method, which
        resets the registered parameters only, and keeps both.

        Streams: writes zeros, if any, on the current stream.
        Capture: safe.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in self._units(recurse=True):
            for grads in unit.grad_groups:
                grads.drop_waiting()
                shard = grads.shard
                if shard is not None:
                    if set_to_none:
                        shard.unbind()
                    else:
                        shard.zero(range(shard.count))

    def reset_iter_state(self) -> None:
        """Clears an iteration that an exception cut short. The next forward would do the same.

        Raises:
            RootError: not called on the root.
        """
        from shardgrad.compat.backward_finalization import require_root

        context = self._unit.context
        if context is not None:
            require_root(self._unit, context, "reset_iter_state")
            context.recover()

    # -- collectives

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers this unit's parameters through an object with torch's `AllGather` protocol.

        The engine calls its `allocate` for bytes (uint8), once for the most that the unit needs.
        The call itself gets an input that is a part of the output. Under `zero_stage="hfsdp"` the
        object serves both mesh axes. It is not called for a group of one rank.
        """
        self._set_collectives(all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces this unit's gradients through an object with torch's `ReduceScatter` protocol.

        The engine always requests a sum, and divides when it writes the gradients. See
        `set_custom_all_gather` for memory.

        Raises:
            CustomCommError: the unit's gradients have a `wire_dtype`.
        """
        from shardgrad.features.wire_dtype import refuse_own_reduce_scatter

        for group in self._unit.groups:
            refuse_own_reduce_scatter(group, comm)
        self._set_collectives(reduce_scatter=comm)

    def set_all_gather_layout(self, layout: Any) -> None:
        """Accepts torch's own layouts (torch 2.16) without effect.

        They only choose how to make copies that the engine makes in its own way.

        Raises:
            UnsupportedError: a custom layout, or one with its own collective or output function.
        """
        from shardgrad.features.custom_comms import require_torchs

        parts = (getattr(layout, name, None) for name in ("comm", "output_fn"))
        require_torchs("set_all_gather_layout", type(layout), *parts)

    def set_reduce_scatter_input_fn(self, fn: Any) -> None:
        """Accepts torch's own functions (torch 2.16) without effect; see `set_all_gather_layout`.

        Raises:
            UnsupportedError: a custom function.
        """
        from shardgrad.features.custom_comms import require_torchs

        require_torchs("set_reduce_scatter_input_fn", fn)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Calls `hook` with each reduced gradient chunk of this unit before gradients are written.

        Args:
            hook: called once per group and reduction with a 1-D tensor in the reduce dtype: this
                rank's pieces, with padding between them. It may change the tensor in place. The
                values are the average over all ranks of the mesh; in float16, or after
                `set_force_sum_reduction_for_comms(True)`, they are the sum, which is divided
                afterwards.
            stream: the stream to call it on; None for the stream of reductions. Not under HSDP.

        Streams: the hook's stream waits for the reduction, and the gradients wait for the hook.

        Raises:
            OptionError: a stream under HSDP.
        """
        if stream is not None and self._unit.mesh.replicate_group is not None:
            raise OptionError(
                "stream cannot be set when using native HSDP",
                expected="stream=None",
                got=repr(stream),
                fix="set_all_reduce_hook(hook), which runs on the stream of the reductions",
            )
        self._set_collectives(hook=hook, hook_stream=stream)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the next forward's all-gathers wait for `event` instead of the whole current
        stream.

        Applies to one forward of the root. Later ones wait for the current stream again, or for
        another event.

        Args:
            event: recorded after the optimizer's step. If parameters were replaced since, the
                all-gathers wait for the current stream as well.
        """
        lazy_init(self._unit).post_optim_event = event

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Sets how many reductions may be in flight at once; 2 if never set (FSDP2: 1).

        Units under one root share their slots, so the largest number that any of them sets applies.

        Raises:
            OptionTypeError: not an int.
            OptionError: below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise OptionTypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}",
                expected="an int",
                got=repr(max_input_buffers),
                fix="set_reduce_scatter_max_input_buffers(2)",
            )
        if max_input_buffers < 1:
            raise OptionError(
                f"max_input_buffers must be a positive int, got {max_input_buffers}",
                expected="at least 1",
                got=repr(max_input_buffers),
                fix="set_reduce_scatter_max_input_buffers(1)",
            )
        for unit in self._units(recurse):
            unit.max_reductions = max_input_buffers
            if unit.context is not None:
                unit.context.size_reduce_ring()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Gives reductions their own process group, so that they may overlap with all-gathers.

        Creates one process group for each set of ranks. A collective: every rank of the mesh must
        call it.
        """
        from shardgrad.features.custom_comms import separate_reductions

        separate_reductions(
            [group for unit in self._units(recurse) for group in unit.groups], enable=enable
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Allocates this unit's communication buffers from the process group, if its backend can.

        Other backends, such as gloo, use ordinary memory.

        Raises:
            CustomCommError: the unit has custom collectives.
        """
        from shardgrad.features.custom_comms import stage_in_memory_of_process_group

        stage_in_memory_of_process_group(self._unit, enable=enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Stages all-gathers in symmetric memory, and reductions as well if they only sum.

        For reductions, call `set_force_sum_reduction_for_comms(True)` first, as with FSDP2. A
        collective.

        Raises:
            CustomCommError: the unit has custom collectives.
            RuntimeError: from torch, if it was built without this symmetric memory backend.
        """
        from shardgrad.features.custom_comms import stage_in_symmetric_memory

        stage_in_symmetric_memory(self._unit, backend)

    def _set_collectives(self, **settings: Any) -> None:
        from shardgrad.features.custom_comms import set_collectives

        set_collectives(self._unit.groups, **settings)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Has no effect: all-gathers are always asynchronous, and slots order them."""

    # -- copying, pickling and DDP

    def __copy__(self) -> nn.Module:
        """Returns a module of the original class that shares parameters and submodules."""
        original: Any = type(self).__mro__[self._orig_cls_mro_index]
        copied: nn.Module = original.__new__(original)
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to pickle a sharded module.

        Raises:
            PickleError: always.
        """
        raise PickleError(
            f"a sharded module cannot be pickled: {type(self).__name__}",
            expected="its state dict, since each rank has a part of the parameters",
            got="torch.save(model), pickle, or a process spawned with the model",
            fix="torch.save(model.state_dict(), a path per rank), or shardgrad.checkpoint.save",
        )

    # DistributedDataParallel reads this attribute first. Nothing else reads it.
    _ddp_params_and_buffers_to_ignore: ClassVar[Iterable[str]] = _NothingForDDP()

    # -- internal

    @property
    def _unit(self) -> Unit:
        unit: Unit = self.__dict__[UNIT]
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        return units_under(cast(nn.Module, self)) if recurse else [self._unit]

    def _get_fsdp_state(self) -> StateView | None:
        return state_of(cast(nn.Module, self))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Implements `module.to()` and the like: moves the shards, then adopts their storage."""
        from shardgrad.engine.replaced_params import adopt

        self.reshard()
        for grads in self._unit.grad_groups:
            grads.join()  # gradients in flight come in the dtype that the parameters still have
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self._unit.groups:
            # The modules of a list move one after another; their unit adopts them after the last
            # one.
            if len({(p.dtype, p.device) for each in group.params for p in each.registered()}) == 1:
                adopt(group)
        return result


def _units_of(modules: Sequence[Any]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise OptionError(
                f"Expects list of FSDPModules but got {module}",
                expected="modules that fully_shard was called on",
                got=type(module).__name__,
                fix="fully_shard(module) first",
            )
    return [module._unit for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a sharded module unshard and reshard as forward does. No-op otherwise.

    A method needs this if it reads a parameter directly, not through a submodule that it calls. For
    example, a loss that reads the weight of the model's head:

        shardgrad.register_fsdp_forward_method(model, "compute_loss")
        model.compute_loss(batch).backward()

    Args:
        module: the module. Nothing happens if it is not sharded.
        method_name: for example "loss" or "generate".

    Raises:
        ForwardMethodError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None or not callable(method):
        raise ForwardMethodError(
            f"{type(module).__name__} does not have a method {method_name}",
            expected="the name of a method",
            got=repr(method_name),
            fix=f"one of {difflib.get_close_matches(method_name, dir(module), n=3, cutoff=0.3)}",
        )
    module.__dict__[method_name] = like_forward(module._unit, module, method)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Makes several roots share streams, staging memory and transports, as pipeline stages do.

    Call it before the first forward:

        shardgrad.share_comm_ctx([first_stage, last_stage])

    Args:
        modules: sharded modules that are roots, or will be. Their collectives in flight are
            completed.

    Raises:
        OptionError: one of them is not sharded.
    """
    units = _units_of(modules)
    if not units:
        return
    contexts = [unit.context for unit in units if unit.context is not None]
    lead = contexts[0].comm_ctx if contexts else CommContext(units[0].mesh.device)
    for unit in units:
        unit.partner = lead
    for context in contexts:
        context.use(lead)
