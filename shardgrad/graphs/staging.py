"""Tensors of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardgrad.graphs.pool import GraphPool

__all__ = ["HostStaging"]

_ALIGNMENT = 256
_ROUNDS = 2  # one travels while the step before it runs


class _Round:
    """Pinned memory, memory of the device, and when each is free again."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.sent = torch.Event(device)
        self.taken = torch.Event(device)
        self.used = False


class HostStaging:
    """Moves tensors of fixed shapes from the host in one copy, which nothing but its reader waits for.

    Args:
        tensors: the first ones.
        pool: whose device and stream are used.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pool: GraphPool) -> None:
        self._pool = pool
        self._begins: list[int] = []
        nbytes = 0
        for tensor in tensors:
            self._begins.append(nbytes)
            nbytes += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._turn = 0
        self._stream: torch.Stream | None = None
        self._rounds: list[_Round] = []
        if tensors:
            self._stream = torch.Stream(pool.device)
            self._rounds = [_Round(nbytes, pool.device) for _ in range(_ROUNDS)]
            # The memory came from the pool's stream, where its last owner may still be at work.
            self._stream.wait_stream(torch.accelerator.current_stream(pool.device))

    def copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copies host tensors into tensors of the device.

        Streams: the host waits until the call before the last one has left its memory; the transfer goes to a
        stream of its own, and the pool's stream copies what has arrived.
        """
        way = self._stream
        if way is None:
            return
        self._turn = (self._turn + 1) % _ROUNDS
        of = self._rounds[self._turn]
        if of.used:
            of.sent.synchronize()
            of.taken.wait(way)
        for source, begin in zip(sources, self._begins, strict=True):
            _piece(of.host, begin, source).copy_(source)
        with way:
            of.device.copy_(of.host, non_blocking=True)
        of.sent.record(way)
        stream = torch.accelerator.current_stream(self._pool.device)
        of.sent.wait(stream)
        pieces = [_piece(of.device, b, s) for b, s in zip(self._begins, sources, strict=True)]
        torch._foreach_copy_(list(targets), pieces)
        of.taken.record(stream)
        of.used = True


def _piece(flat: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Returns the bytes from `begin` on as a tensor like another."""
    nbytes = like.numel() * like.itemsize
    return flat[begin : begin + nbytes].view(like.dtype).as_strided(like.shape, _dense_strides(like))


def _dense_strides(like: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(like, device="meta").stride()
