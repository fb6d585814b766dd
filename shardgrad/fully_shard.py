"""`fully_shard`: checks the arguments, builds the unit, then changes the module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardgrad.checks.arguments import (
    refuse_combinations,
    refuse_two_levels,
    refuse_wrong_types,
)
from shardgrad.checks.lost_work import refuse_hooks
from shardgrad.checks.optimizer_hooks import watch_optimizers_of
from shardgrad.checks.unowned_params import UnownedParams, note_ignored
from shardgrad.compat.torch_views import show_to_torch, state_of
from shardgrad.engine.calls import forward_around
from shardgrad.engine.comm_context import SecondStep
from shardgrad.engine.lazy_init import lazy_init
from shardgrad.engine.managed_params import (
    collect,
    modules_under,
    refuse_unresolved_ties,
    validated,
)
from shardgrad.engine.param_group import (
    CLAIM,
    AllGather,
    FSDPParam,
    GroupSpec,
    ParamGroup,
    is_claimed,
    is_extension,
    mark,
    unmark,
)
from shardgrad.engine.tracing import NOTHING
from shardgrad.engine.unit import UNIT, Unit, unit_of, units_under
from shardgrad.errors import MeshError, OptionError, unsupported
from shardgrad.module import swap_class
from shardgrad.ops.library import check_kernels
from shardgrad.policies import REDUCES_IN_GRAD_DTYPE, GradientPolicy, ParamDtypes
from shardgrad.sharding.dtensor import require_own_shards, require_shards
from shardgrad.sharding.mesh import DataParallelMesh, default_mesh
from shardgrad.sharding.offload import ShardMemory
from shardgrad.sharding.param_sharding import ParamSharding, shardings_of
from shardgrad.sharding.shardable import require_one_device, travels_as_bytes
from shardgrad.sharding.zero_stage import Stage

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
    comm: Literal["collectives", "symmetric_memory"] = "collectives",
) -> _ModulesT:
    """Shards a module's parameters, gradients and optimizer states in place over a mesh of ranks.

    Takes the arguments of `torch.distributed.fsdp.fully_shard`. Apply it bottom-up: each call owns
    the parameters below its module that no inner call owns. These travel in one collective per
    dtype and mesh; large ones have their own. Parameters that tensor or expert parallelism has
    turned into DTensors are sharded further, along the axes of `mesh`.

    Shard the inner modules first and the root last, then build the optimizer:

        for block in model.blocks:
            shardgrad.fully_shard(block)
        shardgrad.fully_shard(model)
        optimizer = shardgrad.optim.AdamW(model.parameters())

    Args:
        module: the module, or a list of modules that form one unit.
        mesh: 1-D to shard over it (FSDP); 2-D with axis names to replicate over axis 0 and shard
            over axis 1 (HSDP). None means 1-D over all ranks.
        reshard_after_forward: True frees unsharded parameters after forward and gathers them again
            in backward; False keeps them; an int keeps them sharded over that many neighboring
            ranks. None means True, except for the root and, on the CPU, for the unit that ran last,
            which backward needs first. On a device, keeping that unit would add its memory to the
            peak at the loss.
        shard_placement_fn: returns, for a parameter, the dim to shard as `Shard(dim)`, None for
            `Shard(0)`, or torch's `ShardPlacementResult`, which also names a mesh. Only dim 0 may
            be sharded unevenly.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: `CPUOffloadPolicy` keeps parameter shards, gradients and optimizer states in
            host memory. `SleepPolicy` keeps them in memory that `shardgrad.sleep` can free. The
            base class does neither.
        ignored_params: parameters to leave alone: not sharded, not moved, not reduced, unless an
            inner unit has sharded them.
        dp_mesh_dims: torch's `DataParallelMeshDims`: which axes of `mesh` are data-parallel, if
            `mesh` has other axes too and the parameters are DTensors on all of it.
        gradient_policy: the attribute that reduced gradients are bound to, their dtype, and the
            dtype in which they are sent. Not in FSDP2.
        zero_stage: 3 shards parameters, gradients and optimizer states; 2 keeps parameters
            unsharded until the last backward of a step ends (`set_is_last_backward`); 1 also sums
            unsharded gradients until then; "auto" keeps as many units unsharded as fit into
            the memory that is free after the first step; "hfsdp" shards everything over both axes
            of an HSDP mesh. Not in FSDP2.
        comm: "symmetric_memory" gathers parameters by copies from the memory of the other ranks,
            without staging or a copy-out, where all ranks of a process group can access it: on the
            GPUs of one host. Other groups use collectives, after a warning. Not in FSDP2.

    Returns:
        The module or list that was passed. The class of each module is now `FSDP<Original>` and its
        parameters are DTensors.

    Raises:
        ShardgradError: a subclass for each kind of bad input; the module is unchanged.

    Streams: creates none; fills the shards on the current stream.
    Capture: not safe, because it allocates.
    """
    modules = validated(module)
    ignored = set(ignored_params or ())
    refuse_wrong_types(mp_policy, offload_policy, gradient_policy, ignored, comm)
    stage = Stage.of(zero_stage, reshard_after_forward)
    data_mesh = _data_mesh(mesh, dp_mesh_dims, stage)
    check_kernels(data_mesh.device.type)
    memory = ShardMemory.of(data_mesh.device, offload_policy)
    collected = collect(modules, ignored)
    names = {param: name for param, (name, _) in collected.items()}
    require_one_device(names, data_mesh)
    refuse_two_levels(names, stage)
    shardings = shardings_of(names, data_mesh, shard_placement_fn)
    dtypes, mp_policy = _dtypes(names, shardings, mp_policy, gradient_policy)
    refuse_combinations(names, shardings, dtypes, reshard_after_forward, stage, comm, memory)
    refuse_hooks(names.items())
    flag, _ = _reshard_plan(reshard_after_forward, data_mesh)
    # What these share travels in one collective.
    together: dict[tuple[torch.dtype, DataParallelMesh, bool, ParamDtypes], list[FSDPParam]] = {}
    for original, (name, owners) in collected.items():
        p = FSDPParam(name, owners, original, shardings[original])
        kind = original.dtype, p.sharding.data_mesh, is_extension(original), dtypes[original]
        together.setdefault(kind, []).append(p)
    originals = [(p.sharded, p) for params in together.values() for p in params]
    groups = []
    for (_, group_mesh, _, of_params), params in together.items():
        _, smaller = _reshard_plan(reshard_after_forward, group_mesh)
        spec = GroupSpec(
            group_mesh,
            of_params.mp_policy,
            of_params.gradient_policy,
            memory,
            stage,
            all_gather=_all_gather(comm, stage, memory),
            second_step=_second_step(group_mesh, of_params.gradient_policy.wire_dtype),
            mesh_after_forward=smaller,
        )
        groups.append(_group(params, spec))
    unit = Unit(modules, groups, data_mesh, mp_policy, flag, lazy_init)
    unit.accept, unit.before_outermost_forward = _accept, UnownedParams(unit).refuse
    if stage.decides:
        from shardgrad.features.zero_stage_auto import StageAuto

        unit.before_outermost_forward = StageAuto(unit)
    _commit(unit, originals, ignored)
    return module


def _accept(units: Sequence[Unit]) -> None:
    """At lazy init, refuses units that share parameters, parameters that have changed so that their
    group no longer fits, and weights that differ between ranks.
    """
    refuse_unresolved_ties(units)
    for group in (group for unit in units for group in unit.groups):
        sharded = [p.sharded for p in group.params]
        if any(map(is_extension, sharded)):
            from shardgrad.engine.replaced_params import refuse_late_extensions

            refuse_late_extensions(group, sharded)
        if REDUCES_IN_GRAD_DTYPE:
            from shardgrad.features.param_dtype_overrides import refuse_late_grad_dtypes

            refuse_late_grad_dtypes(group)
    if dist.get_world_size() > 1:
        from shardgrad.checks.same_weights import compare_weights

        compare_weights(units)


# -- where strategies are chosen; each feature is imported only where it is used


def _dtypes(
    names: Mapping[nn.Parameter, str],
    shardings: Mapping[nn.Parameter, ParamSharding],
    mp_policy: MixedPrecisionPolicy,
    gradient_policy: GradientPolicy,
) -> tuple[dict[nn.Parameter, ParamDtypes], MixedPrecisionPolicy]:
    """Returns each parameter's dtypes, and the policy without overrides for single parameters."""
    if not REDUCES_IN_GRAD_DTYPE:
        return dict.fromkeys(names, ParamDtypes(mp_policy, gradient_policy)), mp_policy
    from shardgrad.features.param_dtype_overrides import dtypes_of, without_override

    dtypes = dtypes_of(
        names, lambda p: (p.dtype, shardings[p].data_mesh), mp_policy, gradient_policy
    )
    return dtypes, without_override(mp_policy)


