"""From modules to groups: what a call of `fully_shard` takes, refuses, and does, in that order.

Everything is checked before anything is changed, so a call that raises leaves the module as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardgrad.engine.param import CLAIM, FSDPParam, Owner, is_sharded_by_us
from shardgrad.engine.unit import Guest, Unit, unit_of, units_under
from shardgrad.errors import (
    AlreadyShardedError,
    ContainerError,
    EngineError,
    OptionError,
    ParameterClaimedError,
    TiedParameterError,
)
from shardgrad.sharding.mesh import DataParallelMesh
from shardgrad.sharding.shardable import require_one_device, require_shardable

__all__ = ["Collected", "collect", "is_replica", "refuse_unresolved_ties", "validated"]


# torch's own; a sharded module is an instance of `FSDPModule` too.
_ENGINES: tuple[type[Any], ...] = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)


@dataclass(frozen=True)
class Claim:
    """Which unit took a parameter, and as what."""

    unit: Unit
    managed: FSDPParam


@dataclass
class Collected:
    """What a new unit will own.

    Attributes:
        params: original parameter -> (name, owners), in traversal order.
        buffers: to be moved to the mesh's device.
        guests: parameters left for a common ancestor.
        inherited: claims of inner units that move to this one because it contains every user.
        managed_modules: modules whose own parameters were looked at.
        inner_units: all below, in traversal order.
    """

    params: dict[nn.Parameter, tuple[str, list[Owner]]] = field(default_factory=dict)
    buffers: list[tuple[nn.Module, str]] = field(default_factory=list)
    guests: list[Guest] = field(default_factory=list)
    inherited: list[Claim] = field(default_factory=list)
    managed_modules: list[nn.Module] = field(default_factory=list)
    inner_units: Collection[Unit] = ()


def validated(arg: Any) -> list[nn.Module]:
    """Returns the modules that `fully_shard` was given; refuses those that cannot be a unit.

    Raises:
        ContainerError: a container without forward.
        AlreadyShardedError: `fully_shard` has been applied before.
        EngineError: DDP, FSDP1 or torch's FSDP2 has the module, or one below it.
        OptionError: not modules at all, or an empty list.
    """
    modules: list[nn.Module] = list(arg) if isinstance(arg, list | tuple) else [arg]
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        raise OptionError(
            "fully_shard expects a module or a non-empty list of modules",
            expected="torch.nn.Module, or a list of them",
            got=", ".join(type(module).__name__ for module in modules) or "an empty list",
            fix="fully_shard(model)",
        )
    for module in modules:
        # Nobody calls a container, so no hook would ever unshard its parameters.
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_container and type(module).forward is nn.Module.forward:
            raise ContainerError(
                f"fully_shard does not support containers that do not implement forward: {module}",
                expected="a module that is called",
                got=f"{type(module).__name__} with {len(list(module.children()))} children",
                fix="for child in container: fully_shard(child)   # or "
                "fully_shard(list(container))",
            )
        if unit_of(module) is not None:
            raise AlreadyShardedError(
                "Each distinct composable distributed API can only be applied to a module once.",
                expected="a module that is not a unit yet",
                got=f"{type(module).__name__}, which already is one",
                fix="remove the second fully_shard call",
            )
        # All that is below, too: no other engine may shard what this one would.
        for name, child in module.named_modules():
            if isinstance(child, _ENGINES):
                _refuse_other_engine(name, child, is_root=child is module)
    return modules


def _refuse_other_engine(name: str, module: nn.Module, *, is_root: bool) -> None:
    """Refuses what torch's engines have; DDP may replicate a module inside, which is then left
    alone.
    """
    if isinstance(module, DistributedDataParallel) and is_root:
        engine, fix = (
            "DistributedDataParallel",
            "fully_shard(ddp.module), and call that; or leave out DDP",
        )
    elif isinstance(module, FullyShardedDataParallel):
        engine, fix = (
            "FullyShardedDataParallel",
            "fully_shard on each module that FSDP1 would wrap, inner ones first; leave out FSDP1",
        )
    elif isinstance(module, FSDPModule) and unit_of(module) is None:
        engine = "torch's fully_shard"
        fix = "from shardgrad import fully_shard, for every module; or shardgrad.patch()"
    else:
        return
    raise EngineError(
        f"{name or 'the module'} already belongs to {engine}",
        expected="modules that no other engine shards or replicates",
        got=type(module).__name__,
        where=f"module {name or 'itself'}",
        fix=fix,
    )


def collect(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter], mesh: DataParallelMesh
) -> Collected:
    """Finds and checks what a unit over `modules` will own. Changes nothing.

    Raises:
        UnsupportedParameterError, ParameterClaimedError, DeviceError: see `errors.py`.
    """
    # In traversal order, the same on every rank: a set's order differs between processes.
    inner_units = dict.fromkeys(unit for module in modules for unit in units_under(module))
    found = Collected(inner_units=inner_units)
    seen: set[nn.Module] = set()
    plain: dict[nn.Parameter, tuple[str, list[Owner]]] = {}
    for root in modules:
        for prefix, module in _managed_modules(root, "", seen):
            found.managed_modules.append(module)
            for attribute, param in module._parameters.items():
                if param is None or param in ignored:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                _refuse_claimed(name, param)
                require_shardable(name, param)
                plain.setdefault(param, (name, []))[1].append((module, attribute))
            # Buffers are moved to the device and not sharded: running statistics are each rank's
            # own.
            found.buffers.extend(
                (module, name) for name, b in module._buffers.items() if b is not None
            )
    for param, (name, owners) in plain.items():
        _assign(found, param, name, owners, inner_units, modules)
    _take_guests(found, inner_units)
    require_one_device({param: name for param, (name, _) in found.params.items()}, mesh)
    return found


def is_replica(module: nn.Module) -> bool:
    """Returns whether DDP averages the gradients of a module, or torch's `replicate` does."""
    return isinstance(module, DistributedDataParallel) or "replicate" in (
        _get_registry(module) or {}
    )


