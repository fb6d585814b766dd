"""The data-parallel view of a device mesh: shard group, replicate group, and this rank in them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from shardgrad.errors import MeshError, MeshNamesError, OptionError


@dataclass(frozen=True)
class SpmdAxes:
    """A mesh with more axes than the data-parallel ones.

    Attributes:
        mesh: all axes, named.
        shard_axes: indices of the axes that parameters are sharded over.
        replicate_axes: indices of the axes over which parameters are replicated.
    """

    mesh: DeviceMesh
    shard_axes: tuple[int, ...]
    replicate_axes: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all axes."""
        return tuple(self.mesh.mesh_dim_names or ())


@dataclass(frozen=True)
class TwoLevels:
    """The two axes that messages cross one after the other; see [Note: Two levels] in
    `features/hfsdp.py`.
    """

    outer: dist.ProcessGroup
    inner: dist.ProcessGroup


@dataclass(frozen=True)
class DataParallelMesh:
    """One or two mesh axes seen as a shard group and, for HSDP, a replicate group.

    Attributes:
        mesh: 1-D (FSDP, or replicas only), or 2-D with names (HSDP; axis 0 replicates, axis 1
            shards).
        shard_group: ranks that hold different pieces; `shard_rank` of `shard_size`.
        replicate_group: ranks that hold the same piece, or None for FSDP.
        device: where parameters of this rank compute.
        spmd: the mesh that `mesh` is part of and parameters lie on, if `dp_mesh_dims` named its
            axes.
        levels: the two axes of which `mesh` is made, if it shards over both; else None.
    """

    mesh: DeviceMesh
    shard_group: dist.ProcessGroup
    shard_rank: int
    shard_size: int
    replicate_group: dist.ProcessGroup | None
    device: torch.device
    spmd: SpmdAxes | None = None
    levels: TwoLevels | None = None

    def __hash__(self) -> int:
        return hash(self.mesh)  # cached by the mesh

    @classmethod
    def of(cls, mesh: DeviceMesh) -> DataParallelMesh:
        """Creates it from a 1-D or 2-D mesh.

        Raises:
            MeshError: the mesh is not 1-D or 2-D, or its ranks are in another order than those of
                its process groups.
            MeshNamesError: a 2-D mesh has no axis names.
        """
        if mesh.ndim not in (1, 2):
            raise MeshError(
                f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}",
                expected="1 axis (FSDP) or 2 named axes (HSDP: replicate, shard)",
                got=f"{mesh.ndim} axes",
                fix="pass one axis of the mesh, for example mesh['shard']",
            )
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise MeshNamesError(
                "Please init the 2D mesh for HSDP with mesh_dim_names specified",
                expected="names for both axes",
                got="mesh_dim_names=None",
                fix="init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', "
                "'shard'))",
            )
        shard_axis = mesh.ndim - 1
        shard_group = mesh.get_group(shard_axis)
        _require_order_of_group(mesh, shard_group)
        return cls(
            mesh=mesh,
            shard_group=shard_group,
            shard_rank=mesh.get_local_rank(shard_axis),
            shard_size=mesh.size(shard_axis),
            replicate_group=mesh.get_group(0) if mesh.ndim == 2 else None,
            device=_device_of(mesh),
        )

    @classmethod
    def of_named_axes(cls, mesh: DeviceMesh, dims: Any) -> DataParallelMesh:
        """Creates it from the data-parallel axes of a mesh that also has others.

        Several axes of one kind are flattened into one. Creates process groups on the first call
        for a mesh, so every rank must call it.

        Args:
            mesh: with axis names.
            dims: torch's `DataParallelMeshDims`.

        Raises:
            MeshError: an axis is unknown or named twice.
        """
        names = tuple(mesh.mesh_dim_names or ())
        shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
        unknown = [name for name in shard + replicate if name not in names]
        if unknown or len({*shard, *replicate}) < len(shard + replicate):
            raise MeshError(
                f"Mesh dim name {unknown[0]!r} not found in mesh.mesh_dim_names {names}"
                if unknown
                else "dp_mesh_dims must name each data-parallel axis once",
                expected=f"names in {names}" if names else "a mesh with axis names",
                got=repr(dims),
                fix="DataParallelMeshDims(shard='dp') for an axis called 'dp'",
            )
        spmd = SpmdAxes(mesh, tuple(map(names.index, shard)), tuple(map(names.index, replicate)))
        if not shard:
            replicas = _one_axis(mesh, replicate)
            alone = _group_of_one(dist.group.WORLD)
            device = _device_of(mesh)
            return cls(replicas, alone, 0, 1, replicas.get_group(0), device, spmd)
        parts = [_one_axis(mesh, axes) for axes in (replicate, shard) if axes]
        joined = parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)
        return replace(cls.of(joined), spmd=spmd)

    @classmethod
    def of_info(cls, info: Any) -> DataParallelMesh:
        """Creates it from the `FSDPMeshInfo` or `HSDPMeshInfo` of a `ShardPlacementResult`.

        Raises:
            MeshError: the axes are not in the order replicate, shard.
        """
        if getattr(info, "dp_mesh_dims", None) is not None:
            return cls.of_named_axes(info.spmd_mesh, info.dp_mesh_dims)
        expected = (None, 0) if info.mesh.ndim == 1 else (0, 1)
        got = (info.replicate_mesh_dim, info.shard_mesh_dim)
        if got != expected:
            raise MeshError(
                "the mesh_info of a ShardPlacementResult does not match FSDP or HSDP",
                expected="FSDPMeshInfo(mesh_1d, shard_mesh_dim=0), or HSDPMeshInfo(mesh_2d, "
                "replicate_mesh_dim=0, shard_mesh_dim=1)",
                got=f"replicate_mesh_dim={got[0]}, shard_mesh_dim={got[1]} of {info.mesh}",
                fix="pass the data-parallel axes as a separate mesh",
            )
        return cls.of(info.mesh)

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """Returns the placements on `mesh` of a parameter with placement `shard` in the shard
        group.
        """
        replicas = () if self.replicate_group is None else (Replicate(),)
        return (*replicas, shard)

    @cached_property
    def data_parallel_size(self) -> int:
        """Number of ranks that a gradient is averaged over."""
        replicas = self.replicate_group
        return self.shard_size * (1 if replicas is None else replicas.size())

    @property
    def comparable_groups(self) -> list[dist.ProcessGroup]:
        """The groups in which ranks compare something: first shards, then replicas.

        This compares all ranks of the mesh, although none sends to all. A group of one rank, or a
        fake one, has nothing to compare.
        """
        return [
            group
            for group in (self.shard_group, self.replicate_group)
            if group is not None and group.size() > 1 and dist.get_backend(group) != "fake"
        ]

    def over_both_axes(self) -> DataParallelMesh:
        """Returns the mesh that shards over all ranks of this HSDP mesh, one axis after the other.

        Creates a process group on the first call for a mesh, so all ranks of it must call it.

        Raises:
            OptionError: the mesh has only one axis.
        """
        if self.mesh.ndim != 2:
            raise OptionError(
                'zero_stage="hfsdp" needs a second axis to shard optimizer states over',
                expected="2 named axes: outer, inner",
                got=f"{self.mesh}",
                fix="init_device_mesh(device, (machines, ranks_of_each), mesh_dim_names=('outer', "
                "'inner'))",
            )
        return _flattened(self.mesh, TwoLevels(self.mesh.get_group(0), self.mesh.get_group(1)))

    @cached_property
    def gather_group(self) -> dist.ProcessGroup:
        """The ranks that unsharded parameters are gathered from."""
        return self.shard_group if self.levels is None else self.levels.inner

    def subdivide(self, size: int) -> DataParallelMesh:
        """Returns the mesh of groups of `size` neighboring ranks, for an integer reshard.

        Creates a process group on the first call for a mesh and size, so all ranks of the shard
        group must call it.

        Raises:
            OptionError: `size` does not divide the shard group.
        """
        if size < 1 or self.shard_size % size:
            raise OptionError(
                "If passing reshard_after_forward as an int, it should be a factor of "
                f"{self.shard_size}, not {size}",
                expected=f"a divisor of the shard group's size {self.shard_size}",
                got=str(size),
                fix="reshard_after_forward=True, False, or such a divisor",
            )
        return _subdivided(self.mesh, self.shard_group, size)


