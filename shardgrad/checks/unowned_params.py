"""Refusing a forward while a parameter under its root would be trained apart by every rank.

A parameter that was attached after `fully_shard`, such as an adapter's or a new head's, belongs to no unit:
its gradients are not averaged, and nothing in the loss shows that ranks drift apart. So the outermost forward
looks through the modules under it once, and again whenever they have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardgrad.engine.param import is_unsharded_param
from shardgrad.engine.unit import Unit
from shardgrad.errors import UnownedParameterError

__all__ = ["UnownedParams", "note_ignored"]

_Register = dict[str, nn.Parameter | None]
_Slot = tuple[_Register, str]

_IGNORED = "_shardgrad_ignored"


def note_ignored(modules: Iterable[nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Notes on modules which of their parameters `ignored_params` named: under that name, any object is
    fine, so that loading with `assign=True` and `module.to()` may put another one there.
    """
    for module in modules if ignored else ():
        names = {name for name, param in module._parameters.items() if param in ignored}
        if names:
            module.__dict__[_IGNORED] = names | module.__dict__.get(_IGNORED, set())


class UnownedParams:
    """Looks for trainable parameters that no unit owns, when a unit's forward is the outermost one.

    Args:
        unit: what is under its modules is looked at.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._children: list[dict[str, nn.Module | None]] = []
        self._registers: list[_Register] = []
        self._known: tuple[list[Any], list[int]] | None = None
        self._frozen: list[_Slot] = []  # owned by no unit either

    def refuse(self) -> None:
        """Does nothing if modules are as they were; called before every outermost forward with gradients.

        Capture: safe.

        Raises:
            UnownedParameterError: there are some, and other ranks train theirs.
        """
        if self._known is not None and self._known == self._seen() and not any(map(_trains, self._frozen)):
            return
        if self._unit.mesh.data_parallel_size == 1:
            return
        self._known = None
        modules = list(_modules_of(self._unit))
        apart = {name: _unowned(module) for name, module in modules}
        found = {name: [slot for slot in slots if _trains(slot)] for name, slots in apart.items()}
        if any(found.values()):
            raise self._error([(name, attribute) for name, slots in found.items() for _, attribute in slots])
        self._frozen = list(chain.from_iterable(apart.values()))
        self._children = [module._modules for _, module in modules]
        self._registers = [module._parameters for _, module in modules]
        self._known = self._seen()

    def _seen(self) -> tuple[list[Any], list[int]]:
        """Returns which modules there are, and how many parameters each has; the loops are C's."""
        children = chain.from_iterable(map(dict.values, self._children))
        return list(children), list(map(len, self._registers))

    def _error(self, found: list[tuple[str, str]]) -> UnownedParameterError:
        names = [f"{module}.{attribute}" if module else attribute for module, attribute in found]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        owner = dict(_modules_of(self._unit))[found[0][0]]
        if any(isinstance(param, DTensor) or is_unsharded_param(param) for param in owner.parameters()):
            fix = "attach it before fully_shard is called"
        else:
            fix = f"shardgrad.fully_shard(model.get_submodule({found[0][0]!r})), as for each new module"
        return UnownedParameterError(
            f"no unit owns {', '.join(names[:5])}{more}: every rank would train its own",
            expected="trainable parameters in a unit, in ignored_params, or DTensors",
            got=f"{len(names)} that were attached after fully_shard",
            where=f"rank {dist.get_rank()}, forward of unit {self._unit.name or 'root'!r}",
            fix=f"{fix}; to train it apart, attach it first and name it in ignored_params",
        )


def _trains(slot: _Slot) -> bool:
    param = slot[0].get(slot[1])
    return param is not None and param.requires_grad


def _unowned(module: nn.Module) -> list[_Slot]:
    """Returns where a module registers parameters of no unit, that the program has not taken on itself."""
    ignored = module.__dict__.get(_IGNORED, ())
    return [
        (module._parameters, name)
        for name, param in module._parameters.items()
        if not (param is None or name in ignored or isinstance(param, DTensor) or is_unsharded_param(param))
    ]


def _modules_of(unit: Unit) -> Iterator[tuple[str, nn.Module]]:
    """Yields a unit's modules and all below them, by name, but for DDP's replicas."""
    seen: set[nn.Module] = set()

    def below(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        is_replica = isinstance(module, DistributedDataParallel) or "replicate" in (
            _get_registry(module) or {}
        )
        if module in seen or is_replica:
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from below(f"{name}.{child_name}" if name else child_name, child)

    for module in unit.modules:
        yield from below("", module)
