"""A captured step: its graphs, and the host state that a replay leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.closed_over import Reads
from shardgrad.graphs.split_graph import SplitGraph

__all__ = ["CapturedStep"]


class CapturedStep:
    """The graphs of a step, and snapshots of the host state after its capture.

    Args:
        key: of the inputs, and guards, at the beginning of the captured call.
        graph: captured.
        outputs: of the captured call.
        capturables: of the step.
        guards: theirs, at the beginning of the captured call.
        before_replays: what they returned then.
        reads: what the captured call read without being given it.

    Attributes:
        key, reads: as given.
        is_confirmed: True once a second capture has been compared with the first.
        outputs: as given; every replay overwrites them.
    """

    def __init__(
        self,
        key: tuple[Hashable, Hashable],
        graph: SplitGraph,
        outputs: Any,
        capturables: Sequence[Capturable],
        guards: Sequence[Hashable],
        before_replays: Sequence[Callable[[], bool]],
        reads: Reads,
    ) -> None:
        self.key, self.reads, self.outputs = key, reads, outputs
        self.is_confirmed = False
        self._graph = graph
        self._capturables = capturables
        # Guards are compared at the beginning of a call, and an eager region may change what they
        # cover.
        self._snapshots = [
            each.snapshot_unguarded()
            if not graph.has_eager_regions and each.guards() == before
            else each.snapshot()
            for each, before in zip(capturables, guards, strict=True)
        ]
        self._before_replays = before_replays
        self._kept = [each.known_to_graph() for each in capturables]

    @property
    def has_eager_regions(self) -> bool:
        """Whether calls are made between graphs."""
        return self._graph.has_eager_regions

    def is_of(self, key: Hashable) -> bool:
        """Returns whether a replay is the step with this key, from the memory that is there now."""
        return self.key == key and all(
            place.key() == found for place, found in self.reads.places.items()
        )

    def prepare(self) -> bool:
        """Makes ready for a replay; returns False if there must be none."""
        return all(prepare() for prepare in self._before_replays)

    def replay(self, *, makes_calls: bool = True) -> Any:
        """Takes a step; returns the outputs, the same tensors each time.

        Args:
            makes_calls: False to leave out the eager regions.
        """
        self._graph.replay(makes_calls=makes_calls)
        for restore in self._snapshots:
            restore()
        for each in self._capturables:
            each.replayed()
        return self.outputs

    def reset(self) -> None:
        """Destroys the graphs."""
        self._graph.reset()
        self._kept.clear()
