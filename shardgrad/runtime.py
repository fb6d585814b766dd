"""What every unit under one root shares: streams, staging rings and transports. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from .buffers import SlotRing
from .collectives import Transport, transport_for
from .streams import Streams, streams_for

__all__ = ["Runtime"]


class Runtime:
    """Shared machinery of a root and its units.

    Args:
        device: of all parameters.
        streams: a replacement for the device's streams, for plans and tests.
        transports: chooses a group's transport; None for `transport_for`.

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
    ) -> None:
        self.device = device
        self.streams = streams_for(device) if streams is None else streams
        self.gather_ring = SlotRing(self.streams, device, depth=2, elastic=True)
        self.reduce_ring = SlotRing(self.streams, device, depth=2, elastic=False)
        self.parameters_ready = self.streams.mark()
        self._choose_transport = transports or partial(transport_for, device=device)
        self._transports: dict[dist.ProcessGroup, Transport] = {}

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
        for slot in self.reduce_ring.slots:
            yield "reduction staging", slot.storage
