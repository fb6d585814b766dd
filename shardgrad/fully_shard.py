"""The public function: checks, builds, commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardgrad.checks.argument_types import refuse_wrong_types
from shardgrad.checks.lost_work import refuse_hooks
from shardgrad.checks.misuse import guard_owner
from shardgrad.checks.optimizer_hooks import watch_optimizers
from shardgrad.checks.padding import warn_of_padding
from shardgrad.checks.unowned_params import UnownedParams, note_ignored
from shardgrad.compat.torch_views import show_to_torch, state_of
from shardgrad.engine.all_gather import AllGatherInput
from shardgrad.engine.collect import (
    Claim,
    Collected,
    collect,
    refuse_unresolved_ties,
    validate_modules,
)
from shardgrad.engine.comm_context import SecondStep
from shardgrad.engine.hooks import HookedUnit
from shardgrad.engine.param import CLAIM, FSDPParam, is_extension, mark_sharded
from shardgrad.engine.param_group import GroupSpec, ParamGroup
from shardgrad.engine.unit import Unit, attach_unit
from shardgrad.errors import OptionError, UnsupportedParameterError, unsupported
from shardgrad.features.param_dtypes import (
    ParamDtypes,
    dtypes_of,
    keep_grad_dtypes,
    refuse_late_grad_dtypes,
    refuse_unknown_fields,
    without_override,
)
from shardgrad.module import swap_class
from shardgrad.ops.library import check_kernels
from shardgrad.policies import GradientPolicy, SleepPolicy
from shardgrad.sharding.byte_params import is_float8, travels_as_bytes
from shardgrad.sharding.dtensor import require_own_shards, require_shards
from shardgrad.sharding.mesh import DataParallelMesh, default_mesh
from shardgrad.sharding.offload import ShardMemory
from shardgrad.sharding.placement import Place, places_of, travel_together
from shardgrad.sharding.zero_stage import Stage

__all__ = ["fully_shard"]

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)
_ModulesT = TypeVar("_ModulesT", nn.Module, list[nn.Module])


def fully_shard(
    module: _ModulesT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    gradient_policy: GradientPolicy = GradientPolicy(),
    zero_stage: Literal[1, 2, 3, "auto", "hfsdp"] = 3,
) -> _ModulesT:
    """Shards a module's parameters, gradients and optimizer states over the ranks of a mesh, in
    place.

    Takes what `torch.distributed.fsdp.fully_shard` takes. Apply it bottom-up: a call owns the
    parameters below it that no inner call owns, and they travel in one collective for each dtype
    and mesh. Parameters that tensor or expert parallelism has made DTensors of are sharded further,
    along the axes of `mesh`.

    Inner modules first, the root last, and the optimizer after that:

        for block in model.blocks:
            shardgrad.fully_shard(block)
        shardgrad.fully_shard(model)
        optimizer = shardgrad.optim.AdamW(model.parameters())

    Args:
        module: the module, or a list of modules that form one unit.
        mesh: 1-D to shard over it (FSDP); 2-D with axis names to replicate over axis 0 and shard
            over axis 1 (HSDP). None means 1-D over all ranks.
        reshard_after_forward: True frees unsharded parameters after forward and gathers them again
            in backward; False keeps them; an int keeps them sharded over that many neighbouring
            ranks. None means True, except for the root and, on the CPU, the unit that ran last,
            which backward needs at once: on a device its memory would add to the peak of the loss.
        shard_placement_fn: per parameter, the dim it is sharded on, as `Shard(dim)`, or None for
            `Shard(0)`; or torch's `ShardPlacementResult`, which names a mesh too. Only dim 0 may be
            sharded unevenly.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: `CPUOffloadPolicy` keeps parameter shards, gradients and optimizer states in
            host memory; `SleepPolicy` where `shardgrad.sleep` can give them back; the base class
            does neither.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced.
        dp_mesh_dims: torch's `DataParallelMeshDims`: which axes of `mesh` are data-parallel, if it
            has others and the parameters are DTensors on all of it.
        gradient_policy: where reduced gradients are bound, in which dtype, and in which they
            travel; not in FSDP2.
        zero_stage: 3 shards parameters, gradients and optimizer states; 2 keeps parameters
            unsharded from one optimizer step to the next; 1 also sums unsharded gradients until the
            last backward (`set_is_last_backward`); "auto" keeps as many units unsharded as memory
            is left for after the first step; "hfsdp" shards everything over both axes of an HSDP
            mesh. Not in FSDP2.

    Returns:
        The module or list it got. Its class is now `FSDP<Original>`, its parameters are DTensors.

    Raises:
        ShardgradError: a subclass for each kind of bad input; the module is left as it was.

    Streams: none are made; shards are filled on the current stream.
    Capture: not safe; it allocates.
    """
    arg: Any = module
    modules: list[nn.Module] = list(arg) if isinstance(arg, list | tuple) else [arg]
    validate_modules(modules)
    offload_policy = offload_policy or OffloadPolicy()
    _refuse_unsupported(mp_policy, offload_policy)
    ignored = set(ignored_params or ())
    refuse_wrong_types(mp_policy, gradient_policy, ignored)
    stage = Stage.of(zero_stage, reshard_after_forward)
    data_mesh = _data_mesh(mesh, dp_mesh_dims)
    if stage.over_both_axes:
        if dp_mesh_dims is not None:
            raise unsupported('zero_stage="hfsdp" with dp_mesh_dims', instead="zero_stage=3")
        data_mesh = data_mesh.over_both_axes()
    check_kernels(data_mesh.device.type)
    memory = ShardMemory.of(data_mesh.device, offload_policy)
    collected = collect(modules, ignored, data_mesh)
    names = {param: name for param, (name, _) in collected.params.items()}
    if stage.over_both_axes:
        _refuse_two_levels(names)
    places = places_of(names, data_mesh, shard_placement_fn)
    dtypes = dtypes_of(names, lambda p: (p.dtype, places[p].mesh), mp_policy, gradient_policy)
    refuse_hooks(names.items())
    _refuse_combinations(names, places, reshard_after_forward, stage, memory, dtypes)
    flag, _ = _reshard_plan(reshard_after_forward, data_mesh)
    grouped = travel_together(places, lambda p: (is_extension(p), dtypes[p]))
    groups = []
    for originals in grouped:
        group_mesh = places[originals[0]].mesh
        params = [
            FSDPParam(names[p], collected.params[p][1], tuple(p.shape), p, places[p].sharding)
            for p in originals
        ]
        spec = GroupSpec(
            group_mesh,
            dtypes[originals[0]].mp_policy,
            dtypes[originals[0]].gradient_policy,
            memory,
            stage,
            all_gather_input=_all_gather_input(stage, memory),
            second_step=_second_step(group_mesh, gradient_policy.wire_dtype),
            regroup=_regroup,
        )
        smaller = _reshard_plan(reshard_after_forward, group_mesh)[1]
        groups.append(_group(params, spec, smaller, type(modules[0]).__name__))
    unit = HookedUnit(modules, groups, data_mesh, without_override(mp_policy), flag)
    note_ignored(collected.managed_modules, ignored)
    unit.before_outermost_forward = UnownedParams(unit).refuse
    if stage.decides:
        from shardgrad.features.zero_stage_auto import StageAuto

        unit.before_outermost_forward = StageAuto(unit, unit.before_outermost_forward)
    unit.accept = _accept
    _commit(unit, collected, grouped)
    return module


def _accept(units: Sequence[Unit]) -> None:
    """Refuses, at lazy init, units that share parameters, or whose weights differ between ranks."""
    refuse_unresolved_ties(units)
    if any(group.mesh.data_parallel_size > 1 for unit in units for group in unit.groups):
        from shardgrad.checks.same_weights import compare_weights

        compare_weights(units)


# -- where strategies are chosen; a feature is imported by who asks for it


def _second_step(
    mesh: DataParallelMesh, wire_dtype: torch.dtype | None
) -> Callable[[], SecondStep] | None:
    """Returns what makes the step behind a reduce-scatter, if the mesh has another dim to reduce
    over.
    """
    levels, replicas = mesh.levels, mesh.replicate_group
    if levels is not None:
        from shardgrad.features.hfsdp import OuterReduceScatter
        from shardgrad.features.wire_dtype import OuterExchange

        if wire_dtype is not None and levels.outer.size() > 1:
            return partial(OuterExchange, levels, wire_dtype)
        return partial(OuterReduceScatter, levels)
    if replicas is None:
        return None
    from shardgrad.features.hsdp import ReplicaAllReduce
    from shardgrad.features.wire_dtype import ReplicaExchange

    if wire_dtype is not None and replicas.size() > 1:
        return partial(ReplicaExchange, replicas, wire_dtype)
    return partial(ReplicaAllReduce, replicas)


@torch.inference_mode(mode=False)  # what it makes is for training
def _group(
    params: list[FSDPParam],
    spec: GroupSpec,
    mesh_after_forward: DataParallelMesh | None,
    kind: str,
) -> ParamGroup:
    """Returns the kind of group that parameters need, with their values in its shard."""
    original = params[0].sharded
    group: ParamGroup
    if is_extension(original):
        from shardgrad.features.tensor_extensions import ExtensionGroup

        group = ExtensionGroup(params, spec)
    elif mesh_after_forward is not None and not travels_as_bytes(original.dtype):
        from shardgrad.features.post_forward import PostForwardGroup

        group = PostForwardGroup(params, spec, mesh_after_forward)
    else:
        group = ParamGroup(params, spec)
    if spec.gradient_policy.wire_dtype is not None:
        from shardgrad.features.wire_dtype import exchange_gradients

        exchange_gradients(group)
    warn_of_padding(group.layout_of(params, with_flags=False), original.itemsize, kind)
    if spec.mesh.data_parallel_size > 1:
        from shardgrad.checks.same_weights import weights_before

        note = weights_before(params)
        group.shard_params()
        note()
    else:
        group.shard_params()
    keep_grad_dtypes(group)
    return group


def _regroup(group: ParamGroup) -> Callable[[], list[ParamGroup]] | None:
    """At lazy init, refuses what has come too late, and gives new extensions a separate group."""
    refuse_late_grad_dtypes(group)
    if not any(is_extension(param) for p in group.params for param in p.registered()):
        return None
    from shardgrad.features.tensor_extensions import regroup

    return regroup(group)


def _all_gather_input(stage: Stage, memory: ShardMemory) -> type[AllGatherInput]:
    """Returns what makes the input of all-gathers: from the device or the host, over one axis or
    two.
    """
    if stage.over_both_axes:
        from shardgrad.features.hfsdp import HfsdpInput, OffloadedHfsdpInput

        return OffloadedHfsdpInput if memory.is_offloaded else HfsdpInput
    if memory.is_offloaded:
        from shardgrad.features.offload import OffloadedInput

        return OffloadedInput
    return AllGatherInput


# -- what is refused


def _refuse_unsupported(mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise OptionError(
            "mp_policy must be a MixedPrecisionPolicy",
            expected="torch.distributed.fsdp.MixedPrecisionPolicy",
            got=repr(mp_policy),
            fix="mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
            "reduce_dtype=torch.float32)",
        )
    if type(offload_policy) not in (OffloadPolicy, CPUOffloadPolicy, SleepPolicy):
        raise unsupported(
            type(offload_policy).__name__,
            instead="offload_policy=CPUOffloadPolicy() or OffloadPolicy()",
        )
    for policy in (mp_policy, offload_policy):
        refuse_unknown_fields(policy)


def _data_mesh(mesh: DeviceMesh | None, dims: Any) -> DataParallelMesh:
    mesh = mesh or default_mesh()
    if dims is None or not isinstance(mesh, DeviceMesh):
        return DataParallelMesh.of(mesh)
    if not hasattr(dims, "shard_names") or not hasattr(dims, "replicate_names"):
        raise OptionError(
            "dp_mesh_dims must be a DataParallelMeshDims",
            expected="torch.distributed.fsdp.DataParallelMeshDims, or None",
            got=repr(dims),
            fix="dp_mesh_dims=DataParallelMeshDims(shard='dp')",
        )
    return DataParallelMesh.of_named_axes(mesh, dims)


def _refuse_combinations(
    names: Mapping[nn.Parameter, str],
    places: Mapping[nn.Parameter, Place],
    reshard_after_forward: bool | int | None,
    stage: Stage,
    memory: ShardMemory,
    dtypes: Mapping[nn.Parameter, ParamDtypes],
) -> None:
    """Refuses parameters that some other argument of the call does not go together with."""
    is_int = isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)
    for param, place in places.items():
        name = names[param]
        if stage.over_both_axes and (place.sharding.dim or place.mesh.levels is None):
            what = f"dim {place.sharding.dim}" if place.sharding.dim else "a separate mesh"
            raise unsupported(
                f'zero_stage="hfsdp" for {name}, cut on {what},', instead="zero_stage=3"
            )
        if is_int and place.sharding.came_as_dtensor:
            raise unsupported(
                f"reshard_after_forward as an int for {name}, which is a DTensor already",
                instead="reshard_after_forward=True or False",
            )
        if is_extension(param):
            from shardgrad.features.tensor_extensions import require_extension

            require_extension(param, name, reshard_after_forward, memory)
        elif is_float8(param.dtype) and dtypes[param].mp_policy.param_dtype not in (
            None,
            param.dtype,
        ):
            raise UnsupportedParameterError(
                f"parameter {name} is {param.dtype}, which is gathered as it is and not cast",
                expected="mp_policy.param_dtype=None for units with float8 parameters",
                got=f"param_dtype={dtypes[param].mp_policy.param_dtype}",
                where=f"parameter {name}",
                fix="a separate unit without mp_policy, or pass it in ignored_params",
            )


def _refuse_two_levels(names: Mapping[nn.Parameter, str]) -> None:
    """Over two levels there are only plain parameters; their rows follow each other from rank to
    rank.
    """
    for param, name in names.items():
        if is_extension(param) or isinstance(param, DTensor):
            what = "has fsdp_pre_all_gather" if is_extension(param) else "is a DTensor already"
            raise unsupported(
                f'zero_stage="hfsdp" for {name}, which {what},', instead="zero_stage=3"
            )


def _reshard_plan(
    reshard_after_forward: bool | int | None, mesh: DataParallelMesh
) -> tuple[bool | None, DataParallelMesh | None]:
    """Returns the unit's flag, and the smaller mesh of an int reshard."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, None
    if not isinstance(reshard_after_forward, int):
        raise OptionError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {reshard_after_forward!r}",
            expected="None, True, False, or an int",
            got=type(reshard_after_forward).__name__,
            fix="reshard_after_forward=True",
        )
    if reshard_after_forward == mesh.shard_size:
        return True, None
    smaller = mesh.subdivide(reshard_after_forward)
    # One rank holding everything is the same as not resharding at all.
    return (False, None) if reshard_after_forward == 1 else (True, smaller)


