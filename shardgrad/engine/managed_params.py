"""From modules to groups: validates modules and collects the parameters of a `fully_shard` call.

Everything is checked before anything is changed, so a call that raises leaves the module unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardgrad.engine.param_group import CLAIM, IGNORED, FSDPParam, Owner, is_claimed, managed_by
from shardgrad.engine.unit import Unit, unit_of, units_under
from shardgrad.errors import (
    AlreadyShardedError,
    ContainerError,
    EngineError,
    OptionError,
    ParameterClaimedError,
    TiedParameterError,
)
from shardgrad.sharding.shardable import require_shardable

# torch's own classes, and alternatives. A sharded module is an instance of `FSDPModule` too.
_ENGINES: dict[type[Any], tuple[str, str]] = {
    DistributedDataParallel: (
        "DistributedDataParallel",
        "fully_shard(ddp.module), and call ddp.module; or remove DDP",
    ),
    FullyShardedDataParallel: (
        "FullyShardedDataParallel",
        "fully_shard on each module that FSDP1 would wrap, inner ones first, instead of FSDP1",
    ),
    FSDPModule: (
        "torch's fully_shard",
        "from shardgrad import fully_shard for every module, or shardgrad.patch()",
    ),
}


def validated(arg: Any) -> list[nn.Module]:
    """Returns the modules that `fully_shard` was given; refuses those that cannot be a unit.

    Raises:
        ContainerError: a container without forward.
        AlreadyShardedError: `fully_shard` was applied before, or a list has a module twice.
        EngineError: DDP, FSDP1 or torch's FSDP2 manages the module or one below it.
        OptionError: not modules, or an empty list.
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
        # Containers are never called, so no hook would ever unshard their parameters.
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if is_container and type(module).forward is nn.Module.forward:
            raise ContainerError(
                f"fully_shard does not support containers that do not implement forward: {module}",
                expected="a module that is called",
                got=f"{type(module).__name__} with {len(list(module.children()))} children",
                fix="for child in container: fully_shard(child)   # or "
                "fully_shard(list(container))",
            )
        if unit_of(module) is not None or modules.count(module) > 1:
            raise AlreadyShardedError(
                "Each distinct composable distributed API can only be applied to a module once.",
                expected="a module that is not a unit yet, once",
                got=f"{type(module).__name__}, which is a unit, or twice in the list",
                fix="remove the second fully_shard call, or the second place in the list",
            )
        # Includes all modules below: no other engine may shard what this one would.
        for name, child in module.named_modules():
            for kind, (engine, fix) in _ENGINES.items():
                # DDP may replicate an inner module, which is then left alone.
                is_replica = kind is DistributedDataParallel and child is not module
                if isinstance(child, kind) and unit_of(child) is None and not is_replica:
                    raise EngineError(
                        f"{name or 'the module'} already belongs to {engine}",
                        expected="modules that no other engine manages",
                        got=type(child).__name__,
                        where=f"module {name or 'itself'}",
                        fix=fix,
                    )
    return modules


def collect(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[str, list[Owner]]]:
    """Returns the parameters that a unit over `modules` will own, with a name and all owners each.

    In an order that all ranks share. Changes nothing.

    Raises:
        UnsupportedParameterError, ParameterClaimedError: see `errors.py`.
    """
    found: dict[nn.Parameter, tuple[str, list[Owner]]] = {}
    for name, place, param in params_under(modules, with_units=False):
        if param not in ignored and not _is_tied(*place):
            _refuse_claimed(name, param)
            require_shardable(name, param, place[0])
            found.setdefault(param, (name, []))[1].append(place)
    # A tied parameter belongs to the innermost unit that contains all its users, and is unsharded
    # while any of them runs. If this unit is not it, an ancestor takes the parameter, or the root's
    # first forward reports that there is none.
    inner_units = [unit for module in modules for unit in units_under(module)]
    for name, place, param in tied_under(modules):
        claim: FSDPParam = param.__dict__[CLAIM]
        if any(claim.group in unit.groups for unit in inner_units):
            found.setdefault(param, (name, [*claim.owners]))[1].append(place)
    return found


def modules_under(
    roots: Iterable[nn.Module], *, with_units: bool
) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules and all below them, by name, except DDP's replicas.

    Includes inner units and the modules below them only `with_units`.
    """
    seen: set[nn.Module] = set()

    def below(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        # DDP or torch's `replicate` averages their gradients.
        composed = module.__dict__.get(REGISTRY_KEY, ())
        is_replica = isinstance(module, DistributedDataParallel) or "replicate" in composed
        if module in seen or is_replica:
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            if with_units or unit_of(child) is None:
                yield from below(f"{name}.{child_name}" if name else child_name, child)

    for root in roots:
        yield from below("", root)


def tied_under(roots: Iterable[nn.Module]) -> Iterator[tuple[str, Owner, nn.Parameter]]:
    """Yields places under modules that still register a parameter which a unit has taken elsewhere.

    Each with its name, in an order that all ranks share.
    """
    for name, place, param in params_under(roots, with_units=True):
        if _is_tied(*place):
            yield name, place, param


def params_under(
    roots: Iterable[nn.Module], *, with_units: bool
) -> Iterator[tuple[str, Owner, nn.Parameter]]:
    """Yields the places of parameters under modules, each with its name; see `modules_under`."""
    for prefix, module in modules_under(roots, with_units=with_units):
        for attribute, param in module._parameters.items():
            if param is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, (module, attribute), param


def _is_tied(module: nn.Module, attribute: str) -> bool:
    param: Any = module._parameters[attribute]
    return is_claimed(param) and attribute not in module.__dict__.get(IGNORED, ())


def _refuse_claimed(name: str, param: nn.Parameter) -> None:
    managed = managed_by(param)
    if managed is not None:
        raise ParameterClaimedError(
            f"parameter {name} is already sharded by another unit",
            expected="a parameter that no unit owns yet",
            got=f"DTensor of shape {tuple(param.shape)} with {managed.sharding.placements}",
            where=f"parameter {name}",
            fix="apply fully_shard bottom-up: inner modules first, the root last; shard a module "
            "that several units contain before all of them",
        )


def refuse_unresolved_ties(units: Sequence[Unit]) -> None:
    """Refuses a root with a parameter left for a common ancestor that is not a unit.

    Raises:
        TiedParameterError: names the parameter.
    """
    for name, _, param in tied_under(units[0].modules):
        raise TiedParameterError(
            f"parameter {name} is shared by units, none of which contains the others",
            expected="a unit that contains all of them, and so owns the parameter",
            got=f"the same parameter as {param.__dict__[CLAIM].name} in another unit",
            where=f"parameter {name}",
            fix="call shardgrad.fully_shard on a module that contains them, and run it as the root",
        )
