"""A captured step: its graphs, and what a replay leaves on the host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.pieces import Pieces

__all__ = ["Captured"]


class Captured:
    """The graphs of a step, and the state in which the step that they repeat left the host.

    Args:
        pieces: recorded.
        outputs: what the step returned while it was.
        capturables: that took part.
        facts: theirs, when the call began.

    Attributes:
        outputs: as given; every replay writes them.
    """

    def __init__(
        self, pieces: Pieces, outputs: Any, capturables: Sequence[Capturable], facts: Sequence[Hashable]
    ) -> None:
        self._pieces = pieces
        self._capturables = capturables
        # Facts were compared when the call began, but what runs between pieces may change them.
        self._images = [
            each.image_beyond_facts() if not pieces.are_cut and each.facts() == before else each.image()
            for each, before in zip(capturables, facts, strict=True)
        ]
        self.outputs = outputs

    def replay(self) -> Any:
        """Takes a step; returns the outputs, always the same tensors."""
        self._pieces.replay()
        for restore in self._images:
            restore()
        for each in self._capturables:
            each.replayed()
        return self.outputs

    def reset(self) -> None:
        """Destroys the graphs."""
        self._pieces.reset()
