"""Lazy init: the first forward finds the root, after all calls of `fully_shard`."""

from __future__ import annotations

from torch import nn

from shardgrad.engine.comm_context import CommContext
from shardgrad.engine.same_model import require_same_model
from shardgrad.engine.unit import RootContext, Unit, units_under
from shardgrad.errors import RootError

__all__ = ["lazy_init"]


def lazy_init(unit: Unit) -> RootContext:
    """Returns a unit's context; without one, makes the unit the root of all units under it.

    The latter is a collective: every rank of the mesh must call it.

    Raises:
        RootError: the unit has several modules, so none is the root.
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
    # Names first, since the errors below contain them.
    _name_everything(root_module, units)
    require_same_model(units)
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