def _require_order_of_group(mesh: DeviceMesh, shard_group: dist.ProcessGroup) -> None:
    """Refuses a mesh whose ranks along the shard axis are in another order than in their group.

    Collectives put shards in the order of the group, checkpoints in that of the mesh, and replicas
    would sum the gradients of different shards. All rows are compared, so that all ranks refuse.
    """
    listed: Any = mesh.mesh.tolist()
    rows, own = listed if mesh.ndim == 2 else [listed], dist.get_process_group_ranks(shard_group)
    # torch sorts the ranks of a group, unless the program asks it not to.
    if own == sorted(own) and any(row != sorted(row) for row in rows):
        raise MeshError(
            "the ranks of a mesh are not in the order of its process groups, which torch sorts",
            expected="ranks that ascend along the axis that parameters are sharded over",
            got=f"{mesh} of ranks {listed}",
            fix="init_device_mesh, or DeviceMesh(device_type, mesh.mesh.sort().values)",
        )


# Keys include process groups: after `destroy_process_group` and a new world, equal meshes have
# other groups.


@lru_cache(maxsize=64)
def _subdivided(mesh: DeviceMesh, shard_group: dist.ProcessGroup, size: int) -> DataParallelMesh:
    begin = shard_group.rank() // size * size
    ranks = dist.get_process_group_ranks(shard_group)[begin : begin + size]
    group = new_group(ranks, [shard_group], _device_of(mesh), "fsdp_neighbors")
    return DataParallelMesh.of(_mesh_of(group, mesh.device_type, "shard"))


