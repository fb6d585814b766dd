"""An all-gather under way: from a rank's chunk to everybody's, to be copied out, or in place already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardgrad.engine.buffers import Slot
from shardgrad.engine.comm_context import Runtime
from shardgrad.engine.message_tag import LABEL_NUMEL, Label
from shardgrad.engine.streams import Mark, Stream
from shardgrad.engine.trace import span
from shardgrad.engine.transports import Flight, Transport
from shardgrad.features.custom_comms import Comms
from shardgrad.sharding.zero_copy import DirectGather

__all__ = ["Gathering", "Source"]


@dataclass(frozen=True)
class Source:
    """Where an all-gather starts from.

    Attributes:
        chunk: this rank's, 1-D, ending in the label.
        group: the ranks that gather.
        label: of the message.
        ready: where the chunk was last filled; None if the program or an optimizer does that.
        departed: recorded once the chunk has been read, if it lives on the host; else None.
        direct: gathers of their own that follow, into memory that the gather stream may write.
    """

    chunk: torch.Tensor
    group: dist.ProcessGroup
    label: Label
    ready: Mark | None = None
    departed: Mark | None = None
    direct: tuple[DirectGather, ...] = ()

    def write_label(self) -> None:
        """Puts the label at the end of the chunk, if it is not there yet."""
        end = self.chunk.narrow(0, self.chunk.numel() - LABEL_NUMEL, LABEL_NUMEL)
        end.copy_(torch.tensor(self.label.digits, dtype=end.dtype))


class Gathering:
    """An all-gather under way; holds its slot until the chunks have been read.

    Args:
        source: what this rank sends.
        finish: reads the chunks; called when somebody else needs the slot.
    """

    def __init__(self, source: Source, finish: Callable[[], None]) -> None:
        self._source = source
        self._finish = finish
        self._slot: Slot
        self._flights: list[Flight]

    @property
    def is_direct(self) -> bool:
        """True if there are direct parameters, which are not among the chunks."""
        return bool(self._source.direct)

    def complete(self) -> None:
        """See `Holder`."""
        self._finish()

    def launch(self, runtime: Runtime, comms: Comms, dtype: torch.dtype, name: str) -> None:
        """Starts the collective.

        Args:
            runtime: of the root.
            comms: what carries the messages.
            dtype: in which chunks travel.
            name: of the unit, for traces.

        Streams: copy to the device, cast and collective go to the gather stream, after the parameters were
            last written.
        Capture: safe once slots have grown.
        """
        source, stream = self._source, runtime.streams.gather
        transport, ring = comms.for_gather(runtime, source.group)
        n, count = source.chunk.numel(), transport.gather_chunks
        cast, comes = source.chunk.dtype != dtype, source.departed is not None
        apart = (cast or comes) and not transport.gathers_in_place  # what is sent needs room of its own
        staging_nbytes = (count + apart) * n * dtype.itemsize
        landing_nbytes = n * source.chunk.itemsize if comes and cast else 0  # cast on the device
        with span("all_gather", name), runtime.streams.on(stream):
            runtime.parameters_ready.wait(stream)
            if source.ready is not None:
                source.ready.wait(stream)
            slot = self._slot = ring.acquire(staging_nbytes + landing_nbytes, self)
            slot.start_writing(stream)
            staging = slot.chunks(dtype, count, n)
            chunk = source.chunk
            if landing_nbytes:
                chunk = slot.chunks(chunk.dtype, 1, n, behind=staging_nbytes).whole
                chunk.copy_(source.chunk, non_blocking=True)
            if cast or comes:
                room = slot.chunks(dtype, 1, n, skip=count * n) if apart else staging
                sent = room.parts[0 if apart else transport.rank]
                chunk = sent.copy_(chunk, non_blocking=True)
            if source.departed is not None:
                source.departed.record(stream)
            self._flights = [transport.all_gather(chunk, staging, source.label)]
            self._flights += [_gather_directly(each, transport) for each in source.direct]
            slot.finish_writing(stream)

    def chunks(self, stream: Stream) -> list[torch.Tensor]:
        """Ends the collective; returns everybody's chunk, for `stream` to read until `release`.

        Raises:
            CollectiveError: it failed.
        """
        chunks, *_ = [flight.wait() for flight in self._flights]
        self._slot.start_reading(stream)
        return chunks

    def release(self, stream: Stream) -> None:
        """Says that what `stream` has been given so far is the last to read the chunks."""
        self._slot.release(stream)


def _gather_directly(each: DirectGather, transport: Transport) -> Flight:
    """Starts the all-gather of a direct parameter, on the current stream."""
    piece, places = each.piece, each.places
    own = places.parts[transport.rank]
    if piece.dtype != own.dtype or transport.gather_chunks < transport.size:
        piece = own.copy_(piece)
    return transport.all_gather(piece, transport.missing(places), each.label)
