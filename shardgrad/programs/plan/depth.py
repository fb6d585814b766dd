"""A deep model from two shallow ones: the same block is rehearsed once.

Blocks that are alike add the same memory, the same traffic and, in the steady state, the same time.
So a line through two rehearsals with a few of them predicts a model with many, in a fraction of the
time.

Both numbers have the parity of the deep model's: units alternate between two slots, and which slot
the largest units use depends on the number of units between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardgrad.programs.plan.models import build_plan_model
from shardgrad.programs.plan.rehearsal import Rehearsal, rehearse
from shardgrad.programs.plan.request import Request

_FEWEST, _APART = 4, 2


def rehearse_shallow(request: Request) -> list[Rehearsal]:
    """Rehearses with four and six of the blocks that are alike, or five and seven, or all if there
    are fewer.

    Raises:
        UsageError, TrainingError: as `rehearse`.
    """
    together = request.blocks_per_unit
    depths = _depths(len(build_plan_model(request).alike()) // together)
    if len(depths) == 1:
        return [rehearse(request)]
    return [rehearse(request.but(blocks=units * together)) for units in depths]


def line(points: Sequence[tuple[int, Any]], depth: int) -> Any:
    """Returns the value at a depth of the line through one or two points (depth, value).

    A value is a number, or numbers by key, of which a missing one is 0.
    """
    (few, first), (more, last) = points[0], points[-1]
    if isinstance(first, Mapping):
        keys = dict.fromkeys([*first, *last])
        return {key: line([(at, of.get(key, 0)) for at, of in points], depth) for key in keys}
    return first if few == more else first + (last - first) / (more - few) * (depth - few)


def _depths(units: int) -> list[int]:
    few = _FEWEST + (units - _FEWEST) % 2
    return sorted({min(few, units), min(few + _APART, units)})
