"""Status of a step for the host, read without waiting for the device."""

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
        step: number of the call of the graphed step, from 1.
        values: the outputs that are one number, by their path; and the reports of capturables, such
            as "skipped steps", summed over those that report the same name.
        finite: True if all outputs among them are finite.
    """

    step: int
    values: dict[str, float]
    finite: bool


class StatusReader:
    """Copies a step's scalars to the host, one copy at a time.

    Args:
        pool: of the step.
        capturables: whose `reports` are read.
    """

    def __init__(self, pool: GraphPool, capturables: Sequence[Capturable]) -> None:
        self._pool = pool
        self._capturables = list(capturables)
        self._pending: Callable[[], StepStatus | None] | None = None  # None until it has arrived
        self._last: StepStatus | None = None

    def poll(self, step: int, outputs: Any) -> StepStatus | None:
        """Returns the newest status that has arrived; starts a copy of the present one if none is
        pending.

        Args:
            step: number of the call that returned `outputs`; 0 if they were overwritten.
            outputs: its outputs.

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
        names, stream = [name for name, _ in named], self._pool.follow()
        with torch.no_grad():
            numbers = torch.stack([value.detach().reshape(()).double() for _, value in named])
            host = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
            host.copy_(numbers, non_blocking=True)
            arrived = None if stream is None else stream.record_event()

        def read() -> StepStatus | None:
            if arrived is not None and not arrived.query():
                return None
            found, values = host.tolist(), dict.fromkeys(names, 0.0)
            for name, value in zip(names, found, strict=True):
                values[name] += value
            return StepStatus(step, values, all(map(math.isfinite, found[: len(of_outputs)])))

        return read
