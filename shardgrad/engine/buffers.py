"""Memory with an owner: slots, the ring that lends them, and flat buffers whose storage comes and
goes.

[Note: Slots]
Staging memory is reused from group to group, and one stream fills it while another moves it. The
slot itself carries the order, so that a stream never waits for all of another's work:

* the stream that it is taken for waits for *that slot's* `free` event before its first write, and
  `ready` is recorded after its last. It is the only one that writes (what other streams have made
  is waited for before): where several fill a buffer, a reader may miss one (DeepSpeed#8061);
* the reader waits for `ready`, whichever stream that is on, and records `free`.

Tensors read along with a slot, such as a gradient that is sent from where it is, are lent to the
slot: they are kept alive until it is free, and their streams wait for that before they use the
memory again.

[Note: Staging comes and goes]
On a device, an all-gather gives its bytes back when they are read, and a reduction when another
size is needed or backward ends, so that a large group, often embeddings, raises the peak only while
it travels. One that is larger than all before it in a backward waits for these, so that not both
are there at once. On the CPU bytes stay, since the system fills new pages with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from shardgrad.engine.streams import NoStreams, Stream, Streams
from shardgrad.sharding.layout import TAG_NUMEL

__all__ = ["Allocate", "Chunks", "Holder", "PieceSize", "RecurringMemory", "Slot", "SlotRing"]

# Gives a number of bytes on a device, as a 1-D tensor of uint8.
Allocate = Callable[[int, torch.device], torch.Tensor]

# Of equal pieces: their dtype, how many, and the elements of each; multiples of 128 bytes, so that
# all are aligned.
PieceSize = tuple[torch.dtype, int, int]


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class Holder(Protocol):
    """What has a slot's content in flight."""

    def complete(self) -> None:
        """Ends the use of the slot, waiting on the host if the transport needs it."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """`count` equal 1-D pieces of one contiguous tensor, `whole`, 1-D.

    A message of 16,384 ranks has as many pieces, and nearly all who handle it ask for one of them:
    a view is made when it is asked for, and kept.
    """

    whole: torch.Tensor
    count: int
    _parts: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    @property
    def numel(self) -> int:
        """Elements of a piece."""
        return self.whole.numel() // max(self.count, 1)

    def part(self, place: int) -> torch.Tensor:
        """Returns a piece."""
        part = self._parts.get(place)
        if part is None:
            with torch.inference_mode(mode=False):
                part = self.whole.narrow(0, place * self.numel, self.numel)
            self._parts[place] = part
        return part

    @cached_property
    def parts(self) -> list[torch.Tensor]:
        """All pieces, for who reads each by itself."""
        return [self.part(place) for place in range(self.count)]

    @cached_property
    def ends(self) -> torch.Tensor:
        """The last elements of each, `[count, TAG_NUMEL]`, where messages have their tags."""
        with torch.inference_mode(mode=False):
            return self.whole.view(self.count, -1)[:, -TAG_NUMEL:]


class Slot:
    """Reusable bytes with their own order. See [Note: Slots].

    Attributes:
        ready: recorded by the stream that has written for the last time; its reader waits for it.
        free: recorded by the last user of the content; the next writer waits for it.
    """

    def __init__(
        self, streams: Streams, device: torch.device, allocate: Allocate = _allocate
    ) -> None:
        self._streams = streams
        self._allocate = allocate
        self.nbytes = 0  # this slot owns
        self._bytes = self._nothing = torch.empty(0, dtype=torch.uint8, device=device)
        # What was reserved, without its storage if it is gone.
        self._sizes: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[object, ...], list[Chunks]] = {}
        self._allocated_on = streams.current()
        self.ready = streams.event()
        self.free = streams.event()
        self.lent: list[torch.Tensor] = []
        self._lenders: tuple[Stream, ...] = ()
        self.holder: Holder | None = None

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """What its bytes are in, one for each size; all but one are empty."""
        return [each.untyped_storage() for each in self._sizes.values()]

    def take(self, nbytes: int, sizes: Sequence[PieceSize]) -> list[Chunks]:
        """Returns pieces of these sizes, `nbytes` in all, one behind the other; only without a
        holder. Growing loses the content.
        """
        if nbytes > self.nbytes:
            self.give_back()  # first, so that growing never holds both
            self._allocated_on = self._streams.current()
            # For training, even if an evaluation in inference mode comes first; the same for views
            # below.
            with torch.inference_mode(mode=False):
                if nbytes in self._sizes:
                    self._bytes = self._sizes[nbytes]
                    self._bytes.untyped_storage().resize_(nbytes)
                else:
                    self._bytes = self._sizes[nbytes] = self._allocate(nbytes, self._nothing.device)
            self.nbytes = nbytes
            # Their last user may still be at work on this stream, and the first writer on another.
            self.free.record(self._allocated_on)
        # Views are made once for each size: a steady step makes none.
        key = self.nbytes, *sizes
        chunks = self._views.get(key)
        if chunks is None:
            chunks, end = [], 0
            for dtype, count, numel in sizes:
                begin, end = end, end + count * numel * dtype.itemsize
                with torch.inference_mode(mode=False):
                    chunks.append(Chunks(self._bytes[begin:end].view(dtype), count))
            self._views[key] = chunks
        return chunks

    def give_back(self, joined: Stream = None, *, is_written: bool = False) -> None:
        """Returns what was lent, and gives the bytes back; the slot has none until `take`."""
        self.return_lent()
        # Their next user, on the stream they were allocated on, must come after our last one.
        if self.nbytes and (joined is None or joined != self._allocated_on):
            self.free.wait(self._allocated_on)
        self.nbytes = 0
        if self._allocate is _allocate and not is_written:
            self._bytes.untyped_storage().resize_(0)  # views of it stay, for the next time
            return
        # a collective that failed, and may still end and write to them, holds them
        self._views.clear()
        self._sizes.clear()
        self._bytes = self._nothing

    def start_writing(self, stream: Stream) -> None:
        """Makes `stream` wait until the slot is free, before its first write."""
        if self._lenders:
            self.return_lent()
        if self.nbytes:
            self.free.wait(stream)

    def lend(self, tensors: Sequence[torch.Tensor], streams: Sequence[Stream]) -> None:
        """Keeps `tensors` alive until the release, which `streams` wait for to use their memory
        again.
        """
        self.lent, self._lenders = list(tensors), tuple(streams)

    def return_lent(self) -> None:
        """Lets go of what was lent, if anything, once its streams wait for the release; only after
        it.
        """
        for stream in self._lenders:
            self.free.wait(stream)
        self.lent.clear()
        self._lenders = ()

    def release(self, stream: Stream) -> None:
        """Says that what `stream` has been given so far is the last use of the content."""
        self.free.record(stream)
        self.holder = None
        if stream is None and self._lenders:  # the CPU has done it
            self.return_lent()


class SlotRing:
    """Lends `depth` slots in turn, so that two neighbours in time never wait for each other.

    If all are in flight, an elastic ring adds a slot; any other completes the oldest holder first.
    `allocate` gives the slots' bytes, which the ring `keeps`; None for torch's: [Note: Staging
    comes and goes].
    """

    def __init__(
        self,
        streams: Streams,
        device: torch.device,
        *,
        depth: int,
        elastic: bool,
        allocate: Allocate | None = None,
    ) -> None:
        self._streams = streams
        self._device = device
        self.depth = depth
        self._elastic = elastic
        self._allocate = allocate or _allocate
        self.keeps = allocate is not None or isinstance(streams, NoStreams)
        self.slots: list[Slot] = []  # in the order in which they were made
        self._turns: list[Slot] = []
        self._largest = 0  # number of bytes since the turns began

    def take(self, sizes: Sequence[PieceSize], writer: Stream) -> tuple[Slot, list[Chunks]]:
        """Returns the next slot, and its pieces of these sizes, for a stream to write once the slot
        is free; the caller sets its `holder`, which releases it.
        """
        nbytes = 0
        for dtype, count, numel in sizes:
            nbytes += dtype.itemsize * count * numel
        slot = self._next()
        self._turns.append(slot)
        if not self.keeps and slot.nbytes != nbytes:
            # Idle slots of other sizes would raise the peak by what they hold. Giving back waits
            # for nothing on the host: their streams are ordered by `free`.
            idle = [each for each in self.slots if each.holder is None]
            for each in idle if nbytes > self._largest else [slot]:
                each.give_back()
            self._largest = max(nbytes, self._largest)
        pieces = slot.take(nbytes, sizes)
        slot.start_writing(writer)
        return slot, pieces

    def _next(self) -> Slot:
        # In turn, and not whichever is free: a step lends the same slots to the same groups again,
        # so that captured graphs find the addresses that they know.
        if len(self.slots) >= self.depth:
            for slot in self._turns:
                if slot.holder is None:
                    self._turns.remove(slot)
                    return slot
            if not self._elastic:
                oldest = self._turns.pop(0)
                # The host may block here: this is what bounds the reductions in flight.
                if oldest.holder is not None:
                    oldest.holder.complete()
                return oldest
        # All are in flight, and what is prefetched may not wait for them.
        slot = Slot(self._streams, self._device, self._allocate)
        self.slots.append(slot)
        return slot

    def resize(self, depth: int) -> None:
        """Changes how many slots take turns; what is in flight in a slot too many is completed
        first.
        """
        self.depth = depth
        for slot in self.slots[depth:]:
            if slot.holder is not None:
                slot.holder.complete()
            slot.give_back()
            self._turns.remove(slot)
        del self.slots[depth:]

    def rewind(self, joined: Stream = None) -> None:
        """Starts the turns over, so that every step lends the same slot to the same group.

        Bytes that are not kept are given back; the stream `joined` comes after their last use
        already.
        """
        for slot in self.slots:
            # In flight, of a backward that another follows: the turns go on.
            if slot.holder is not None:
                return
        self._turns, self._largest = list(self.slots), 0
        for slot in self._turns:
            if self.keeps:
                slot.return_lent()
            else:
                slot.give_back(joined)


class RecurringMemory:
    """Tensors whose storage comes and goes, all at once, while they and their views stay the same
    objects. It is there when this is made.

    Attributes:
        storages: of the tensors, which are allocated for the current stream.
        filled: where they were last written, for who reads them on another stream.

    Streams: freed storage may at once be used again on the stream that was current when it was
    allocated.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._nbytes: list[int] = []
        self.add(tensors)
        self._streams = streams
        self._allocation_stream = streams.current()
        self._allocated = streams.event()
        self.filled = streams.event()

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Has the storage of further tensors, which is there, come and go as well."""
        for tensor in tensors:
            self.storages.append(tensor.untyped_storage())
            self._nbytes.append(self.storages[-1].nbytes())

    def allocate(self) -> None:
        """Brings the storage back, for the current stream, unless it is there; the content is
        undefined.
        """
        for storage, nbytes in zip(self.storages, self._nbytes, strict=True):
            if storage.nbytes() < nbytes:
                storage.resize_(nbytes)
                self._allocation_stream = self._streams.current()

    def allocate_for(self, stream: Stream) -> None:
        """Brings the storage back on the current stream, for `stream`, which waits for that, to
        write into.
        """
        self.allocate()
        self._allocated.record(self._streams.current())
        self._allocated.wait(stream)

    def wait(self) -> None:
        """Makes the current stream wait for what was written last."""
        self.filled.wait(self._streams.current())

    def free(self) -> None:
        """Frees the storage. Streams: the one it was allocated for waits for the current one."""
        # The allocator lends storage again on the stream that it was allocated for, without a wait,
        # so that stream has to come after the last use, wherever that was.
        current = self._streams.current()
        if current != self._allocation_stream:
            used = self._streams.event()
            used.record(current)
            used.wait(self._allocation_stream)
        for storage in self.storages:
            storage.resize_(0)