def _mesh_of(group: dist.ProcessGroup, device_type: str, name: str) -> DeviceMesh:
    mesh: DeviceMesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=(name,))
    return mesh


def new_group(
    ranks: list[int], among: Sequence[dist.ProcessGroup], device: torch.device, desc: str
) -> dist.ProcessGroup:
    """Returns a new process group, for which torch waits for no other rank of the world.

    torch names a group by its ranks and by a number: how many groups a rank is in or, since 2.14,
    how many the world has made. Pipeline stages make different groups at a time, or some make none.
    So neither number is the same on all ranks, which would wait for each other without end. This
    one is agreed, and does not count among those of the world.

    After `init_process_group(device_id=...)`, torch splits NCCL's communicator of the world
    instead, which takes all ranks of it: they have to make as many groups.

    Args:
        ranks: of the group.
        among: groups that together connect these ranks. All of their ranks must call this.
        device: for messages in these groups.
        desc: for messages about the group.
    """
    world: Any = dist.distributed_c10d._world
    most = torch.tensor(len(world.pg_names), device=device)
    for group in among:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    count, missing = world.group_count, [object() for _ in range(len(world.pg_names), int(most))]
    world.pg_names.update(dict.fromkeys(missing, ""))
    world.group_count = -int(most)  # none of torch's own numbers
    try:
        made: dist.ProcessGroup = dist.new_group(
            ranks, use_local_synchronization=True, group_desc=desc
        )
    finally:
        world.group_count = count
        for each in missing:
            del world.pg_names[each]
    return made


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Returns some axes of a mesh flattened into one; torch caches the result."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


@lru_cache(maxsize=4)
def _group_of_one(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a process group of this rank alone; other ranks need not take part."""
    return new_group([world.rank()], [], torch.device("cpu"), "fsdp_alone")


@lru_cache(maxsize=64)
def _flattened(mesh: DeviceMesh, levels: TwoLevels) -> DataParallelMesh:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    group: Any = dist.group.WORLD
    if len(ranks) < group.size():
        group = new_group(ranks, [levels.inner, levels.outer], _device_of(mesh), "fsdp_levels")
    flat = _mesh_of(group, mesh.device_type, "_".join(mesh.mesh_dim_names or ()))
    return replace(DataParallelMesh.of(flat), levels=levels)


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(
        mesh.device_type, torch.get_device_module(mesh.device_type).current_device()
    )


# Per world and device type. A mesh keeps its world alive, so it is held only while units use it.
_over_all_ranks: WeakValueDictionary[tuple[dist.ProcessGroup, str], DeviceMesh]
_over_all_ranks = WeakValueDictionary()


def default_mesh() -> DeviceMesh:
    """Returns the 1-D mesh over all ranks; initializes the default process group if needed.

    All units of a model share one mesh object: torch takes as long to create a mesh as the engine
    to shard a layer.

    Raises:
        MeshError: the program was started without a launcher.
    """
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
        if missing:
            raise MeshError(
                "fully_shard was called without a process group or a launcher",
                expected="torchrun, or init_process_group before fully_shard",
                got=f"no {', '.join(missing)} in the environment",
                fix=f"torchrun --nproc-per-node=2 {sys.argv[0] or 'program.py'}   "
                "(a process per GPU)",
            )
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    world: Any = dist.group.WORLD
    if device_type != "cpu" and f"{device_type}:" not in str(dist.get_backend_config(world)):
        device_type = "cpu"
    mesh = _over_all_ranks.get((world, device_type))
    if mesh is None:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        _over_all_ranks[world, device_type] = mesh
    return mesh
