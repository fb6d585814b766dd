"""Compares the code and the model between ranks before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardgrad.engine.unit import Unit
from shardgrad.sharding.mesh import DataParallelMesh

__all__ = ["require_same_model"]


_reserved = 0  # numbers that groups of this process have


def _described(units: Sequence[Unit], mesh: DataParallelMesh | None = None) -> Iterator[str]:
    """Yields a line for each fact that all ranks must share, in order.

    Only for the parameters on `mesh`, if given.
    """
    # Facts that decide what a rank sends, or where something lies in a message. If ranks differ in
    # one of them, training may produce wrong numbers without an error. Another version may lay out
    # parameters in another order, in chunks of the same size.
    from shardgrad.version import __version__, digest_of_sources  # for several ranks only

    yield f"shardgrad {__version__}, digest of sources {digest_of_sources()}"
    for unit in units:
        yield (
            f"unit {unit.name}: reshard_after_forward={unit.reshard_after_forward}, "
            f"{unit.mp_policy}"
        )
        for group in unit.groups:
            if mesh not in (None, group.mesh):
                continue
            yield (
                f"{group.kind} of {unit.name}: {group.gradient_policy}, {group.stage}, mesh "
                f"{tuple(group.mesh.mesh.shape)}, {group.mesh.device.type}"
            )
            for p in group.params:
                yield (
                    f"parameter {p.name}: {tuple(p.sharded.shape)}, {p.sharded.dtype}, "
                    f"requires_grad={p.sharded.requires_grad}, {p.sharding.placements}"
                )
            places = [piece.shard_offset for piece in group.layout.pieces]
            yield (
                f"layout of {group.kind} of {unit.name}: chunks of {group.layout.chunk_numel} "
                f"elements, parameters at {places}"
            )


def require_same_model(units: Sequence[Unit]) -> None:
    """Compares the model between ranks of the root's mesh, and of other meshes for their
    parameters.

    A collective, once per root. It also gives every group the number that tells its messages apart.
    Ranks may have built different numbers of models before, so they continue from the largest count
    among them.

    Raises:
        RankDisagreementError: on every rank, naming the first difference.
    """
    global _reserved
    root = units[0].mesh
    for mesh in dict.fromkeys([root, *(group.mesh for unit in units for group in unit.groups)]):
        for group in mesh.comparable_groups:
            from shardgrad.diagnosis.same_lines import require_same_lines  # for several ranks only

            lines = list(_described(units, None if mesh == root else mesh))
            _reserved = require_same_lines(lines, _reserved, group)
    # Message tags contain these numbers, so that a rank which is out of sync is noticed.
    for unit in units:
        for param_group in unit.groups:
            param_group.set_tags(unit.name, _reserved)
            _reserved += 1
