"""Status of a step for the host, read without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardgrad.engine.streams import EagerEvent
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


@dataclass(frozen=True)
class _Pending:
    """A status on its way to the host.

    Attributes:
        step: as in `StepStatus`.
        names: of the values; those of the step's outputs come first.
        outputs: how many are outputs.
        values: float64, one for each name, on the host once `arrived` is done.
        arrived: None on the CPU.
    """

    step: int
    names: list[str]
    outputs: int
    values: torch.Tensor
    arrived: EagerEvent | None

    def read(self) -> StepStatus | None:
        """Returns the status, or None if it has not arrived."""
        if self.arrived is not None and not self.arrived.is_done():
            return None
        values = dict(zip(self.names, self.values.tolist(), strict=True))
        finite = all(abs(values[name]) < float("inf") for name in self.names[: self.outputs])
        return StepStatus(self.step, values, finite)


class StatusReader:
    """Copies a step's scalars to the host, one copy at a time.

    Args:
        pool: of the step.
        capturables: whose `reports` are read.
    """

    def __init__(self, pool: GraphPool, capturables: Sequence[Capturable]) -> None:
        self._pool = pool
        self._capturables = list(capturables)
        self._pending: _Pending | None = None
        self._last: StepStatus | None = None

    def poll(self, step: int, outputs: Any) -> StepStatus | None:
        """Returns the newest status that has arrived; starts a copy of the present one if none is
        pending.

        Args:
            step: number of the call that returned `outputs`; 0 if they were overwritten.
            outputs: its outputs.

        Streams: the values are collected on the pool's stream, after the step, and copied to the
        host
            asynchronously. The host never waits.
        Capture: not safe.
        """
        if self._pending is None and step > 0:
            self._pending = self._start(step, outputs)
        if self._pending is not None and (status := self._pending.read()) is not None:
            self._last, self._pending = status, None
        return self._last

    def _start(self, step: int, outputs: Any) -> _Pending | None:
        named = scalars(outputs)
        count = len(named)
        for each in self._capturables:
            for name, value in each.reports().items():
                named[name] = named[name] + value if name in named else value
        if not named:
            return None
        with self._pool.turn(), torch.no_grad():
            values = torch.stack(
                [value.detach().reshape(()).to(torch.float64) for value in named.values()]
            )
            if self._pool.stream is None:
                return _Pending(step, list(named), count, values, None)
            pin_memory = self._pool.device.type == "cuda"
            host = torch.empty(len(named), dtype=torch.float64, pin_memory=pin_memory)
            host.copy_(values, non_blocking=True)
            arrived = EagerEvent(torch.Event(self._pool.device))
            arrived.record(self._pool.stream)
        return _Pending(step, list(named), count, host, arrived)
