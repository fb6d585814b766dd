"""Finding the root: the first outermost unit to run gathers everything under it, once.

A root may be found late. If an inner unit ran first, it was a root of its own; when the real root runs, it
takes over what the inner one had noted, and both are right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.root_context import RootContext
from shardgrad.engine.same_model import require_agreement
from shardgrad.errors import RootError, TiedParameterError
from shardgrad.features.tensor_extensions import apart, newly_extended

if TYPE_CHECKING:
    from shardgrad.engine.unit import Unit

__all__ = ["establish_context", "unit_of", "units_under"]

_ATTRIBUTE = "_shardgrad_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` made of a module, or None."""
    unit: Unit | None = module.__dict__.get(_ATTRIBUTE)
    return unit


def attach_unit(unit: Unit) -> None:
    """Makes `unit_of` find it."""
    for module in unit.modules:
        module.__dict__[_ATTRIBUTE] = unit


def units_under(module: nn.Module) -> list[Unit]:
    """Returns the units in a module tree in traversal order, the module's own first; each once."""
    found: dict[Unit, None] = {}
    for child in module.modules():
        unit = unit_of(child)
        if unit is not None:
            found[unit] = None
    return list(found)


def establish_context(unit: Unit, runtime: Runtime | None = None) -> RootContext:
    """Makes `unit` the root of everything under it. A collective: every rank of the mesh must call it.

    Args:
        unit: the outermost one.
        runtime: a replacement for the device's, for plans and tests.

    Raises:
        RootError: the unit has several modules, so none is the root.
        TiedParameterError: units share a parameter and no unit contains both.
        ExtensionError, UnsupportedError: a parameter has become a tensor extension, and cannot be one.
        RankDisagreementError: ranks built different models.
    """
    if len(unit.modules) > 1 and any(units_under(module)[1:] for module in unit.modules):
        raise RootError(
            "fully_shard requires a single root module but got several",
            expected="one module that contains the others",
            got=", ".join(type(module).__name__ for module in unit.modules),
            fix="call fully_shard on their parent as well, and run that",
        )
    root_module = unit.modules[0]
    units = units_under(root_module) if len(unit.modules) == 1 else [unit]
    _refuse_unresolved_ties(units)
    _name_everything(root_module, units)
    _part_extensions(units)
    require_agreement(units)
    context = RootContext(units, runtime or Runtime(unit.mesh.device, like=unit.partner))
    context.size_reduce_ring()
    earlier = {each.context for each in units if each.context is not None}
    for each in units:
        each.context = context
        for reducer in each.reducers:
            reducer.scheduler = context.scheduler
    for other in sorted(earlier, key=lambda c: c.root.name):
        context.inherit(other)
    return context


def _name_everything(root_module: nn.Module, units: list[Unit]) -> None:
    """Gives units and parameters their names as seen from the root."""
    names = {module: name for name, module in root_module.named_modules()}
    for unit in units:
        own = [names.get(module) or type(module).__name__ for module in unit.modules]
        unit.name = ", ".join(own)
        for group in unit.groups:
            for p in group.params:
                module, attribute = p.owners[0]
                prefix = names.get(module, "")
                p.name = f"{prefix}.{attribute}" if prefix else attribute


def _part_extensions(units: list[Unit]) -> None:
    """Gives parameters that have become tensor extensions since `fully_shard` groups of their own."""
    leaving = {group: newly_extended(group) for unit in units for group in unit.groups}
    for unit in units:
        if any(leaving[group] for group in unit.groups):
            unit.set_groups([part for group in unit.groups for part in apart(group, leaving[group])])


def _refuse_unresolved_ties(units: list[Unit]) -> None:
    for unit in units:
        for guest in unit.guests:
            raise TiedParameterError(
                f"parameter {guest.name} is shared by units of which none contains the other",
                expected="a common ancestor that is a unit: it owns what they share",
                got=f"units {guest.owner_name} and {guest.unit_name}",
                where=f"parameter {guest.name}",
                fix="call shardgrad.fully_shard on a module that contains both, and run it as the root",
            )
