"""A captured step: one graph, or several with eager regions between them, and the host state after
a replay.

The device executes nothing during a capture. At an eager region, the current graph ends and the
next one begins; the region's call is stored with a snapshot of the host state at this point. A
replay launches the graphs in order, makes the calls between them, and restores the host state that
the capture ended with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import call
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from shardgrad.engine.streams import wait_for_device
from shardgrad.graphs.capturable import KEPT, Capturable
from shardgrad.graphs.eager_regions import handle_eager_calls
from shardgrad.graphs.inputs import InputBuffers
from shardgrad.graphs.pool import DeviceGraph, GraphPool
from shardgrad.graphs.reads import Reads
from shardgrad.graphs.recomputation import Redraws

Key = tuple[tuple[Any, ...], tuple[Hashable, ...]]  # the input key, and the guards


class CapturedStep:
    """The graphs of one step and the eager regions between them, in order.

    Args:
        key: the input key and the guards at the beginning of the captured call. The guard of
            torch's modes comes first, followed by one for each capturable.
        pool: the pool that the graphs are captured in.
        capturables: those of the step. They are quiesced wherever a graph begins or ends.
        generators: random generators to register with the graphs, besides the device's default one.
        redraws: the random numbers of recomputed regions, from an eager call of the step.
        buffers: the inputs.

    Attributes:
        key, redraws, buffers: as given.
        parts: called in order by a replay. The capture adds to them.
        is_compared: True once a second capture has been compared with this one.
        reads: the memory that the captured call reads by closure. Set by the capture.
        outputs: the outputs of the captured call, flattened, which every replay overwrites. Set by
            the capture.
    """

    reads: Reads
    outputs: tuple[list[torch.Tensor | None], Any]

    def __init__(
        self,
        key: Key,
        pool: GraphPool,
        capturables: Sequence[Capturable],
        generators: Sequence[torch.Generator],
        redraws: Redraws,
        buffers: InputBuffers,
    ) -> None:
        self.key, self.redraws, self.is_compared = key, redraws, False
        self.buffers = buffers
        self._pool, self._capturables = pool, capturables
        self._generators = [*generators, *redraws.generators]
        self._graphs: list[DeviceGraph] = []
        self.parts: list[Callable[[], object]] = []
        self._capture = ExitStack()
        for each in capturables:
            each.quiesce()
        self._before_replays = list(filter(None, [each.before_replays() for each in capturables]))

    # -- a capture

    @contextmanager
    def captured(self, restore: Callable[[], None]) -> Iterator[None]:
        """Captures what the block launches. If the block raises, all graphs are destroyed. Calls
        `restore`, which restores the host state, if it does, or if the graph must not be replayed
        now, for an eager call.
        """
        try:
            with handle_eager_calls(self._split), self.redraws.active(), self._capture:
                self._begin()
                yield
                self._end()
        except BaseException:
            self._destroy()
            for each in self._capturables:
                each.abort_capture()
            restore()
            raise
        # Without recomputed regions, eager regions may draw as many random numbers as they like.
        if self.redraws.generators or (
            self._pool.device.type == "cuda" and not self.has_eager_regions
        ):
            self.parts = [self.redraws.begin_replay, *self.parts, self.redraws.end_replay]
        # Between eager regions, any state may have changed. Otherwise the guards tell what has.
        _, *before = self.key[1]
        self.parts += [
            each.snapshot()
            for each, guards in zip(self._capturables, before, strict=True)
            if self.has_eager_regions or not each.is_guarded or each.guards() != guards
        ]
        self.parts += [each.replayed for each in self._capturables]
        self._kept = [each.known_to_graph() for each in self._capturables]  # only held
        if self.why_not():
            restore()

    def _begin(self) -> None:
        self._graphs.append(self._capture.enter_context(self._pool.capture(self._generators)))

    def _end(self) -> None:
        for each in self._capturables:
            each.quiesce()
        self._capture.close()
        self.parts.append(self._graphs[-1].replay)
        for each in self._capturables:
            each.quiesce()

    def _split(self, region: Callable[[], Any]) -> None:
        self._end()
        # Also for the first replay: it follows the capture, which has changed host state.
        self.parts += [each.snapshot() for each in self._capturables]
        self.parts += region, self.reads.next_graph()
        # Copies gradients that the region assigns to where the graph reads them.
        self.parts += [each.guards for each in self._capturables]
        self._begin()
        for each in self._capturables:
            each.after_eager_region()

    # -- replays

    @property
    def has_eager_regions(self) -> bool:
        """True if calls are made between graphs."""
        return len(self._graphs) > 1

    def why_not(self) -> str:
        """Returns why the graph must not be replayed now; "" if it may."""
        return "" if all(map(call, self._before_replays)) else KEPT

    def replay(self) -> Any:
        """Replays the step on the current stream and returns its outputs: always the same memory,
        in new objects, since the program may change those that it got.
        """
        for part in self.parts:
            part()
        leaves, spec = self.outputs
        return tree_unflatten([None if x is None else x.detach() for x in leaves], spec)

    # -- the end

    def reset(self) -> None:
        """Destroys the graphs. The host waits for the device first, since they may be running."""
        with self._pool.lock:
            wait_for_device(self._pool.device)
        self._destroy()

    def _destroy(self) -> None:
        self.parts.clear()
        while self._graphs:
            self._pool.destroy(self._graphs.pop())
