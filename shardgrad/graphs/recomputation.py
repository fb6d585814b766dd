"""Random numbers of regions that backward recomputes (`torch.utils.checkpoint`).

A region saves the generator's state in forward and sets it again when it is recomputed, to draw the
same numbers. A capture can neither read nor set that state. But several generators can be
registered with a graph, and the host sets the offset of each before a replay. So an eager call
records at which offset, relative to the beginning of the call, each recomputed region began. In the
capture, each of these regions draws from a generator of its own, whose offset every replay sets to
the device generator's plus that distance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

from shardgrad.errors import ReplayMismatchError
from shardgrad.graphs.pool import GraphPool
from shardgrad.graphs.torch_patches import replace

__all__ = ["Redraws"]


class Redraws:
    """The random numbers that the recomputed regions of a call draw again.

    Args:
        pool: the pool of the step. On devices other than CUDA nothing is recorded, and a capture of
            such a region is refused.
    """

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._notes = False
        self._recomputed = 0  # number of regions recomputed in this call so far
        # Of each recomputed region that draws, by its number: the generator's offset at its
        # beginning in forward, relative to that of the call, and a generator for a capture.
        self._drawing: dict[int, tuple[int, torch.Generator]] = {}
        self._begin = self._drawn = 0  # the offset at the beginning of a call, and how far it moves

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that a capture of the call draws from, besides the device's
        default one.
        """
        return [generator for _, generator in self._drawing.values()]

    @property
    def _default(self) -> torch.Generator:
        return torch.cuda.default_generators[self._pool.device.index]

    @contextmanager
    def active(self, *, notes: bool) -> Iterator[None]:
        """Surrounds a call.

        Args:
            notes: True to record which random numbers the block, an eager call, draws again; False
                to make the recomputed regions of the block, a capture, draw from `generators`.
        """
        if self._pool.device.type != "cuda":
            yield
            return
        replace(checkpoint, "get_device_states", _saving)
        replace(torch.random, "fork_rng", _recomputing)
        # The key is the stream, since regions are recomputed on autograd's threads, where this
        # stream is current, too.
        stream: Any = self._pool.stream
        self._notes, self._recomputed, _on_streams[stream] = notes, 0, self
        self._begin = self._default.get_offset()
        try:
            yield
        finally:
            del _on_streams[stream]
        if notes:
            self._drawn = self._default.get_offset() - self._begin

    def begin_replay(self) -> None:
        """Sets the regions' generators for the next replay to where the regions began in
        forward.
        """
        seed, self._begin = self._default.initial_seed(), self._default.get_offset()
        for start, generator in self._drawing.values():
            generator.manual_seed(seed).set_offset(self._begin + start)

    def end_replay(self) -> None:
        """Refuses a replay that drew more or fewer random numbers than the eager call.

        Raises:
            ReplayMismatchError: the recomputed regions drew other numbers than in forward.
        """
        drawn = self._default.get_offset() - self._begin
        if drawn != self._drawn:
            raise ReplayMismatchError(
                "a graph drew more or fewer random numbers than the eager step, so its recomputed "
                "regions did not draw the numbers of their forward",
                expected=f"the generator's offset to advance by {self._drawn}",
                got=f"an advance by {drawn}",
                fix="torch.utils.checkpoint.checkpoint(..., preserve_rng_state=False); or draw the "
                "same numbers whether or not the step is being captured",
            )

    def save(self, get_device_states: Callable[..., Any], args: Any) -> tuple[Any, Any]:
        """Replaces `checkpoint.get_device_states` in the forward of a region."""
        if self._notes:
            devices, states = get_device_states(*args)
            return _Saved(devices, self, self._default.get_offset()), states
        return _Saved([], self, 0), []

    @contextmanager
    def recomputed(self, offset: int) -> Iterator[None]:
        """Surrounds the recomputation of a region.

        Args:
            offset: the offset of the device's generator when the region began in forward, in an
                eager call.
        """
        number, default = self._recomputed, self._default
        self._recomputed += 1
        if self._notes:
            try:
                yield
            finally:
                if default.get_offset() != offset:
                    self._drawing[number] = offset - self._begin, default.clone_state()
            return
        outside = default.graphsafe_get_state()
        if number in self._drawing:
            default.graphsafe_set_state(self._drawing[number][1])
        try:
            yield
        finally:
            default.graphsafe_set_state(outside)


class _Saved(list[int]):
    """The list of devices whose state a region has saved, which `torch.utils.checkpoint` passes on
    to `fork_rng`. Carries the `Redraws` and the offset along.
    """

    def __init__(self, devices: list[int], redraws: Redraws, offset: int) -> None:
        super().__init__(devices)
        self.redraws, self.offset = redraws, offset


# The redraws of the calls that are running, by the stream of their pool.
_on_streams: dict[torch.Stream, Redraws] = {}


def _saving(get_device_states: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_device_states)
    def saved(*args: Any) -> Any:
        redraws = _on_streams.get(torch.accelerator.current_stream())
        return (
            get_device_states(*args) if redraws is None else redraws.save(get_device_states, args)
        )

    return saved


def _recomputing(fork_rng: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fork_rng)
    @contextmanager
    def forked(devices: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
        with fork_rng(devices, *args, **kwargs):
            if isinstance(devices, _Saved):
                with devices.redraws.recomputed(devices.offset):
                    yield
            else:
                yield

    return forked
