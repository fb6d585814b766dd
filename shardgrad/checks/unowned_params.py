"""Refuses a forward if each rank would train a parameter of the model separately.

A parameter that was attached after `fully_shard`, such as an adapter's or a new head's, belongs to
no unit; nor does one of an unsharded module around the units. Its gradients are not averaged, and
the loss does not show that ranks diverge. So the outermost forward of a unit searches the modules
under it, and the modules that call it, which are on the call stack. It searches once, and again
whenever these modules have changed.

A module next to the model is not on the stack, but its parameters may be in the same optimizer.
This causes a warning at the optimizer's first step and not an error, since the program or DDP may
average these gradients, and a parameter does not show whether it does.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, takewhile
from operator import methodcaller
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.engine.managed_params import modules_under, params_under, tied_under
from shardgrad.engine.param_group import IGNORED, is_claimed, is_unsharded_param
from shardgrad.engine.unit import Unit, units_under
from shardgrad.errors import UnownedParameterError, listed

_Register = dict[str, nn.Parameter | None]
_Slot = tuple[_Register, str]

_CALL = nn.Module._call_impl.__code__
_VALUES = methodcaller("values")  # a TorchScript module keeps its children in no dictionary


class UnownedParameterWarning(UserWarning):
    """An optimizer of a sharded model also has parameters that each rank trains separately."""


def note_ignored(modules: Iterable[nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Marks the parameters in `ignored_params`, and records their names on modules, since
    `load_state_dict(assign=True)` and `module.to()` replace the objects.
    """
    for module in modules if ignored else ():
        names = {name for name, param in module._parameters.items() if param in ignored}
        if names:
            module.__dict__[IGNORED] = names | module.__dict__.get(IGNORED, set())
    for param in ignored:
        param.__dict__[IGNORED] = True


# Modules around units, and the one unit inside them that searches them.
_around: weakref.WeakKeyDictionary[nn.Module, weakref.ref[UnownedParams]] = (
    weakref.WeakKeyDictionary()
)