def _second_step(mesh: DataParallelMesh, wire_dtype: torch.dtype | None) -> SecondStep | None:
    """Returns the step after the reduce-scatter; None without a second mesh axis."""
    levels, replicas = mesh.levels, mesh.replicate_group
    if levels is not None:
        from shardgrad.features.hfsdp import OuterReduceScatter
        from shardgrad.features.wire_dtype import OuterExchange

        if wire_dtype is not None and levels.outer.size() > 1:
            return OuterExchange(levels, wire_dtype)
        return OuterReduceScatter(levels)
    if replicas is None:
        return None
    from shardgrad.features.hsdp import ReplicaAllReduce
    from shardgrad.features.wire_dtype import ReplicaExchange

    if wire_dtype is not None and replicas.size() > 1:
        return ReplicaExchange(replicas, wire_dtype)
    return ReplicaAllReduce(replicas)


@torch.inference_mode(mode=False)  # the shard is for training
def _group(params: list[FSDPParam], spec: GroupSpec) -> ParamGroup:
    """Builds the kind of group that the parameters need, and copies them into its shard."""
    original = params[0].sharded
    kind: type[ParamGroup] = ParamGroup
    if is_extension(original):
        from shardgrad.features.tensor_extensions import ExtensionGroup, require_extension

        for p in params:
            require_extension(p.sharded, p.name, spec.mesh_after_forward, spec.shard_memory)
        kind = ExtensionGroup
    elif spec.mesh_after_forward is not None and not travels_as_bytes(original.dtype):
        from shardgrad.features.post_forward import PostForwardGroup

        kind = PostForwardGroup
    group = kind(params, spec)
    if spec.gradient_policy.wire_dtype is not None:
        from shardgrad.features.wire_dtype import exchange_gradients

        exchange_gradients(group)
    noting = NOTHING
    if dist.get_world_size() > 1:
        from shardgrad.checks.same_weights import noting_weights

        noting = noting_weights(params)
    with noting:
        group.shard_params()
    if REDUCES_IN_GRAD_DTYPE:
        from shardgrad.features.param_dtype_overrides import keep_grad_dtypes

        keep_grad_dtypes(group)
    return group


