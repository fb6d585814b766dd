"""Compares the code and the model between ranks before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shardgrad.engine.unit import Unit
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.version import __version__, digest_of_sources

__all__ = ["describe", "require_same_model"]


@dataclass
class _MessageNumbers:
    """Counts the numbers given to groups in this process."""

    reserved: int = 0


numbers = _MessageNumbers()


def describe(units: Sequence[Unit], mesh: DataParallelMesh | None = None) -> list[str]:
    """Returns a line for each fact that all ranks must share, in order.

    Only for the parameters on `mesh`, if given.
    """
    # Facts that decide what a rank sends, or where something lies in a message. If ranks differ in
    # one of them, training may produce wrong numbers without an error.
    lines = []
    for unit in units:
        lines.append(
            f"unit {unit.name}: reshard_after_forward={unit.reshard_after_forward}, "
            f"{unit.mp_policy}"
        )
        for group in unit.groups:
            if mesh not in (None, group.mesh):
                continue
            lines.append(
                f"{group.kind} of {unit.name}: {group.gradient_policy}, {group.stage}, mesh "
                f"{tuple(group.mesh.mesh.shape)}, {group.mesh.device.type}"
            )
            lines.extend(
                f"parameter {p.name}: {p.shape}, {p.sharded.dtype}, "
                f"requires_grad={p.sharded.requires_grad}, {p.sharding.placements}"
                for p in group.params
            )
            places = [piece.shard_offset for piece in group.layout.pieces]
            lines.append(
                f"layout of {group.kind} of {unit.name}: chunks of {group.layout.chunk_numel} "
                f"elements, parameters at {places}"
            )
    return lines


def require_same_model(units: Sequence[Unit]) -> None:
    """Compares the model between ranks of the root's mesh, and of other meshes for their
    parameters.

    A collective, once per root. It also gives every group the number that tells its messages apart.
    Ranks may have built different numbers of models before, so they continue from the largest count
    among them.

    Raises:
        RankDisagreementError: on every rank, naming the first difference.
    """
    root = units[0].mesh
    first_number = numbers.reserved
    for mesh in dict.fromkeys([root, *(group.mesh for unit in units for group in unit.groups)]):
        lines = describe(units, None if mesh == root else mesh)
        for group in (mesh.shard_group, mesh.replicate_group):
            # Between shards, then between replicas: this compares all ranks of the mesh, although
            # none sends to all. A fake group has no other rank to compare with.
            if group is not None and group.size() > 1 and dist.get_backend(group) != "fake":
                from shardgrad.diagnosis.same_lines import require_same_lines

                # Another version may lay out parameters in another order, in chunks of the same
                # size. Then nothing would fail, and every number would be wrong.
                require_same_lines(
                    [f"version {__version__}, digest of sources {digest_of_sources()}"],
                    0,
                    group,
                    what="ranks run different versions of shardgrad",
                    fix="install the same version on every node",
                )
                first_number = require_same_lines(lines, first_number, group)
    groups = [(unit.name, group) for unit in units for group in unit.groups]
    # Message tags contain these numbers, so that a rank which is out of sync is noticed.
    for offset, (name, param_group) in enumerate(groups):
        param_group.set_tags(name, first_number + offset)
    numbers.reserved = first_number + len(groups)
