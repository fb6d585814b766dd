"""Memory with an owner: slots, the ring that lends them, and buffers whose storage is freed.

[Note: Slots]
Staging memory is reused from group to group, while one stream fills it and another sends it. Each
slot has its own events, so that a stream never waits for all of another stream's work:

* The stream that takes a slot waits for *that slot's* `free` event before its first write, and
records `ready` after its last. It is the only stream that writes; it first waits for data from
other streams. If several streams wrote, a reader could miss one (DeepSpeed#8061).
* The reader waits for `ready`, on whichever stream it runs, and records `free`.

Tensors that are read together with a slot, such as a gradient that is sent without a copy, are lent
to the slot. It keeps them alive until it is free, and their streams wait for that before they reuse
the memory.

[Note: Staging comes and goes]
On a device, an all-gather frees its staging memory once it has been read. A reduction frees it when
another size is needed or when backward ends. A large group, often the embeddings, therefore raises
the peak only while its messages are in flight. A message that is larger than all before it in a
backward waits for their memory, so that both are never allocated at once. On the CPU the memory is
kept, since the system fills new pages with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from shardgrad.engine.streams import Stream, Streams
from shardgrad.sharding.layout import TAG_NUMEL

# Allocates a number of bytes on a device, as a 1-D tensor of uint8.
Allocate = Callable[[int, torch.device], torch.Tensor]

# Equal pieces: their dtype, their number, and the elements of each. Pieces are multiples of 128
# bytes, so that all are aligned.
PieceSize = tuple[torch.dtype, int, int]


@dataclass(frozen=True, eq=False)
class Chunks:
    """`count` equal 1-D pieces of one contiguous 1-D tensor, `whole`.

    A message of 16,384 ranks has as many pieces, but nearly every user needs only one, so views are
    created on first use and kept.
    """

    whole: torch.Tensor
    count: int
    _parts: dict[int, torch.Tensor] = field(default_factory=dict, init=False)

    def part(self, place: int) -> torch.Tensor:
        """Returns a piece."""
        part = self._parts.get(place)
        if part is None:
            numel = self.whole.numel() // self.count
            part = self._parts[place] = self.whole.narrow(0, place * numel, numel)
        return part

    @cached_property
    def parts(self) -> list[torch.Tensor]:
        """All pieces, for users that read each one."""
        return [self.part(place) for place in range(self.count)]

    @cached_property
    def ends(self) -> torch.Tensor:
        """The last elements of each piece, `[count, TAG_NUMEL]`, where messages have their tags."""
        return self.whole.view(self.count, -1)[:, -TAG_NUMEL:]


class Slot:
    """Reusable bytes with their own events. See [Note: Slots].

    Attributes:
        ready: recorded after the last write; the reader waits for it.
        free: recorded after the last use of the content; the next writer waits for it.
        finish: ends the operation that uses the slot, and releases it; blocks the host if the
            transport needs it. None if the slot is free.
    """

    def __init__(
        self, streams: Streams, device: torch.device, allocate: Allocate | None = None
    ) -> None:
        self._streams = streams
        self._device = device
        self._allocate = allocate
        self._start_over()
        self._allocated_on = streams.current()
        self.ready = streams.event()
        self.free = streams.event()
        self.lent: list[torch.Tensor] = []
        self._lenders: tuple[Stream, ...] = ()
        self.finish: Callable[[], object] | None = None

    def _start_over(self) -> None:
        """Leaves the bytes to whoever holds them."""
        self.nbytes = 0  # bytes currently allocated
        # For training, even if an evaluation in inference mode comes first.
        with torch.inference_mode(mode=False):
            self.bytes = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._views: dict[tuple[PieceSize, ...], list[Chunks]] = {}

    def take(self, nbytes: int, sizes: Sequence[PieceSize]) -> list[Chunks]:
        """Returns pieces of these sizes, side by side, `nbytes` in all; only if it is free.

        Growing the slot loses its content.
        """
        if nbytes > self.nbytes:
            self.give_back()  # free first, so that both never exist at once
            self._allocated_on = self._streams.current()
            with torch.inference_mode(mode=False):
                if self._allocate is not None:
                    self.bytes = self._allocate(nbytes, self._device)
                else:
                    storage = self.bytes.untyped_storage()
                    storage.resize_(nbytes)
                    self.bytes.set_(storage, 0, (nbytes,), (1,))
            self.nbytes = nbytes
            # The previous owner of the memory may still use it on this stream, and the first writer
            # may run on another.
            self.free.record(self._allocated_on)
        # Views are created once per size; a steady step creates none.
        key = tuple(sizes)
        chunks = self._views.get(key)
        if chunks is None:
            chunks, end = [], 0
            for dtype, count, numel in sizes:
                begin, end = end, end + count * numel * dtype.itemsize
                with torch.inference_mode(mode=False):
                    chunks.append(Chunks(self.bytes[begin:end].view(dtype), count))
            self._views[key] = chunks
        return chunks

    def give_back(self, *, is_written: bool = False) -> None:
        """Drops lent tensors and frees the bytes; the slot has none until `take`.

        Args:
            is_written: a failed collective may still write to the bytes.
        """
        self.return_lent()
        # The next owner, on the stream they were allocated on, must come after the last use.
        if self.nbytes:
            self.free.wait(self._allocated_on)
        if self._allocate is not None or is_written:
            self._start_over()  # a failed collective may still write to them, and holds them
        else:
            self.nbytes = 0
            self.bytes.untyped_storage().resize_(0)  # views stay, for the next time

    def lend(self, tensors: Sequence[torch.Tensor], streams: Sequence[Stream]) -> None:
        """Keeps `tensors` alive until `release`; `streams` wait for it before reusing
        their memory.
        """
        self.lent, self._lenders = list(tensors), tuple(streams)

    def return_lent(self) -> None:
        """Drops lent tensors after making their streams wait for the release.

        Call it only after `release`.
        """
        for stream in self._lenders:
            self.free.wait(stream)
        self.lent.clear()
        self._lenders = ()

    def release(self, stream: Stream) -> None:
        """Marks the work queued on `stream` so far as the last use of the content."""
        self.free.record(stream)
        self.finish = None
        if stream is None and self._lenders:  # on the CPU the work is done
            self.return_lent()


class SlotRing:
    """Lends `depth` slots in turn, so that consecutive messages do not wait for each other.

    If all slots are in flight, an elastic ring adds one; any other ring finishes the oldest use
    first. `allocate` provides memory that the ring `keeps`. If it is None, the ring uses torch's
    allocator and [Note: Staging comes and goes] applies.
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
        self._allocate = allocate
        self.keeps = allocate is not None or streams.current() is None
        self.slots: list[Slot] = []  # in creation order
        self._turns: list[Slot] = []
        self._largest = 0  # bytes, since `rewind`

    def take(self, sizes: Sequence[PieceSize], writer: Stream) -> tuple[Slot, list[Chunks]]:
        """Returns the next slot and its pieces of these sizes.

        `writer` waits until the slot is free. The caller sets the slot's `finish`.
        """
        nbytes = 0
        for dtype, count, numel in sizes:
            nbytes += dtype.itemsize * count * numel
        # In turn, rather than the first free slot: each step lends the same slots to the same
        # groups, so that captured graphs find the addresses they know.
        slot = None
        if len(self.slots) >= self.depth:
            for each in self._turns:
                if each.finish is None:
                    slot = each
                    break
            if slot is None and not self._elastic:
                slot = self._turns[0]
                # The host may block here, which bounds the number of reductions in flight.
                if slot.finish is not None:
                    slot.finish()
        if slot is None:
            # All are in flight, and a prefetch must not wait for them.
            slot = Slot(self._streams, self._device, self._allocate)
            self.slots.append(slot)
        else:
            self._turns.remove(slot)
        self._turns.append(slot)
        if not self.keeps and slot.nbytes != nbytes:
            # Idle slots of other sizes would add to the peak. Freeing them does not block the host:
            # their `free` events order the streams.
            idle = [each for each in self.slots if each.finish is None]
            for each in idle if nbytes > self._largest else [slot]:
                each.give_back()
            self._largest = max(nbytes, self._largest)
        pieces = slot.take(nbytes, sizes)
        if slot.lent:
            slot.return_lent()
        if slot.nbytes:
            slot.free.wait(writer)
        return slot, pieces

    def free_others(self, slot: Slot | None) -> None:
        """Frees the idle slots but `slot`. The streams that allocated them wait for their last use;
        the host does not.
        """
        for each in self.slots:
            if each is not slot and each.finish is None:
                each.give_back()

    def resize(self, depth: int) -> None:
        """Changes the number of slots; first completes work in the slots that are removed."""
        self.depth = depth
        for slot in self.slots[depth:]:
            if slot.finish is not None:
                slot.finish()
            slot.give_back()
            self._turns.remove(slot)
        del self.slots[depth:]

    def rewind(self) -> None:
        """Starts the turns over, so that every step lends the same slot to the same group.

        Frees the bytes unless the ring keeps them.
        """
        for slot in self.slots:
            # Still in flight, because another backward follows: do not start over.
            if slot.finish is not None:
                return
        self._turns, self._largest = list(self.slots), 0
        # What a ring keeps on a device has nothing lent: it has memory for one collective only.
        if not self.keeps:
            for slot in self._turns:
                slot.give_back()


