"""State shared by the units under one root, as FSDP2's `FSDPCommContext`: streams, slots,
transports.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Allocate, Chunks, SlotRing
from shardgrad.engine.streams import AcceleratorStreams, Stream, Streams, streams_for
from shardgrad.engine.transports import MessageTag, Transport, Work, transport_for


class CommContext:
    """Streams, staging and transports of a root and its units.

    `streams` replaces the device's streams when planning.

    Attributes:
        parameters_ready: recorded where the parameters were last written; all-gathers wait for it.
        shards_read: recorded where shards in host memory were last read; the host waits for it
            before the program may write them. See [Note: Shards on the host] in
            `sharding/offload.py`.
        tails: of the chunks of gradients, which similar groups share; see `GradGroup._tail`.
        gather_ring: staging for all-gathers; grows to the prefetch depth in use. Only
            all-gathers of this ring and reductions of `reduce_ring` share memory with others.
        reduce_ring: staging for reductions; two may be in flight, and a third completes the first.
        is_captured: a graph is being captured; see `RootContext.crosses_border`.
        rings: the above and those whose memory a program provides.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams | None = None,
    ) -> None:
        self.device = device
        self.is_captured = False
        self.streams = streams_for(device) if streams is None else streams
        # An all-gather must be launched when its unit runs, so its ring grows with the prefetch
        # depth. A reduction can wait for one of two slots: one is sent while the next is packed.
        self.gather_ring = SlotRing(self.streams, device, depth=2, elastic=True)
        self.reduce_ring = SlotRing(self.streams, device, depth=2, elastic=False)
        self.rings = [self.reduce_ring, self.gather_ring]
        self.shards_read = self.streams.event()
        self.tails: dict[Hashable, torch.Tensor] = {}
        # By process group, or by key for a program's own transports.
        self._transports: dict[Hashable, Transport] = {}
        self._special_rings: dict[Hashable, SlotRing] = {}
        self._begin()

    def _begin(self) -> None:
        self.parameters_ready = self.streams.event()
        if isinstance(self.streams, AcceleratorStreams):
            # A model may be deleted while collectives are in flight.
            weakref.finalize(self, self.streams.join).atexit = False

    def for_another_root(self) -> CommContext:
        """Returns a context that shares everything except `parameters_ready`."""
        # Each root has its own `parameters_ready`, since their optimizers step at different times.
        other = copy.copy(self)
        other._begin()
        return other

    def transport(self, group: dist.ProcessGroup) -> Transport:
        """Returns the transport of `group`, the same object each time."""
        return self.own_transport(group, partial(transport_for, group, self.device))

    def own_transport(self, key: Hashable, make: Callable[[], Transport]) -> Transport:
        """Returns a program's own transport, made at the first call for `key`."""
        # One per group, since it has the group's log of messages and, on gloo, its tags.
        if key not in self._transports:
            self._transports[key] = make()
        return self._transports[key]

    def special_ring(
        self, key: Hashable, allocate: Allocate, *, depth: int, elastic: bool = False
    ) -> SlotRing:
        """Returns a ring whose memory `allocate` provides, made at the first call for `key`."""
        if (ring := self._special_rings.get(key)) is None:
            ring = SlotRing(
                self.streams, self.device, depth=depth, elastic=elastic, allocate=allocate
            )
            self._special_rings[key] = ring
            self.rings.append(ring)
        return ring


# The transport and staging of all-gathers, or of reductions.
Route = tuple[Transport, SlotRing]


@dataclass(frozen=True, eq=False)
class CollectiveConfig:
    """The transports, staging and hook of a group's collectives; by default the backend's.

    `ParamGroup.set_collectives` replaces it while nothing is in flight. `hook` is called on
    `hook_stream` (None: the stream of reductions) with each reduced chunk before gradients are
    written. With `only_sums` the division follows the hook, whatever the dtype.
    """

    hook: Any = None
    hook_stream: Stream = None
    only_sums: bool = False

    def for_gather(self, comm_ctx: CommContext, group: dist.ProcessGroup) -> Route:
        """Returns the transport and staging of all-gathers over `group`."""
        return comm_ctx.transport(group), comm_ctx.gather_ring

    def for_reduce(self, comm_ctx: CommContext, group: dist.ProcessGroup) -> Route:
        """Returns the transport and staging of reduce-scatters over `group`."""
        return comm_ctx.transport(group), comm_ctx.reduce_ring


class SecondStep(Protocol):
    """The step after the reduce-scatter on a mesh with another axis to reduce over."""

    def room(self, comm_ctx: CommContext, chunk_numel: int) -> tuple[int, int]:
        """Returns the pieces that `launch` needs: their number, and elements in the
        reduce dtype.
        """
        return 0, 0

    def arrange(
        self, rows: list[torch.Tensor], table: torch.Tensor, chunk_numel: int
    ) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Returns the arguments of `ops.pack` that give the first step's sum the order of the
        second.
        """
        return rows, table, chunk_numel

    def launch(
        self, summed: torch.Tensor, room: Chunks, tag: MessageTag, comm_ctx: CommContext
    ) -> Work:
        """Starts the step on the current stream, from the first step's sum, which it may
        write to.
        """

    def result(self, summed: torch.Tensor) -> torch.Tensor:
        """Returns the part of the first step's sum that has this rank's chunk after the second
        step.
        """
        return summed
