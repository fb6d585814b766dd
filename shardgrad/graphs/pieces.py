"""A step as one graph, or cut into several around what no graph can hold.

While a step is captured nothing is executed. At a cut the graph under way ends, the next one begins, and what
was to be called there is remembered with the state of the host at that moment. A replay runs the pieces in
turn, with the calls between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.interludes import taken_over
from shardgrad.graphs.pool import DeviceGraph, GraphPool
from shardgrad.graphs.recomputation import recorded_without_random_state

__all__ = ["Pieces"]


@dataclass
class _Cut:
    """What runs between two graphs."""

    call: Callable[[], Any]
    images: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        for restore in self.images:
            restore()
        self.call()


class Pieces:
    """The graphs of one step, in order, and what runs between them.

    Args:
        pool: where they are captured.
        capturables: brought to rest at every border.
        outside: optimizers whose steps are cuts.
        generators: of random numbers, besides the device's own.
    """

    def __init__(
        self,
        pool: GraphPool,
        capturables: Sequence[Capturable],
        outside: Sequence[Optimizer],
        generators: Sequence[torch.Generator],
    ) -> None:
        self._pool = pool
        self._capturables = capturables
        self._outside = outside
        self._generators = generators
        self._sequence: list[DeviceGraph | _Cut] = []
        self._open: AbstractContextManager[DeviceGraph] | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Captures what the block launches. If it raises, nothing is left of any piece."""
        with taken_over(self._outside, self._cut), recorded_without_random_state():
            self._begin()
            try:
                yield
                self._end()
            except BaseException as error:
                if self._open is not None:
                    self._open.__exit__(type(error), error, error.__traceback__)
                self.reset()
                raise

    def _begin(self) -> None:
        context = self._pool.capture(self._generators)
        self._sequence.append(context.__enter__())
        self._open = context

    def _end(self) -> None:
        for each in self._capturables:
            each.rest()
        context, self._open = self._open, None
        if context is not None:
            context.__exit__(None, None, None)
        for each in self._capturables:
            each.rest()

    def _cut(self, call: Callable[[], Any]) -> None:
        for each in self._capturables:
            each.hand_over()
        self._end()
        self._sequence.append(_Cut(call, [each.image() for each in self._capturables]))
        self._begin()
        for each in self._capturables:
            each.take_back()

    @property
    def are_cut(self) -> bool:
        """Whether anything runs between them."""
        return len(self._sequence) > 1

    def replay(self) -> None:
        """Launches the graphs on the current stream, with what runs between them."""
        for piece in self._sequence:
            if isinstance(piece, _Cut):
                piece.run()
            else:
                piece.replay()

    def reset(self) -> None:
        """Destroys the graphs."""
        for piece in self._sequence:
            if not isinstance(piece, _Cut):
                piece.reset()
