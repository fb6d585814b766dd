"""What every unit under one root shares: streams, staging rings and transports. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Allocate, SlotRing
from shardgrad.engine.streams import Streams, streams_for
from shardgrad.engine.transports import Transport, transport_for

__all__ = ["Runtime"]


class Runtime:
    """Shared machinery of a root and its units.

    Args:
        device: of all parameters.
        streams: a replacement for the device's streams, for plans and tests.
        transports: chooses a group's transport; None for `transport_for`.
        like: another root's runtime, whose streams, staging and transports are to be used here too.

    Attributes:
        parameters_ready: where the parameters were last written; gathers start after it.
        gather_ring: staging for all-gathers; grows to the prefetch depth in use.
        reduce_ring: staging for reductions; two in flight, the third completes the first.
    """

    def __init__(
        self,
        device: torch.device,
        streams: Streams | None = None,
        transports: Callable[[dist.ProcessGroup], Transport] | None = None,
        like: Runtime | None = None,
    ) -> None:
        self.device = device
        if like is None:
            self.streams = streams_for(device) if streams is None else streams
            self.gather_ring = SlotRing(self.streams, device, depth=2, elastic=True)
            self.reduce_ring = SlotRing(self.streams, device, depth=2, elastic=False)
            self._transports: dict[dist.ProcessGroup, Transport] = {}
            self._own_transports: dict[Hashable, Transport] = {}
            self._special_rings: dict[Hashable, SlotRing] = {}
        else:
            self.streams = like.streams
            self.gather_ring, self.reduce_ring = like.gather_ring, like.reduce_ring
            self._transports, self._own_transports = like._transports, like._own_transports
            self._special_rings = like._special_rings
        self.parameters_ready = self.streams.mark()
        self._choose_transport = transports or partial(transport_for, device=device)

    def transport(self, group: dist.ProcessGroup) -> Transport:
        """Returns the transport of `group`, the same object each time."""
        transport = self._transports.get(group)
        if transport is None:
            transport = self._transports[group] = self._choose_transport(group)
        return transport

    def memory(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yields what the rings keep from step to step, with its owner."""
        for slot in self.gather_ring.slots:
            yield "all-gather staging", slot.storage
        for ring in (self.reduce_ring, *self._special_rings.values()):
            for slot in ring.slots:
                yield "reduction staging", slot.storage

    def own_transport(self, key: Hashable, make: Callable[[], Transport]) -> Transport:
        """Returns a program's own transport, made at the first call for `key`."""
        if key not in self._own_transports:
            self._own_transports[key] = make()
        return self._own_transports[key]

    def special_ring(
        self, key: Hashable, allocate: Allocate, *, depth: int, elastic: bool = False
    ) -> SlotRing:
        """Returns a ring whose memory `allocate` provides, made at the first call for `key`."""
        if key not in self._special_rings:
            self._special_rings[key] = SlotRing(
                self.streams, self.device, depth=depth, elastic=elastic, allocate=allocate
            )
        return self._special_rings[key]

    def rewind(self) -> None:
        """Starts the turns of all rings over; see `SlotRing.rewind`."""
        for ring in (self.reduce_ring, self.gather_ring, *self._special_rings.values()):
            ring.rewind()
