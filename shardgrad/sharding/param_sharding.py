"""How parameters are sharded: what this rank packs, along which dim, over which mesh.

Tensor or expert parallelism may have sharded a parameter over other axes, so that it already is a
DTensor. The engine then works on its local tensor, and the sharded parameter describes both:

| parameter | sharded parameter | unsharded parameter |
| --- | --- | --- |
| plain | on the data-parallel mesh | plain |
| DTensor on another mesh | on both meshes, data-parallel first | the DTensor as before |
| DTensor on the mesh of `dp_mesh_dims` | on that mesh | the DTensor as before |

[Note: Strided shards]
Tensor parallelism shards first, and data parallelism shards the rest. If both shard the same dim, a
rank does not have the rows that the placements, read from left to right, would give it.
`_StridedShard` tells DTensor the true order, with the number of splits that come before it. FSDP2
writes the same placements, so checkpoints of either engine load into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardgrad.errors import MeshError, OptionError, PlacementError, UnsupportedParameterError
from shardgrad.sharding.dtensor import dtensor_over, local_of
from shardgrad.sharding.mesh import DataParallelMesh, SpmdAxes


@dataclass(frozen=True)
class _Unsharded:
    """The placement of a parameter that was already a DTensor.

    Attributes:
        mesh, placements: its own.
        data_axes: the data-parallel axes of `mesh`; the reduction does sums over them.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    data_axes: frozenset[int]


