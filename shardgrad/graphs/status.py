"""The status of a step, which the host reads without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.outputs import scalars
from shardgrad.graphs.pool import GraphPool

__all__ = ["StatusReader", "StepStatus"]


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


class StatusReader:
    """Copies a step's scalars to the host, one copy at a time.

    Args:
        pool: the pool of the step.
        capturables: the objects whose `reports` are read.
    """

    def __init__(self, pool: GraphPool, capturables: Sequence[Capturable]) -> None:
        self._pool = pool
        self._capturables = list(capturables)
        # Returns the status once its copy has arrived, and None before; None if no copy is pending.
        self._pending: Callable[[], StepStatus | None] | None = None
        self._last: StepStatus | None = None

    def poll(self, step: int, outputs: Any) -> StepStatus | None:
        """Returns the newest status that has arrived. Starts to copy the present one if no copy is
        pending.

        Args:
            step: the number of the call that returned `outputs`; 0 if they were overwritten.
            outputs: the outputs of that call.

        Streams: the values are collected on the current stream, after the step, and copied to the
            host asynchronously. The host never waits.
        Capture: not safe.
        """
        if self._pending is None and step > 0:
            self._pending = self._start(step, outputs)
        if self._pending is not None and (status := self._pending()) is not None:
            self._last, self._pending = status, None
        return self._last

    def _start(self, step: int, outputs: Any) -> Callable[[], StepStatus | None] | None:
        of_outputs = scalars(outputs)
        reports = chain.from_iterable(each.reports().items() for each in self._capturables)
        named = [*of_outputs, *reports]
        if not named:
            return None
        stream = self._pool.follow()
        with torch.no_grad():
            numbers = torch.stack([value.reshape(()).double() for _, value in named])
            host = numbers.to("cpu", non_blocking=True)  # to pinned memory
        arrived = None if stream is None else stream.record_event()

        def read() -> StepStatus | None:
            if arrived is not None and not arrived.query():
                return None
            found, values = host.tolist(), dict.fromkeys((name for name, _ in named), 0.0)
            for (name, _), value in zip(named, found, strict=True):
                values[name] += value
            return StepStatus(step, values, all(map(math.isfinite, found[: len(of_outputs)])))

        return read
