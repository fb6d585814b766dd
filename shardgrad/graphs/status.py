"""The status of a step, which the host reads without waiting for the device."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.outputs import named
from shardgrad.graphs.pool import GraphPool

__all__ = ["StepStatus", "read_later"]


@dataclass(frozen=True)
class StepStatus:
    """Status of one step.

    Attributes:
        step: the number of the graphed step's call, counted from 1.
        values: the outputs with one element, by their path in the tree; and the reports of
            capturables, such as "skipped steps", summed over those with the same name.
        finite: True if all of these outputs are finite.
    """

    step: int
    values: dict[str, float]
    finite: bool


def read_later(
    step: int, outputs: Any, capturables: Sequence[Capturable], pool: GraphPool
) -> Callable[[], StepStatus | None] | None:
    """Starts to copy a step's scalars to the host.

    Args:
        step: the number of the call that returned `outputs`.
        outputs: the outputs of that call.
        capturables: the objects whose `reports` are read.
        pool: the pool of the step.

    Returns:
        A function that returns the status once the copy has arrived, and None before; None if there
        are no scalars.

    Streams: the values are collected on the current stream, after the step, and copied to the host
        asynchronously. The host never waits.
    Capture: not safe.
    """
    values = [
        (path.strip("[]'") or "output", leaf)
        for path, leaf in named(outputs)
        if leaf.numel() == 1 and not leaf.is_complex()
    ]
    of_outputs = len(values)
    for each in capturables:
        values += each.reports().items()
    if not values:
        return None
    stream = pool.follow()
    with torch.no_grad():
        numbers = torch.stack([value.reshape(()).double() for _, value in values])
        host = numbers.to("cpu", non_blocking=True)  # to pinned memory
    arrived = None if stream is None else stream.record_event()

    def read() -> StepStatus | None:
        if arrived is not None and not arrived.query():
            return None
        found, sums = host.tolist(), defaultdict[str, float](float)
        for (name, _), value in zip(values, found, strict=True):
            sums[name] += value
        return StepStatus(step, dict(sums), all(map(math.isfinite, found[:of_outputs])))

    return read