@dataclass(frozen=True)
class ParamSharding:
    """How one parameter is sharded; see the module docstring.

    Attributes:
        data_mesh: its shard group shards the parameter.
        shape: of what this rank packs: the parameter, or its local tensor if it was already a
            DTensor.
        dim: the dim of that which is sharded over the shard group.
        full_shape, stride: of the parameter.
        mesh, placements: of the sharded parameter.
    """

    data_mesh: DataParallelMesh
    shape: tuple[int, ...]
    dim: int
    full_shape: torch.Size
    stride: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    _unsharded: _Unsharded | None

    @property
    def came_as_dtensor(self) -> bool:
        """True if the unsharded parameter and its gradients are DTensors."""
        return self._unsharded is not None

    def sharded_dtensor(self, local: torch.Tensor) -> DTensor:
        """Returns the sharded parameter's DTensor over this rank's piece."""
        return dtensor_over(local, self.mesh, self.placements, self.full_shape, self.stride)

    def sharded_param(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Returns the sharded parameter over this rank's piece, a plain tensor.

        Like `nn.Parameter(...)`, but without its detach, which would run DTensor's dispatch.
        """
        param: Any = self.sharded_dtensor(local).requires_grad_(requires_grad)
        param._is_param = True
        return cast(nn.Parameter, param)

    def unsharded_tensor(self, packed: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that compute sees, over gathered memory of `shape`."""
        if self._unsharded is None:
            return packed
        unsharded = self._unsharded
        return dtensor_over(
            packed, unsharded.mesh, unsharded.placements, self.full_shape, self.stride
        )

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the part of an unsharded gradient that this rank packs.

        Compute may leave a gradient as a partial sum over tensor-parallel ranks. It is then
        redistributed to the parameter's placements, which is a collective, except over
        data-parallel axes, which the reduce-scatter sums over.

        Streams: the current one.
        """
        unsharded = self._unsharded
        if unsharded is None or not isinstance(grad, DTensor):
            return grad  # the program may have assigned a local tensor
        wanted = tuple(
            came if axis in unsharded.data_axes else own
            for axis, (came, own) in enumerate(
                zip(grad.placements, unsharded.placements, strict=True)
            )
        )
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        return local_of(grad)  # a collective may still be filling it: the op that reads it waits


def groups_cut_over(
    mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[dist.ProcessGroup, ...]:
    """Returns the groups of more than one rank that a DTensor is sharded over, by mesh axis."""
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard | _StridedShard) and mesh.size(axis) > 1
    )


def sharding_of(param: torch.Tensor, name: str, mesh: DataParallelMesh, dim: int) -> ParamSharding:
    """Decides how a parameter is sharded on `dim` over the shard group of `mesh`.

    Raises:
        PlacementError: there is no such dim, or data parallelism cannot shard its placements.
        UnsupportedParameterError: `dim` is not the outermost, and does not divide evenly.
    """
    dim = dim + param.ndim if dim < 0 else dim
    local = local_of(param)
    _require_dim(local, name, mesh, dim)
    unsharded: _Unsharded | None = None
    if mesh.spmd is not None:
        axes, placements, unsharded = _on_full_mesh(param, name, mesh, mesh.spmd, dim)
    elif isinstance(param, DTensor):
        _require_no_partial(param, name)
        axes = _joined(mesh.mesh, param.device_mesh)
        placements = (*mesh.placements(_shard(dim, param)), *param.placements)
        unsharded = _Unsharded(param.device_mesh, tuple(param.placements), frozenset())
    else:
        axes, placements = mesh.mesh, mesh.placements(Shard(dim))
    stride = torch.empty(tuple(param.shape), device="meta").stride()
    shape = tuple(local.shape)
    return ParamSharding(mesh, shape, dim, param.shape, stride, axes, placements, unsharded)


def _joined(*meshes: DeviceMesh) -> DeviceMesh:
    """Returns one mesh with the axes of all meshes, the same object each time."""
    return _joined_once(meshes, tuple(group for mesh in meshes for group in mesh.get_all_groups()))


# Keys include process groups: after `destroy_process_group` and a new world, equal meshes have
# other groups.
@lru_cache(maxsize=256)
def _joined_once(meshes: tuple[DeviceMesh, ...], _: tuple[dist.ProcessGroup, ...]) -> DeviceMesh:
    try:
        joined: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    except (AssertionError, RuntimeError, TypeError) as error:
        raise MeshError(
            "fully_shard's mesh cannot be combined with the mesh of parameters that are already "
            "DTensors",
            expected="disjoint axes, sliced from one mesh with axis names",
            got=f"{' and '.join(map(str, meshes))}: {error}",
            fix="mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')); then "
            "mesh['tp'] for tensor parallelism and fully_shard(..., mesh=mesh['dp'])",
        ) from error
    return joined


def _shard(dim: int, param: DTensor, behind: int = -1) -> Placement:
    """Returns the placement of the data-parallel axis. See [Note: Strided shards].

    Args:
        dim: of the parameter.
        param: the parameter before sharding.
        behind: only axes of the parameter after this one come before the split.
    """
    splits = 1
    for axis in range(behind + 1, param.device_mesh.ndim):
        placement = param.placements[axis]
        if isinstance(placement, Shard | _StridedShard) and placement.dim == dim:
            splits *= param.device_mesh.size(axis)
    return _StridedShard(dim, split_factor=splits) if splits > 1 else Shard(dim)


def _on_full_mesh(
    param: torch.Tensor, name: str, mesh: DataParallelMesh, spmd: SpmdAxes, dim: int
) -> tuple[DeviceMesh, tuple[Placement, ...], _Unsharded]:
    """Shards a DTensor on the mesh of `dp_mesh_dims`, of which some axes are data-parallel."""
    if not isinstance(param, DTensor):
        raise PlacementError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh",
            expected=f"DTensors on {spmd.mesh}",
            got=f"a plain tensor of shape {tuple(param.shape)}",
            where=f"parameter {name}",
            fix="distribute_tensor(param, mesh, placements), with Replicate() on data-parallel "
            "axes",
        )
    if param.device_mesh != spmd.mesh:
        raise PlacementError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard",
            expected=str(spmd.mesh),
            got=str(param.device_mesh),
            where=f"parameter {name}",
            fix="distribute the parameters over the mesh that is passed to fully_shard",
        )
    for axis in sorted({*spmd.shard_axes, *spmd.replicate_axes}):
        if not isinstance(param.placements[axis], Replicate):
            raise PlacementError(
                f"Expected Replicate() on data-parallel axis {spmd.names[axis]!r}",
                expected="parameters that are replicated over all data-parallel ranks",
                got=str(param.placements),
                where=f"parameter {name}",
                fix="use Replicate() on data-parallel axes, which fully_shard shards",
            )
    _require_no_partial(param, name)
    placements = list(param.placements)
    for axis in spmd.shard_axes:
        placements[axis] = _shard(dim, param, behind=axis)
    unsharded = _Unsharded(
        spmd.mesh, tuple(param.placements), frozenset((*spmd.shard_axes, *spmd.replicate_axes))
    )
    if len(spmd.shard_axes) <= 1:
        return spmd.mesh, tuple(placements), unsharded
    return *_with_one_shard_axis(mesh, spmd, placements), unsharded


def _with_one_shard_axis(
    mesh: DataParallelMesh, spmd: SpmdAxes, placements: Sequence[Placement]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Returns mesh and placements with all data-parallel axes replaced by those of `mesh.mesh`."""
    meshes: list[DeviceMesh] = []
    kept: list[Placement] = []
    for axis, name in enumerate(spmd.names):
        if axis == spmd.shard_axes[0]:
            meshes.append(mesh.mesh)
            kept.extend(mesh.placements(placements[axis]))
        elif axis not in spmd.shard_axes and axis not in spmd.replicate_axes:
            meshes.append(spmd.mesh[name])
            kept.append(placements[axis])
    return _joined(*meshes), tuple(kept)


def _require_dim(local: torch.Tensor, name: str, mesh: DataParallelMesh, dim: int) -> None:
    if not 0 <= dim < local.ndim:
        raise PlacementError(
            f"Shard dim {dim} is invalid for {local.ndim}D tensor: {name}",
            expected=f"a dim from 0 to {local.ndim - 1}",
            got=str(dim),
            where=f"parameter {name} of shape {tuple(local.shape)}",
            fix="return Shard(0) or None for it from shard_placement_fn",
        )
    if dim > 0 and local.shape[dim] % mesh.shard_size:
        raise UnsupportedParameterError(
            f"FSDP does not support uneven sharding on dim {dim}: {name}",
            expected=f"a size of dim {dim} that is divisible by {mesh.shard_size} ranks",
            got=f"shape {tuple(local.shape)}",
            where=f"parameter {name}",
            fix="return Shard(0), which may be uneven, for it from shard_placement_fn",
        )


def _require_no_partial(param: DTensor, name: str) -> None:
    if any(placement.is_partial() for placement in param.placements):
        raise PlacementError(
            f"parameter {name} is a partial sum",
            expected="a DTensor that is sharded or replicated",
            got=str(param.placements),
            where=f"parameter {name}",
            fix="param.redistribute(...) to Replicate() before fully_shard",
        )


def shardings_of(
    params: Mapping[nn.Parameter, str],
    default: DataParallelMesh,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
) -> dict[nn.Parameter, ParamSharding]:
    """Decides how each parameter is sharded; calls `shard_placement_fn` once for each, in order.

    Args:
        params: parameter -> name.
        default: the mesh of a parameter for which the function names none.
        shard_placement_fn: returns a `Shard`, a `ShardPlacementResult` of torch, or None for
            `Shard(0)`.

    Raises:
        OptionError: it is not a function.
        PlacementError: it returned something else; or see `sharding_of`.
        UnsupportedParameterError: see `sharding_of`.
        MeshError: see `DataParallelMesh.of_info`.
    """
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise OptionError(
            "shard_placement_fn must be callable",
            expected="a function of a parameter",
            got=type(shard_placement_fn).__name__,
            fix="shard_placement_fn=lambda param: Shard(0)",
        )
    shardings = {}
    for param, name in params.items():
        answer: Any = None if shard_placement_fn is None else shard_placement_fn(param)
        mesh = default
        if hasattr(answer, "mesh_info"):
            mesh, answer = DataParallelMesh.of_info(answer.mesh_info), answer.placement
        if not isinstance(answer, Shard | None):
            raise PlacementError(
                f"Invalid shard_placement_fn result: {answer!r}",
                expected="Shard(dim), a ShardPlacementResult, or None for Shard(0)",
                got=type(answer).__name__,
                where=f"parameter {name}",
                fix="shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None",
            )
        dim = 0 if answer is None else answer.dim
        shardings[param] = sharding_of(param, name, mesh, dim)
    return shardings
