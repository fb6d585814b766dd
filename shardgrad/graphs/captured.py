"""A captured step: one graph, or several with eager regions between them, and the host state that a
replay leaves.

Nothing is executed during a capture. At an eager region the graph being captured ends and the next
one begins; the call is kept together with a snapshot of the host state at that moment. A replay
launches the graphs in order, makes the calls between them, and restores the host state from after
the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from shardgrad.engine.streams import wait_for_device
from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.closed_over import Reads
from shardgrad.graphs.eager_regions import handle_eager_calls
from shardgrad.graphs.pool import DeviceGraph, GraphPool
from shardgrad.graphs.recomputation import Redraws

__all__ = ["CapturedStep", "Key", "SplitGraph"]

Key = tuple[Hashable, tuple[Hashable, ...]]  # of the inputs, and guards


class SplitGraph:
    """The graphs of one step and the eager regions between them, in order.

    Args:
        pool: where the graphs are captured.
        capturables: quiesced wherever a graph begins or ends.
        generators: of random numbers, in addition to the device's default one.
        redraws: of an eager call of the step.

    Attributes:
        pool, redraws: as given.
    """

    def __init__(
        self,
        pool: GraphPool,
        capturables: Sequence[Capturable],
        generators: Sequence[torch.Generator],
        redraws: Redraws,
    ) -> None:
        self.pool, self.redraws = pool, redraws
        self._capturables = capturables
        self._generators = [*generators, *redraws.generators]
        self._graphs: list[DeviceGraph] = []
        self._parts: list[Callable[[], object]] = []  # what a replay calls
        self._capture: AbstractContextManager[DeviceGraph] | None = None  # under way, of `_graph`
        self._graph: DeviceGraph

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Captures what the block launches. If the block raises, all graphs are destroyed."""
        with handle_eager_calls(self._split), self.redraws.captured():
            self._begin()
            try:
                yield
                self._end()
            except BaseException as error:
                if self._capture is not None:
                    self._capture.__exit__(type(error), error, error.__traceback__)
                self.reset()
                raise

    def _begin(self) -> None:
        capture = self.pool.capture(self._generators)
        self._graph = capture.__enter__()
        self._capture = capture

    def _end(self) -> None:
        for each in self._capturables:
            each.quiesce()
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.__exit__(None, None, None)
            self._graphs.append(self._graph)
            self._parts.append(self._graph.replay)
        for each in self._capturables:
            each.quiesce()

    def _split(self, call: Callable[[], Any]) -> None:
        self._end()
        self._parts += [each.snapshot() for each in self._capturables]  # what the call expects
        self._parts.append(call)
        self._begin()
        for each in self._capturables:
            each.after_eager_region()

    @property
    def has_eager_regions(self) -> bool:
        """Whether calls are made between graphs."""
        return len(self._graphs) > 1

    def replay(self) -> None:
        """Launches the graphs on the current stream and makes the calls between them."""
        with self.redraws.replayed():
            for part in self._parts:
                part()

    def reset(self) -> None:
        """Destroys the graphs."""
        self._parts.clear()
        while self._graphs:
            self.pool.destroy(self._graphs.pop())


class CapturedStep:
    """The graphs of a step, and snapshots of the host state after its capture.

    Args:
        key: of the inputs, and guards, at the beginning of the captured call; those of torch's
            modes come first, and those of capturables follow.
        graph: captured.
        outputs: of the captured call.
        capturables: of the step.
        before_replays: what they returned at the beginning of the captured call.
        reads: what the captured call read without being given it.

    Attributes:
        key, graph, reads: as given.
        is_compared: True once a second capture has been compared with the first.
        outputs: as given; every replay overwrites them.
    """

    def __init__(
        self,
        key: Key,
        graph: SplitGraph,
        outputs: Any,
        capturables: Sequence[Capturable],
        before_replays: Sequence[Callable[[], bool]],
        reads: Reads,
    ) -> None:
        self.key, self.graph, self.reads, self.outputs = key, graph, reads, outputs
        self.is_compared = False
        self._capturables = capturables
        # Guards are compared at the beginning of a call, and an eager region may change what they
        # cover.
        self._snapshots = [
            each.snapshot_unguarded()
            if not graph.has_eager_regions and each.guards() == before
            else each.snapshot()
            for each, before in zip(capturables, key[1][1:], strict=True)
        ]
        self._before_replays = before_replays
        self._kept = [each.known_to_graph() for each in capturables]

    def is_of(self, key: Hashable) -> bool:
        """Returns whether a replay is the step with this key, from the memory that is there now."""
        return self.key == key and all(
            place.key() == found for place, found in self.reads.places.items()
        )

    def prepare(self) -> bool:
        """Makes ready for a replay; returns False if there must be none."""
        return all(prepare() for prepare in self._before_replays)

    def replay(self) -> Any:
        """Takes a step; returns the outputs, the same tensors each time."""
        self.graph.replay()
        for restore in self._snapshots:
            restore()
        for each in self._capturables:
            each.replayed()
        return self.outputs

    def reset(self) -> None:
        """Destroys the graphs, once the host has waited for the device: they may be running."""
        wait_for_device(self.graph.pool.device)
        self.graph.reset()
        self._kept.clear()
