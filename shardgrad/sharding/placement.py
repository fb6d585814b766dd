"""What a `shard_placement_fn` answers: on which dim each parameter is sharded, and over which
mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardgrad.errors import OptionError, PlacementError
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.param_sharding import ParamSharding, sharding_of

__all__ = ["Place", "places_of", "travel_together"]


@dataclass(frozen=True)
class Place:
    """Where one parameter goes.

    Attributes:
        mesh: over whose shard group.
        sharding: how.
    """

    mesh: DataParallelMesh
    sharding: ParamSharding


def places_of(
    params: Mapping[nn.Parameter, str],
    default: DataParallelMesh,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
) -> dict[nn.Parameter, Place]:
    """Asks once for each parameter, in order.

    Args:
        params: parameter -> name.
        default: the mesh of a parameter for which the function names none.
        shard_placement_fn: returns a `Shard`, a `ShardPlacementResult` of torch, or None for
            `Shard(0)`.

    Raises:
        OptionError: it is no function, or answered something else.
        PlacementError, UnsupportedParameterError: see `sharding_of`.
        MeshError: see `DataParallelMesh.of_info`.
    """
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise OptionError(
            "shard_placement_fn must be callable",
            expected="a function of a parameter",
            got=type(shard_placement_fn).__name__,
            fix="shard_placement_fn=lambda param: Shard(0)",
        )
    meshes: dict[int, DataParallelMesh] = {}
    places = {}
    for param, name in params.items():
        answer: Any = None if shard_placement_fn is None else shard_placement_fn(param)
        mesh = default
        if hasattr(answer, "mesh_info") and hasattr(answer, "placement"):
            info, answer = answer.mesh_info, answer.placement
            mesh = meshes.setdefault(id(info), DataParallelMesh.of_info(info))
        places[param] = Place(mesh, sharding_of(param, name, mesh, _dim(answer, name)))
    return places


def _dim(answer: Any, name: str) -> int:
    if answer is None:
        return 0
    if isinstance(answer, Shard):
        return answer.dim
    raise PlacementError(
        f"Invalid shard_placement_fn result: {answer!r}",
        expected="Shard(dim), a ShardPlacementResult, or None for Shard(0)",
        got=type(answer).__name__,
        where=f"parameter {name}",
        fix="shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None",
    )


def travel_together(
    places: Mapping[nn.Parameter, Place], kind: Callable[[nn.Parameter], object]
) -> list[list[nn.Parameter]]:
    """Returns the parameters that can share a collective, in the order they came.

    Args:
        places: those of one unit.
        kind: parameters for which it differs go apart, as those of several dtypes or meshes do.
    """
    together: dict[tuple[torch.dtype, DataParallelMesh, object], list[nn.Parameter]] = {}
    for param, place in places.items():
        together.setdefault((param.dtype, place.mesh, kind(param)), []).append(param)
    return list(together.values())
