"""A captured step: one graph, or several with eager regions between them, and the host state that a
replay leaves.

Nothing is executed during a capture. At an eager region the graph being captured ends and the next
one begins; the call is kept together with a snapshot of the host state at that moment. A replay
launches the graphs in order, makes the calls between them, and restores the host state from after
the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from shardgrad.engine.streams import wait_for_device
from shardgrad.graphs.capturable import Capturable
from shardgrad.graphs.eager_regions import handle_eager_calls
from shardgrad.graphs.pool import DeviceGraph, GraphPool
from shardgrad.graphs.reads import Reads
from shardgrad.graphs.recomputation import Redraws

__all__ = ["CapturedStep", "Key"]

Key = tuple[Hashable, tuple[Hashable, ...]]  # of the inputs, and guards


class CapturedStep:
    """The graphs of one step and the eager regions between them, in order.

    Args:
        key: of the inputs, and guards, at the beginning of the captured call; those of torch's
            modes come first, and those of capturables follow.
        pool: where the graphs are captured.
        capturables: of the step, quiesced wherever a graph begins or ends.
        generators: of random numbers, in addition to the device's default one.
        redraws: of an eager call of the step.

    Attributes:
        key, redraws: as given.
        is_compared: True once a second capture has been compared with the first.
        reads: what the captured call read without being given it; once it is captured.
        outputs: of the captured call, likewise; every replay overwrites them.
    """

    reads: Reads
    outputs: Any

    def __init__(
        self,
        key: Key,
        pool: GraphPool,
        capturables: Sequence[Capturable],
        generators: Sequence[torch.Generator],
        redraws: Redraws,
    ) -> None:
        self.key, self.redraws, self.is_compared = key, redraws, False
        self._pool, self._capturables = pool, capturables
        self._generators = [*generators, *redraws.generators]
        self._graphs: list[DeviceGraph] = []
        self._parts: list[Callable[[], object]] = []  # what a replay calls
        self._graph: DeviceGraph  # whose capture is under way
        self._capture = ExitStack()
        self._before_replays = list(filter(None, [each.before_replays() for each in capturables]))
        self._snapshots: list[Callable[[], None]] = []  # of the host after the capture
        self._kept: list[Any] = []

    # -- a capture

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Captures what the block launches. If the block raises, all graphs are destroyed."""
        try:
            with handle_eager_calls(self._split), self.redraws.captured(), self._capture:
                self._begin()
                yield
                self._end()
        except BaseException:
            self._destroy()
            raise
        # Guards are compared at the beginning of a call, and an eager region may change what they
        # cover.
        self._snapshots = [
            each.snapshot()
            for each, before in zip(self._capturables, self.key[1][1:], strict=True)
            if self.has_eager_regions or not each.is_guarded or each.guards() != before
        ]
        self._kept = [each.known_to_graph() for each in self._capturables]

    def _begin(self) -> None:
        self._graph = self._capture.enter_context(self._pool.capture(self._generators))

    def _end(self) -> None:
        for each in self._capturables:
            each.quiesce()
        self._capture.close()
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

    # -- replays

    @property
    def has_eager_regions(self) -> bool:
        """Whether calls are made between graphs."""
        return len(self._graphs) > 1

    def is_of(self, key: Hashable) -> bool:
        """Returns whether a replay is the step with this key, from the memory that is there now."""
        return (
            self.key == key
            and not self.reads.is_gone
            and all(place.key() == found for place, found in self.reads.places.items())
        )

    def prepare(self) -> bool:
        """Makes ready for a replay; returns False if there must be none."""
        return all(prepare() for prepare in self._before_replays)

    def replay(self) -> Any:
        """Takes a step on the current stream; returns the outputs, the same tensors each time."""
        self.redraws.begin_replay()
        for part in self._parts:
            part()
        self.redraws.end_replay()
        for restore in self._snapshots:
            restore()
        for each in self._capturables:
            each.replayed()
        return self.outputs

    # -- the end

    def reset(self) -> None:
        """Destroys the graphs, once the host has waited for the device: they may be running."""
        wait_for_device(self._pool.device)
        self._destroy()
        self._kept.clear()

    def _destroy(self) -> None:
        self._parts.clear()
        while self._graphs:
            self._pool.destroy(self._graphs.pop())
