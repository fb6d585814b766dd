"""Random numbers of regions that backward recomputes (`torch.utils.checkpoint`).

A region saves the state of random numbers in forward, and draws from it again when recomputed. A
capture can neither read that state nor set it, but a graph may have several generators, each of
which starts at a replay where the host says. So an eager call notes how far into its random numbers
each recomputed region began; in the capture each of these has a generator of its own, which every
replay starts as far behind the device's.
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
from shardgrad.graphs.torch_patches import Patch, Replacement

__all__ = ["Redraws"]


class Redraws:
    """The random numbers that the recomputed regions of a call draw again.

    Args:
        pool: of the step. On devices other than CUDA nothing is noted, and nothing can be captured.
    """

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._is_noting = False
        self._recomputed = 0  # regions in this call so far
        # For each, the offset of the device's generator at its beginning in forward, behind that at
        # the beginning of the call, and a generator for a capture; None if it drew nothing.
        self._drawing: list[tuple[int, torch.Generator] | None] = []
        self._begin = self._drawn = 0  # offset at the beginning of a call, and how far it moved

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that a capture of the call draws from, besides the default one of its device."""
        return [drawing[1] for drawing in self._drawing if drawing is not None]

    @property
    def _default(self) -> torch.Generator:
        return torch.cuda.default_generators[self._pool.device.index]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Takes note of what the block, an eager call, draws again."""
        if self._pool.device.type != "cuda":
            yield
            return
        self._is_noting, self._begin = True, self._default.get_offset()
        with self.captured():
            yield
        self._is_noting = False
        self._drawn = self._default.get_offset() - self._begin

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Has the regions of the block, a capture of the call, draw from `generators`."""
        stream: Any = self._pool.stream  # autograd's threads have it as their current one as well
        if self._pool.device.type != "cuda":
            yield
            return
        self._recomputed, _on_streams[stream] = 0, self
        try:
            with _patch.active(_replacements):
                yield
        finally:
            del _on_streams[stream]

    def begin_replay(self) -> None:
        """Has the regions of the replay that follows begin to draw where they began in forward."""
        if not any(self._drawing):
            return
        seed, self._begin = self._default.initial_seed(), self._default.get_offset()
        for start, generator in filter(None, self._drawing):
            generator.manual_seed(seed).set_offset(self._begin + start)

    def end_replay(self) -> None:
        """Refuses a replay that drew more or less than the eager call.

        Raises:
            ReplayMismatchError: regions have drawn other numbers than in forward.
        """
        if not any(self._drawing):
            return
        drawn = self._default.get_offset() - self._begin
        if drawn != self._drawn:
            raise ReplayMismatchError(
                "a graph draws more or fewer random numbers than its step did eagerly, so its "
                "recomputed regions do not draw those of their forward",
                expected=f"the generator's offset moved by {self._drawn}",
                got=f"moved by {drawn}",
                fix="torch.utils.checkpoint.checkpoint(..., preserve_rng_state=False); or draw the "
                "same when captured: does the step ask whether it is?",
            )

    def save(self, get_device_states: Callable[..., Any], args: Any) -> tuple[Any, Any]:
        """Stands for `checkpoint.get_device_states` in the forward of a region."""
        if self._is_noting:
            devices, states = get_device_states(*args)
            return _Saved(devices, self, self._default.get_offset()), states
        return _Saved([], self, 0), []

    @contextmanager
    def recomputed(self, offset: int) -> Iterator[None]:
        """Encloses the recomputation of a region.

        Args:
            offset: of the device's generator at the beginning of the region, if it ran eagerly.
        """
        number, default = self._recomputed, self._default
        self._recomputed += 1
        if self._is_noting:
            self._drawing.append(None)
            try:
                yield
            finally:
                if default.get_offset() != offset:
                    self._drawing[number] = offset - self._begin, default.clone_state()
            return
        outside = default.graphsafe_get_state()
        if number < len(self._drawing) and (drawing := self._drawing[number]) is not None:
            default.graphsafe_set_state(drawing[1])
        try:
            yield
        finally:
            default.graphsafe_set_state(outside)


class _Saved(list[int]):
    """The devices whose state a region has saved, as `torch.utils.checkpoint` keeps them."""

    def __init__(self, devices: list[int], redraws: Redraws, offset: int) -> None:
        super().__init__(devices)
        self.redraws, self.offset = redraws, offset


# Of the calls that run now, by the stream of their pool.
_on_streams: dict[torch.Stream, Redraws] = {}
_patch = Patch()


def _replacements() -> Iterator[Replacement]:
    yield checkpoint, "get_device_states", _saving
    yield torch.random, "fork_rng", _recomputing


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
