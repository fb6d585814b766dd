"""Copies of host tensors to the device: one transfer a call, overlapped with the step before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardgrad.engine.streams import EagerEvent, wait_for_stream
from shardgrad.graphs.pool import GraphPool

__all__ = ["HostStaging"]

_ALIGNMENT = 256
_BUFFERS = 2  # one is transferred while the step before uses the other


class _StagingBuffer:
    """Pinned host memory and device memory of one transfer.

    Attributes:
        host: uint8, pinned on CUDA.
        device: uint8, as many bytes on the device.
        sent: recorded after the transfer, the last use of `host`.
        unpacked: recorded after the copy into the step's inputs, the last use of `device`.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.sent = EagerEvent(torch.Event(device))
        self.unpacked = EagerEvent(torch.Event(device))


class HostStaging:
    """Copies host tensors of fixed shapes to the device in one transfer.

    Args:
        tensors: host tensors with the shapes and dtypes of those to come.
        pool: gives device and stream.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pool: GraphPool) -> None:
        self._pool = pool
        self._offsets: list[int] = []
        nbytes = 0
        for tensor in tensors:
            self._offsets.append(nbytes)
            nbytes += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._next = 0
        self._stream: torch.Stream | None = None
        self._buffers: list[_StagingBuffer] = []
        if tensors:
            self._stream = torch.Stream(pool.device)
            self._buffers = [_StagingBuffer(nbytes, pool.device) for _ in range(_BUFFERS)]
            # The memory came from the pool's stream, where its previous owner may still be in use.
            wait_for_stream(self._stream, torch.accelerator.current_stream(pool.device))

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copies host tensors into tensors of the device.

        Streams: the host waits until the transfer before the last one is done. The transfer runs on
        a stream for transfers only; the current stream waits for it and copies into `targets`.
        Pinned sources must not be written before that stream has waited.
        """
        transfer = self._stream
        if transfer is None:
            return
        self._next = (self._next + 1) % _BUFFERS
        buffer = self._buffers[self._next]
        buffer.sent.wait_on_host()
        buffer.unpacked.wait(transfer)
        views = _views_like(buffer.device, self._offsets, sources)
        # What a loader has pinned is sent from where it is; the host would only copy it again.
        if all(source.is_pinned() and source.is_contiguous() for source in sources):
            with transfer:
                torch._foreach_copy_(views, list(sources), non_blocking=True)
        else:
            torch._foreach_copy_(_views_like(buffer.host, self._offsets, sources), list(sources))
            with transfer:
                buffer.device.copy_(buffer.host, non_blocking=True)
        buffer.sent.record(transfer)
        stream = torch.accelerator.current_stream(self._pool.device)
        buffer.sent.wait(stream)
        torch._foreach_copy_(list(targets), views)
        buffer.unpacked.record(stream)


def _views_like(
    flat: torch.Tensor, offsets: Sequence[int], likes: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the bytes from each offset on as a tensor with the shape, dtype and memory order of
    another.
    """
    found = []
    for offset, like in zip(offsets, likes, strict=True):
        part = flat[offset : offset + like.numel() * like.itemsize].view(like.dtype)
        found.append(part.as_strided(like.shape, torch.empty_like(like, device="meta").stride()))
    return found