class RecurringMemory:
    """Tensors whose storages are freed and allocated together, while the tensors stay the same.

    So do their views. The storages are allocated when this is created.

    Attributes:
        storages: of the tensors, allocated for the current stream.
        filled: recorded after the last write, for readers on other streams.

    Streams: freed storage may be reused at once on the stream that was current when it was
    allocated.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        self.storages: list[torch.UntypedStorage] = []
        self._nbytes: list[int] = []
        self.add(tensors)
        self._streams = streams
        self._allocation_stream = streams.current()
        self.filled = streams.event()

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Manages the storages of further tensors, which must be allocated."""
        for tensor in tensors:
            self.storages.append(tensor.untyped_storage())
            self._nbytes.append(self.storages[-1].nbytes())

    def allocate(self) -> None:
        """Allocates the storages for the current stream, unless they are; the content is
        undefined.
        """
        for storage, nbytes in zip(self.storages, self._nbytes, strict=True):
            if storage.nbytes() < nbytes:
                storage.resize_(nbytes)
                self._allocation_stream = self._streams.current()

    def wait(self) -> None:
        """Makes the current stream wait for the last write."""
        self.filled.wait(self._streams.current())

    def free(self) -> None:
        """Frees the storages. Streams: the stream they were allocated for waits for the current
        one.
        """
        # The allocator reuses storage without a wait on the stream that it was allocated for. That
        # stream must be ordered after the last use, wherever that was.
        self._streams.order(self._streams.current(), self._allocation_stream)
        for storage in self.storages:
            storage.resize_(0)