@torch.inference_mode(mode=False)
def _commit(unit: HookedUnit, collected: Collected, params: Iterable[list[nn.Parameter]]) -> None:
    """Makes the changes. Nothing here raises on user input."""
    watch_optimizers(unit.modules)
    if dist.get_world_size() > 1:
        from shardgrad.diagnosis.watchdog import watch_ranks

        watch_ranks(unit.mesh.device)
    _take_inherited(collected.inherited)
    for group, originals in zip(unit.groups, params, strict=True):
        for p, original in zip(group.params, originals, strict=True):
            original.__dict__[CLAIM] = Claim(unit, p)
            mark_sharded(p)
            p.register(p.sharded)
    for module, name in collected.buffers:
        buffer = module._buffers[name]
        if buffer is not None and buffer.device.type not in ("meta", unit.mesh.device.type):
            module._buffers[name] = buffer.to(unit.mesh.device)
    unit.guests = collected.guests
    for each in collected.inner_units:
        each.guests = []
    attach_unit(unit)
    show_to_torch(unit)
    _install_hooks(unit, collected.managed_modules)
    for module in unit.modules:
        swap_class(module)


def _take_inherited(claims: Sequence[Claim]) -> None:
    """Removes from inner units the parameters that their common ancestor owns now."""
    leaving: dict[Unit, list[Any]] = {}
    for claim in claims:
        leaving.setdefault(claim.unit, []).append(claim.managed)
    for inner, params in leaving.items():
        smaller = [group.without(params) for group in inner.groups]
        inner.set_groups([group for group in smaller if group is not None])