class UnownedParams:
    """Searches for trainable parameters that no unit owns when a unit's forward is the outermost
    one.

    Args:
        unit: the unit. The search covers its modules, those that call them, and all under both.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._callers: list[weakref.ref[nn.Module]] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._registers: list[_Register] = []
        self._known: tuple[list[Any], list[int]] | None = None
        self._frozen: list[_Slot] = []  # frozen parameters that no unit owns

    def refuse(self) -> None:
        """Refuses unowned parameters. Called before every outermost forward with gradients; returns
        early if no module has changed.

        Capture: safe.

        Raises:
            UnownedParameterError: there are such parameters, and several ranks.
        """
        if self._known == self._seen() and not any(map(_trains, self._frozen)):
            return
        if self._unit.mesh.data_parallel_size == 1:
            return
        roots = [*self._callers_now(), *self._unit.modules]
        # Exclude parameters that two units share: the second unit refuses them, with its own error.
        shared = {
            param
            for root in roots
            for unit in units_under(root)
            for _, _, param in tied_under(unit.modules)
        }
        apart = [
            (name, module, (module._parameters, attribute))
            for name, (module, attribute), param in params_under(roots, with_units=True)
            if isinstance(param, nn.Parameter)  # functional_call may put other tensors there
            and _is_apart(param)
            and attribute not in module.__dict__.get(IGNORED, ())
            and param not in shared
        ]
        found = {name: module for name, module, slot in apart if _trains(slot)}
        if found:
            error = self._error(found)
            recorder.report(error)  # other ranks may not raise, and would wait for this one
            raise error
        self._frozen = [slot for *_, slot in apart]
        modules = list(modules_under(roots, with_units=True))
        self._children = [module._modules for _, module in modules]
        self._registers = [module._parameters for _, module in modules]
        self._known = self._seen()

    def _seen(self) -> tuple[list[Any], list[int]]:
        """Returns the present modules and the number of parameters of each, in passes in C."""
        children = chain.from_iterable(map(_VALUES, self._children))
        return list(children), list(map(len, self._registers))

    def _callers_now(self) -> list[nn.Module]:
        """Returns the modules that call this unit, outermost first, without those that another unit
        searches.
        """
        # A replica has what it calls. `modules_under` yields not even the replica itself.
        for module in takewhile(_is_no_replica, _modules_on_stack()):
            looks = _around.get(module)
            if module not in self._unit.modules and (looks is None or looks() is None):
                _around[module] = weakref.ref(self)
                self._callers.append(weakref.ref(module))
        return [caller for reference in self._callers if (caller := reference()) is not None]

    def _error(self, found: dict[str, nn.Module]) -> UnownedParameterError:
        """Returns the error for parameters by name, each with the module that has it."""
        name, owner = next(iter(found.items()))
        is_around = owner not in dict(modules_under(self._unit.modules, with_units=True)).values()
        got = "that were attached after fully_shard"
        if is_around:
            got = "in modules around this unit that are not sharded"
            fix = "shardgrad.fully_shard(model) for the outermost module too, after the inner ones"
        elif all(map(_is_apart, owner.parameters())):
            submodule = name.rpartition(".")[0]
            fix = f"shardgrad.fully_shard(model.get_submodule({submodule!r})), and each other "
            fix += "new module"
        else:
            fix = "attach it before fully_shard is called"
        return UnownedParameterError(
            f"no unit owns {listed([*found], 5)}: each rank would train its own copy",
            expected="trainable parameters in a unit, in ignored_params, or DTensors",
            got=f"{len(found)} {got}",
            where=f"rank {dist.get_rank()}, forward of unit {self._unit.name or 'root'!r}",
            fix=f"{fix}; or pass it in ignored_params to train it separately",
        )


def _modules_on_stack() -> list[nn.Module]:
    """Returns the modules whose forward runs on this thread, outermost first."""
    found: dict[nn.Module, None] = {}
    for frame, _ in walk_stack(None):
        if frame.f_code is _CALL:
            found[frame.f_locals["self"]] = None
    return list(found)[::-1]


def _is_no_replica(module: nn.Module) -> bool:
    return any(modules_under([module], with_units=True))


def _trains(slot: _Slot) -> bool:
    param = slot[0].get(slot[1])
    return param is not None and param.requires_grad


def _is_apart(param: torch.Tensor) -> bool:
    is_known = isinstance(param, DTensor) or is_unsharded_param(param)
    return not is_known and IGNORED not in param.__dict__


# -- next to the model


def warn_of_unowned(optimizer: Optimizer, models: Iterable[nn.Module]) -> bool:
    """Warns of trainable parameters of an optimizer that no unit owns, except those in
    `ignored_params`; returns whether there were any.

    Args:
        optimizer: has parameters of a sharded model, too.
        models: all sharded modules.
    """
    found = {
        param: names[i] if names else f"parameter {i} of group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for names in [group.get("param_names")]
        for i, param in enumerate(group["params"])
        if param.requires_grad and _is_apart(param) and not is_claimed(param)
    }
    for param in _ignored_under(models) if found else ():
        found.pop(param, None)
    if found:
        named = [f"{name}, of shape {tuple(param.shape)}" for param, name in found.items()]
        warnings.warn(
            f"shardgrad: {type(optimizer).__name__} trains a sharded model, but no unit owns "
            f"{len(found)} of its parameters: {listed(named, 5, '; ')}. Each rank trains its own "
            f"copy (this is rank {dist.get_rank()}), unless DDP or the program averages their "
            "gradients. Try: shardgrad.fully_shard(module) on the module that has them, before "
            "building the optimizer; or pass them in ignored_params",
            UnownedParameterWarning,
            stacklevel=6,
        )
    return bool(found)


def _ignored_under(models: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yields the parameters that have names which `ignored_params` noted on their modules."""
    for module in {module for model in models for module in model.modules()}:
        for name in module.__dict__.get(IGNORED, ()):
            param = module._parameters.get(name)
            if param is not None:
                yield param
