"""Which ranks had a gradient for which parameter in the last backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardgrad.diagnosis.all_gather_object import all_gather_object
from shardgrad.engine.root import context_of
from shardgrad.engine.unit import unit_of
from shardgrad.errors import RootError

__all__ = ["GradientReport", "gradient_report"]


@dataclass(frozen=True)
class GradientReport:
    """Which ranks had a gradient for which parameter in the last reduction.

    Attributes:
        ranks: number of ranks compared.
        touched_by: parameter name -> ranks (of the shard group) that had a gradient for it.
    """

    ranks: int
    touched_by: dict[str, tuple[int, ...]]

    @property
    def disagreements(self) -> dict[str, tuple[int, ...]]:
        """Parameters that some ranks touched and others did not."""
        return {
            name: ranks for name, ranks in self.touched_by.items() if 0 < len(ranks) < self.ranks
        }

    @property
    def untouched(self) -> list[str]:
        """Parameters that no rank touched; their gradient is None."""
        return [name for name, ranks in self.touched_by.items() if not ranks]

    def __str__(self) -> str:
        rows = [
            f"{name}: ranks {list(ranks)} of {self.ranks}"
            for name, ranks in self.disagreements.items()
        ]
        return "\n".join(rows) or "all ranks touched the same parameters"


def gradient_report(model: nn.Module) -> GradientReport:
    """Compares across the shard group which parameters got gradients in the last backward. A
    collective.

    Args:
        model: the root.

    Raises:
        RootError: `model` is not a root that has run.
    """
    unit = unit_of(model)
    context = None if unit is None else context_of(unit)
    if unit is None or context is None or not unit.is_root:
        raise RootError(
            "gradient_report() needs a root that has run",
            expected="the outermost module that fully_shard was called on, after a backward",
            got=type(model).__name__,
            fix="call it after loss.backward()",
        )
    own = {
        p.name: touched
        for grads in context.grad_groups
        if grads.shard is not None
        for p, touched in zip(grads.params, grads.shard.touched, strict=False)
    }
    group = unit.mesh.shard_group
    everyone: list[dict[str, bool]] = all_gather_object(own, group) if group.size() > 1 else [own]
    names = list(dict.fromkeys(name for answers in everyone for name in answers))
    return GradientReport(
        ranks=group.size(),
        touched_by={
            name: tuple(rank for rank, answers in enumerate(everyone) if answers.get(name))
            for name in names
        },
    )
