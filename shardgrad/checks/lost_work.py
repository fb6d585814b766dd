"""What a program has done that the next optimizer step, or a state dict, would lose, without a
word.

* A write to an unsharded parameter, in forward or between `unshard()` and `reshard()`: shards do
not have it. * A gradient that was never reduced, since the last backward before the step ran
without synchronization. * A hook of `register_hook` on a sharded parameter: autograd meets the
unsharded one, which has none. * Optimizer state that another rank has saved (`require_own_shards`).

All are looked for before a step, and writes before a state dict too, as models that are averaged
have no optimizer. On the host alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from operator import attrgetter

import torch
from torch.optim.optimizer import Optimizer

from shardgrad.engine.grad_group import Waiting, grads_of
from shardgrad.engine.param import FSDPParam, managed_by
from shardgrad.engine.param_group import ParamGroup
from shardgrad.errors import GradientError
from shardgrad.sharding.dtensor import require_own_shards

__all__ = ["LostWork", "LostWorkWarning", "refuse_hooks"]

_version = attrgetter("_version")


class LostWorkWarning(UserWarning):
    """An optimizer step will not see a write or a gradient that a program has made."""


class LostWork:
    """Looks for it before the steps of one optimizer, or state dicts; warns once of each kind."""

    def __init__(self) -> None:
        # By id of a group: of its unsharded parameters, their sum.
        self._versions: dict[int, int] = {}
        self._warned: set[str] = set()
        self._state_id = 0

    def look(self, optimizer: Optimizer, groups: Iterable[ParamGroup]) -> None:
        """Called before a step that writes parameters of `groups`.

        Raises:
            ForeignParameterError: another rank has saved the optimizer's state.
        """
        if self._state_id != id(optimizer.state):  # loaded
            self._state_id = id(optimizer.state)
            _require_own_state(optimizer)
        for group in groups:
            if grads_of(group).waiting is Waiting.SUM:
                self._warn(
                    f"gradients of {_names(group.params)} are not reduced, and this step does not "
                    "see them",
                    "set_requires_gradient_sync(True) before the last backward of each step",
                )
            self.look_at_writes(group)

    def look_at_writes(self, group: ParamGroup) -> None:
        """Looks whether unsharded parameters were written; called before they are lost, or left
        out.
        """
        unsharded = [p.unsharded for p in group.params if p.unsharded is not None]
        versions = sum(map(_version, unsharded))
        if versions != self._versions.setdefault(id(group), 0):
            self._versions[id(group)] = versions
            written = [p for p in group.params if p.unsharded is not None and p.unsharded._version]
            self._warn(
                f"{_names(written)} was written while unsharded, which is lost when it is "
                f"resharded",
                "write the sharded parameter, between steps: with torch.no_grad(): "
                "param.copy_(...)",
            )

    def _warn(self, what: str, fix: str) -> None:
        if fix not in self._warned:
            self._warned.add(fix)
            warnings.warn(f"shardgrad: {what}. Try: {fix}", LostWorkWarning, stacklevel=5)


def refuse_hooks(params: Iterable[tuple[torch.Tensor, str]]) -> None:
    """Refuses parameters with hooks that would never run.

    Args:
        params: with their names.

    Raises:
        GradientError: there is one.
    """
    for param, name in params:
        if param._backward_hooks:
            raise GradientError(
                f"a hook on {name} never runs: autograd meets the unsharded parameter, which has "
                "none",
                expected="hooks of modules, or post-accumulate hooks of sharded parameters",
                got=f"{len(param._backward_hooks)} from register_hook",
                where=f"parameter {name}",
                fix="param.register_post_accumulate_grad_hook(hook) after fully_shard; the hook "
                "gets the parameter, whose grad is reduced",
            )


def _require_own_state(optimizer: Optimizer) -> None:
    for param, state in optimizer.state.items():
        managed = managed_by(param) if isinstance(param, torch.Tensor) else None
        if managed is not None and isinstance(state, Mapping):
            require_own_shards((f"{key} of {managed.name}", value) for key, value in state.items())


def _names(params: Iterable[FSDPParam]) -> str:
    names = [p.name for p in params]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