def _install_hooks(unit: Unit, managed_modules: Sequence[nn.Module]) -> None:
    """Guards inner modules, and keeps state dicts and loading on the sharded parameters.

    Modules of inner units too, where they register a parameter that this unit owns since it is
    tied.
    """

    def to_shards(*_: Any, **__: Any) -> None:
        unit.reshard()

    def to_own_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        unit.reshard()
        names = [prefix + name for name, p in module._parameters.items() if isinstance(p, DTensor)]
        given = [(name, state[name]) for name in names if name in state]
        require_shards(given)
        require_own_shards(given)

    def take_over(*_: Any, **__: Any) -> None:
        from shardgrad.engine.replaced_params import adopt

        for group in unit.groups:
            adopt(group)

    owners = (owner for group in unit.groups for p in group.params for owner, _ in p.owners)
    for module in dict.fromkeys([*managed_modules, *owners]):
        # Names that Dynamo looks for, to treat parameters as something that changes under its feet.
        module.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
        if any(param is not None for param in module._parameters.values()):
            module.register_state_dict_pre_hook(to_shards)
            module.register_load_state_dict_pre_hook(to_own_shards)
            if module not in unit.modules:
                guard_owner(module, partial(unit.group_owning, module))
    for module in unit.modules:
        module.register_load_state_dict_post_hook(take_over)


# As torch's `contract` does for its own: the view of a sharded module's unit, None for another.
fully_shard.state = state_of  # type: ignore[attr-defined]
