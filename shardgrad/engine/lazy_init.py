"""Lazy init: the first forward finds the root, after all calls of `fully_shard`.

Ranks then compare the code and the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.unit import RootContext, Unit, require_awake, units_under
from shardgrad.errors import RootError
from shardgrad.sharding.mesh import DataParallelMesh

_reserved = 0  # numbers that groups of this process have


def lazy_init(unit: Unit) -> RootContext:
    """Returns a unit's context; without one, makes the unit the root of all units under it.

    The latter is a collective: every rank of the mesh must call it.

    Raises:
        RootError: the unit has several modules, so none is the root.
        AsleepError: a unit sleeps with its former root, which alone can wake it.
        RankDisagreementError: ranks built different models. `Unit.accept` may raise further errors.
    """
    if unit.context is not None:
        return unit.context
    if len(unit.modules) > 1 and any(units_under(module)[1:] for module in unit.modules):
        raise RootError(
            "fully_shard requires a single root module but got several",
            expected="one module that contains the others",
            got=", ".join(type(module).__name__ for module in unit.modules),
            fix="call fully_shard on their parent too, and run the parent",
        )
    root_module = unit.modules[0]
    units = units_under(root_module) if len(unit.modules) == 1 else [unit]
    require_awake(units)
    # Names first, since the errors below contain them.
    _name_everything(root_module, units)
    _require_same_model(units)
    unit.accept(units)
    partner = unit.partner
    comm_ctx = partner.for_another_root() if partner else CommContext(unit.mesh.device)
    context = RootContext(units, comm_ctx)
    context.size_reduce_ring()
    earlier = {each.context for each in units if each.context is not None}
    for each in units:
        each.context = context
        for grads in each.grad_groups:
            grads.scheduler = context
    # An inner unit that ran before was a root itself, with forwards and reductions of its own.
    # Merge them in the order of names, which all ranks share.
    for other in sorted(earlier, key=lambda c: c.root.name):
        context.inherit(other)
    return context


def _name_everything(root_module: nn.Module, units: list[Unit]) -> None:
    """Sets the names of units and parameters as seen from the root."""
    names = {module: name for name, module in root_module.named_modules()}
    for unit in units:
        unit.name = ", ".join(names.get(module) or type(module).__name__ for module in unit.modules)
        for group in unit.groups:
            for p in group.params:
                module, attribute = p.owners[0]
                p.name = ".".join(filter(None, (names.get(module), attribute)))


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
                f"{tuple(group.mesh.mesh.shape)}, {group.mesh.device.type}, "
                f"gathered by {group.spec.all_gather.__name__}"
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


def _require_same_model(units: Sequence[Unit]) -> None:
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