def _all_gather(comm: str, stage: Stage, memory: ShardMemory) -> Callable[..., AllGather]:
    """Returns what makes all-gathers: from device or host memory, over one mesh axis or two."""
    if comm == "symmetric_memory":
        from shardgrad.features.symmetric_memory import gather_through_windows

        return gather_through_windows
    if stage.over_both_axes:
        from shardgrad.features.hfsdp import HfsdpGather, OffloadedHfsdpGather

        return OffloadedHfsdpGather if memory.is_offloaded else HfsdpGather
    if memory.is_offloaded:
        from shardgrad.features.offload import OffloadedGather

        return OffloadedGather
    return AllGather


# -- validating arguments


def _data_mesh(mesh: DeviceMesh | None, dims: Any, stage: Stage) -> DataParallelMesh:
    mesh = mesh or default_mesh()
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(
            "mesh must be a DeviceMesh",
            expected="torch.distributed.device_mesh.DeviceMesh, or None for all ranks",
            got=repr(mesh),
            fix="init_device_mesh(device_type, (world_size,))",
        )
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"this rank is not in the mesh {mesh}",
            expected="fully_shard on the ranks of its mesh only",
            got=f"rank {dist.get_rank()}",
            fix="if mesh.get_coordinate() is not None: fully_shard(model, mesh=mesh)",
        )
    if dims is None:
        data_mesh = DataParallelMesh.of(mesh)
        return data_mesh.over_both_axes() if stage.over_both_axes else data_mesh
    if stage.over_both_axes:
        raise unsupported('zero_stage="hfsdp" with dp_mesh_dims', instead="zero_stage=3")
    if not hasattr(dims, "shard_names") or not hasattr(dims, "replicate_names"):
        raise OptionError(
            "dp_mesh_dims must be a DataParallelMeshDims",
            expected="torch.distributed.fsdp.DataParallelMeshDims, or None",
            got=repr(dims),
            fix="dp_mesh_dims=DataParallelMeshDims(shard='dp')",
        )
    return DataParallelMesh.of_named_axes(mesh, dims)


