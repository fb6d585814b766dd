"""Optimizer states that stay on the host between steps, and pass through two device buffers in a
step.

[Note: States on the host]
A step updates its segments one after the other. While one is updated, the states of the next are
copied to the device and those of the previous one back to the host, each on its own stream. There
are two chunks of device memory, each as large as the states of the largest segment. The next states
are copied into the chunk of the previous segment once that has been copied back. A step begins and
ends on the current stream, so the chunks are allocated from that stream's memory for one step, and
a capture contains the whole pipeline.

The host does not wait. Before it reads or writes states itself (a state dict, an edit), it waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from shardgrad.engine.streams import Streams

if TYPE_CHECKING:
    from shardgrad.optim.flat import Update


_States = Mapping[str, torch.Tensor]


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates a zeroed state buffer on the host, pinned for asynchronous copies of a device."""
    return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=device.type != "cpu")


def through_chunks(
    updates: Sequence[Update],
    names: Collection[str] | None,
    streams_of: Callable[[torch.device], Streams],
) -> Iterator[Update]:
    """Yields each update with its states on the device. When the next one is requested, the states
    are copied back. See [Note: States on the host].

    Args:
        updates: the updates of a step.
        names: the names of the states that are read or written; None for all.
        streams_of: returns the streams of a device that only this optimizer uses.

    Streams: the current stream waits for the copies of each update, and at the end for all copies.
    Capture: safe.
    """
    for device, same in groupby(updates, lambda update: update.segment.device):
        together, streams = list(same), streams_of(device)
        states = [
            {name: flat for name, flat in update.state.items() if names is None or name in names}
            for update in together
        ]
        chunks = [_chunk_for(states, device) for _ in range(2)]
        here = [
            {name: chunks[i % 2][name][: flat.nbytes].view(flat.dtype) for name, flat in x.items()}
            for i, x in enumerate(states)
        ]
        yield from _in_turn(together, states, here, streams)


def _chunk_for(states: Sequence[_States], device: torch.device) -> _States:
    """Allocates memory that is large enough for any one of these, by name."""
    sizes: dict[str, int] = {}
    for each in states:
        for name, flat in each.items():
            sizes[name] = max(flat.nbytes, sizes.get(name, 0))
    return {
        name: torch.empty(size, dtype=torch.uint8, device=device) for name, size in sizes.items()
    }


def _in_turn(
    updates: Sequence[Update], states: Sequence[_States], here: Sequence[_States], streams: Streams
) -> Iterator[Update]:
    current, there, back = streams.current(), streams.gather, streams.reduce
    arrived, updated, left = streams.event(), streams.event(), streams.event()

    def bring(number: int) -> None:
        with streams.on(there):
            _copy(here[number], states[number])
        arrived.record(there)

    updated.record(current)
    updated.wait(there)  # earlier work on the current stream may still use the chunks' memory
    try:
        bring(0)
        for number, update in enumerate(updates):
            arrived.wait(current)
            if number + 1 < len(updates):
                left.wait(there)
                bring(number + 1)
            yield update._replace(state=here[number])
            updated.record(current)
            updated.wait(back)
            with streams.on(back):
                _copy(states[number], here[number])
            left.record(back)
    finally:
        arrived.wait(current)
        left.wait(current)


def _copy(into: _States, out: _States) -> None:
    for name, flat in out.items():
        into[name].copy_(flat, non_blocking=True)
