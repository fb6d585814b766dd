"""How training goes, for the host, without making the device wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.outputs import scalars
from shardgrad.graphs.pool import GraphPool

__all__ = ["StatusWord", "StepStatus"]


@dataclass(frozen=True)
class StepStatus:
    """One look at a step.

    Attributes:
        step: which call of the graphed step it was, counted from 1.
        values: the outputs that are one number, by their path; and what capturables report, such as
            "skipped steps", of several together.
        finite: True if all outputs among them are.
    """

    step: int
    values: dict[str, float]
    finite: bool


class StatusWord:
    """A few numbers on their way to the host.

    Args:
        pool: where steps run.
        capturables: asked for what they report.
    """

    def __init__(self, pool: GraphPool, capturables: Sequence[Capturable]) -> None:
        self._pool = pool
        self._capturables = list(capturables)
        self._sent: tuple[int, list[str], int, torch.Tensor, Any] | None = None
        self._last: StepStatus | None = None

    def poll(self, step: int, outputs: Any) -> StepStatus | None:
        """Returns the newest status that has arrived, and sends for the present one if none is under way.

        Args:
            step: number of the call that returned `outputs`; 0 if there are none to look at.
            outputs: its outputs.

        Streams: the numbers are collected on the pool's stream, behind the step, and copied to the host
            without waiting. The host never waits.
        Capture: not safe.
        """
        if self._sent is None and step > 0:
            self._send(step, outputs)
        if self._sent is not None and (self._sent[4] is None or self._sent[4].query()):
            number, names, count, numbers, _ = self._sent
            values = dict(zip(names, numbers.tolist(), strict=True))
            finite = all(abs(values[name]) < float("inf") for name in names[:count])
            self._last, self._sent = StepStatus(number, values, finite), None
        return self._last

    def _send(self, step: int, outputs: Any) -> None:
        named = scalars(outputs)
        count = len(named)
        for each in self._capturables:
            for name, value in each.reports().items():
                named[name] = named[name] + value if name in named else value
        if not named:
            return
        with self._pool.turn(), torch.no_grad():
            numbers = torch.stack([value.detach().reshape(()).to(torch.float64) for value in named.values()])
            arrived = None
            if self._pool.stream is not None:
                host = torch.empty(
                    len(named), dtype=torch.float64, pin_memory=self._pool.device.type == "cuda"
                )
                host.copy_(numbers, non_blocking=True)
                arrived = torch.Event(self._pool.device)
                arrived.record(self._pool.stream)
                numbers = host
        self._sent = step, list(named), count, numbers, arrived