def _reshard_plan(
    reshard_after_forward: bool | int | None, mesh: DataParallelMesh
) -> tuple[bool | None, DataParallelMesh | None]:
    """Returns the unit's flag, and the smaller mesh that an int reshards to."""
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
    if reshard_after_forward == 1:  # each rank keeps everything, which is not resharding at all
        return False, None
    return True, mesh.subdivide(reshard_after_forward)


@torch.inference_mode(mode=False)
def _commit(
    unit: Unit,
    originals: Collection[tuple[nn.Parameter, FSDPParam]],
    ignored: set[nn.Parameter],
) -> None:
    """Changes the module and its parameters. Nothing here raises on user input."""
    for group in unit.groups:
        # With at least one row for each rank, padding less than doubles a parameter's bytes.
        if any(p.shape[p.dim] < group.mesh.shard_size for p in group.layout.pieces):
            from shardgrad.checks.padding import warn_of_padding

            warn_of_padding(
                group.layout,
                group.mesh.data_parallel_size,
                group.dtype.itemsize,
                type(unit.modules[0]).__name__,
            )
    managed = [module for _, module in modules_under(unit.modules, with_units=False)]
    note_ignored(managed, ignored)
    for module in unit.modules:
        watch_optimizers_of(module)
        # Bypasses `__setattr__`, which a module may override.
        module.__dict__[UNIT] = unit
    if dist.get_world_size() > 1:
        from shardgrad.diagnosis.watchdog import watch_ranks

        watch_ranks(unit.mesh.device)
    _take_inherited(unit, (original for original, _ in originals))
    for original, p in originals:
        original.__dict__[CLAIM] = p
        p.sharded.__dict__.pop(CLAIM, None)  # copied, if an inner unit had claimed the original
        mark(p.sharded, p)
        p.register(p.sharded)
    # Buffers are moved to the device but not sharded: running statistics differ between ranks.
    for module in managed:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", unit.mesh.device.type):
                module._buffers[name] = buffer.to(unit.mesh.device)
    show_to_torch(unit)
    _install_hooks(unit, managed)
    for module in unit.modules:
        swap_class(module)


def _take_inherited(unit: Unit, params: Iterable[nn.Parameter]) -> None:
    """Removes from inner units the parameters that their common ancestor owns now."""
    taken: list[FSDPParam] = [p.__dict__[CLAIM] for p in params if is_claimed(p)]
    for p in taken:
        unmark(p)
    for inner in (each for module in unit.modules for each in units_under(module)):
        if any(p.group in inner.groups for p in taken):
            smaller = [group.without(taken) for group in inner.groups]
            inner.set_groups([group for group in smaller if group is not None])


def _install_hooks(unit: Unit, managed_modules: Sequence[nn.Module]) -> None:
    """Lets inner modules be called outside the unit's forward, and makes state dicts and loading
    use the sharded parameters.

    Includes modules of inner units that register a tied parameter which this unit owns.
    """

    def to_shards(*_: Any, **__: Any) -> None:
        unit.reshard()  # the program may write what it gets in ways that torch does not count

    def to_own_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        unit.reshard()
        names = [prefix + name for name, p in module._parameters.items() if isinstance(p, DTensor)]
        given = [(name, state[name]) for name in names if name in state]
        require_shards(given)
        require_own_shards(given)

    def take_over(*_: Any, **__: Any) -> None:
        from shardgrad.engine.replaced_params import adopt, kept_places

        # The modules of a list load one after another, and may share tied parameters.
        places = [kept_places(p) for group in unit.groups for p in group.params]
        if len(unit.modules) == 1 or all(len({*kept}) == 1 for kept in places):
            for group in unit.groups:
                adopt(group)

    owners = {owner: None for group in unit.groups for p in group.params for owner, _ in p.owners}
    for module in dict.fromkeys([*managed_modules, *owners]):
        # Dynamo looks for these names, to treat parameters as values that change between calls.
        module.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
        if module in owners:
            module.register_state_dict_pre_hook(to_shards)
            module.register_load_state_dict_pre_hook(to_own_shards)
            if module not in unit.modules:
                forward_around(module, unit)
        # `MultiheadAttention` passes its projection's weight to a function instead of calling it.
        if isinstance(module, nn.MultiheadAttention) and (owner := unit_of(module.out_proj)):
            forward_around(module.out_proj, owner, reader=module)
    for module in unit.modules:
        module.register_load_state_dict_post_hook(take_over)


# As torch's `contract` does for FSDP2: returns the state of a sharded module, else None.
fully_shard.state = state_of  # type: ignore[attr-defined]
