"""Device scalars that a call leaves to the next one: whether gradients are finite.

Eager code makes a new tensor of each, and a graph reads and writes the addresses of its capture. So
wherever a graph begins or ends they are moved to one place, from which eager code and every graph
go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from shardgrad.graphs.outputs import used_on

__all__ = ["CarriedScalars"]

_Scalars = Sequence[torch.Tensor | None]


class CarriedScalars:
    """Memory for float32 scalars that cross the border of a graph, at addresses that never change.

    Attributes:
        pattern: which of the latest scalars are one tensor, and which are None. A graph that was
            captured with another pattern reads other addresses, so it is a guard.
    """

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self._latest: list[torch.Tensor | None] = []
        self.pattern: tuple[int | None, ...] = ()

    @torch.no_grad()
    def carry(self, scalars: _Scalars) -> _Scalars:
        """Returns tensors of this object's with the values of `scalars`; None stays None.

        Args:
            scalars: device scalars of one device; those that are one tensor stay one.

        Streams: copies, if any, go to the current stream.
        Capture: safe; a graph's own scalars are copied at each replay.
        """
        if len(scalars) == len(self._latest) and all(map(is_, scalars, self._latest)):
            return self._latest
        distinct = list({id(scalar): scalar for scalar in scalars if scalar is not None}.values())
        if distinct:
            self._copy(distinct)
        places = {id(scalar): place for place, scalar in enumerate(distinct)}
        self.pattern = tuple(places.get(id(scalar)) for scalar in scalars)
        self._latest = [None if place is None else self._memory[place] for place in self.pattern]
        return self._latest

    def _copy(self, values: list[torch.Tensor]) -> None:
        device = values[0].device
        if device.type != "cpu":  # they may be of another stream, and are let go of
            used_on(values, torch.accelerator.current_stream(device))
        # Through one tensor: a value may lie where another one belongs.
        for place, value in enumerate(torch.stack(values)):
            if place == len(self._memory):
                self._memory.append(torch.empty_like(value))
            self._memory[place].copy_(value)