def _managed_modules(
    module: nn.Module, prefix: str, seen: set[nn.Module]
) -> Iterable[tuple[str, nn.Module]]:
    """Yields a module and everything below it that belongs to no inner unit and to no DDP
    replica.
    """
    if module in seen or is_replica(module):
        return
    seen.add(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and unit_of(child) is None:
            yield from _managed_modules(child, f"{prefix}.{name}" if prefix else name, seen)


def _assign(
    found: Collected,
    param: nn.Parameter,
    name: str,
    owners: list[Owner],
    inner_units: Collection[Unit],
    modules: Sequence[nn.Module],
) -> None:
    """Decides who owns a parameter that may be claimed by another unit."""
    claim: Claim | None = param.__dict__.get(CLAIM)
    if claim is None:
        found.params[param] = (name, owners)
    # A tied parameter goes to the innermost unit that contains all who use it, and is unsharded
    # while any of them runs.
    elif claim.unit in inner_units:
        found.inherited.append(claim)
        found.params[param] = (name, [*claim.managed.owners, *owners])
    else:
        # Another unit owns it, and neither contains the other. Their ancestor will take it; if
        # there is none, the root's first forward says so.
        unit_name = "+".join(type(module).__name__ for module in modules)
        found.guests.append(Guest(name, param, owners, claim.managed.name, unit_name))


def _take_guests(found: Collected, inner_units: Collection[Unit]) -> None:
    """Takes over what two inner units share: the new unit contains both."""
    for unit in inner_units:
        for guest in unit.guests:
            # What two inner units share is given to the one that contains both, and is unsharded
            # whenever either runs.
            claim: Claim = guest.param.__dict__[CLAIM]
            if claim.unit not in inner_units:
                found.guests.append(guest)
            elif guest.param in found.params:
                found.params[guest.param][1].extend(guest.owners)
            else:
                found.inherited.append(claim)
                found.params[guest.param] = (guest.name, [*claim.managed.owners, *guest.owners])


def _refuse_claimed(name: str, param: nn.Parameter) -> None:
    if isinstance(param, DTensor) and is_sharded_by_us(param):
        raise ParameterClaimedError(
            f"parameter {name} is already sharded by another unit",
            expected="a parameter that no unit owns yet",
            got=f"DTensor of shape {tuple(param.shape)} with {param.placements}",
            where=f"parameter {name}",
            fix="apply fully_shard bottom-up: inner modules first, the root last; a module that "
            "several units contain, before all of them",
        )


def refuse_unresolved_ties(units: Sequence[Unit]) -> None:
    """Refuses a root under which a parameter was left for a common ancestor that is no unit.

    Raises:
        TiedParameterError: says which.
    """
    for unit in units:
        for guest in unit.guests:
            raise TiedParameterError(
                f"parameter {guest.name} is shared by units of which none contains the other",
                expected="a common ancestor that is a unit: it owns what they share",
                got=f"units {guest.owner_name} and {guest.unit_name}",
                where=f"parameter {guest.name}",
                fix="call shardgrad.fully_shard on a module that contains both, and run it as the "
                "root",
            )
