"""Random numbers of regions that backward recomputes (`torch.utils.checkpoint`).

A region saves the generator's state in forward and sets it again when it is recomputed, to draw the
same numbers. A capture can neither read nor set that state. But several generators can be
registered with a graph, and the host sets the offset of each before a replay. So an eager call
records at which offset, relative to the beginning of the call, each recomputed region began. In the
capture, each of these regions draws from a generator of its own, whose offset every replay sets to
the device generator's plus that distance.

For that, two functions of torch are replaced until the process ends. Outside of graphed steps they
do what torch's do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import sub
from typing import Any

import torch
from torch.utils import checkpoint

from shardgrad.errors import ReplayMismatchError
from shardgrad.graphs.pool import GraphPool


class Redraws:
    """The random numbers that the recomputed regions of a call draw again.

    Args:
        pool: the pool of the step. On devices other than CUDA nothing is recorded, and a capture of
            such a region is refused.
        passed: the generators that were passed to `graphed_step`.

    Attributes:
        notes: True until a call was recorded.
    """

    def __init__(self, pool: GraphPool, passed: Sequence[torch.Generator]) -> None:
        self._pool, self._passed = pool, passed
        self.notes = True
        self._recomputed = 0  # number of regions recomputed in this call so far
        # Of each recomputed region that draws, by its number: the generator's offset at its
        # beginning in forward, relative to that of the call, and a generator for a capture.
        self._drawing: dict[int, tuple[int, torch.Generator]] = {}
        # Of each generator that the step may draw from, the device's default one first: the offset
        # at the beginning of a call, and how far the eager call has moved it.
        self._begin: Sequence[int] = ()
        self._drawn: Sequence[int] = ()

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that a capture of the call draws from, besides the device's
        default one.
        """
        return [generator for _, generator in self._drawing.values()]

    @property
    def default(self) -> torch.Generator:
        """The device's default generator."""
        return torch.cuda.default_generators[self._pool.device.index]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Surrounds a call. Records which random numbers the first one, an eager call, draws again.
        In later ones, which are captures, recomputed regions draw from `generators`.
        """
        if self._pool.device.type != "cuda":
            yield
            return
        _replace_functions()
        # The key is the stream, since regions are recomputed on autograd's threads, where this
        # stream is current, too.
        stream: Any = self._pool.stream
        self._recomputed, _on_streams[stream] = 0, self
        self._begin = self._offsets()
        try:
            yield
        finally:
            del _on_streams[stream]
        if self.notes:
            self._drawn = self._moved()
            self.notes = False

    def begin_replay(self) -> None:
        """Sets the regions' generators for the next replay to where the regions began in
        forward.
        """
        self._begin = self._offsets()
        for start, generator in self._drawing.values():
            generator.manual_seed(self.default.initial_seed()).set_offset(self._begin[0] + start)

    def end_replay(self) -> None:
        """Refuses a replay that drew more or fewer random numbers than the eager call. Recomputed
        regions then drew other numbers than in forward, or the step sets a seed, unlike a replay.

        Raises:
            ReplayMismatchError: a generator has moved by another distance.
        """
        if (drawn := self._moved()) != self._drawn:
            raise ReplayMismatchError(
                "a graph drew more or fewer random numbers than the eager step",
                expected=f"the generators' offsets to advance by {self._drawn}",
                got=f"advances by {drawn}",
                fix="manual_seed(...) between calls; or draw the same numbers whether or not the "
                "step is being captured, with a larger warmup= if only its first calls draw more; "
                "or preserve_rng_state=False for recomputed regions",
            )

    def _offsets(self) -> list[int]:
        return list(map(torch.Generator.get_offset, (self.default, *self._passed)))

    def _moved(self) -> list[int]:
        return list(map(sub, self._offsets(), self._begin))

    @contextmanager
    def recomputed(self, offset: int) -> Iterator[None]:
        """Surrounds the recomputation of a region.

        Args:
            offset: the offset of the device's generator when the region began in forward, in an
                eager call.
        """
        number, default = self._recomputed, self.default
        self._recomputed += 1
        outside = default.graphsafe_get_state()
        if number in self._drawing:  # in a capture; an eager call begins with none
            default.graphsafe_set_state(self._drawing[number][1])
        try:
            yield
        finally:
            if self.notes and default.get_offset() != offset:
                self._drawing[number] = offset - self._begin[0], default.clone_state()
            default.graphsafe_set_state(outside)


class _Saved(list[int]):
    """The list of devices whose state a region has saved, which `torch.utils.checkpoint` passes on
    to `fork_rng`. Carries along what surrounds the region's recomputation.
    """

    recomputed: Callable[[], AbstractContextManager[None]]


# The redraws of the calls that are running, by the stream of their pool.
_on_streams: dict[torch.Stream, Redraws] = {}


@functools.cache
def _replace_functions() -> None:
    get_device_states, fork_rng = checkpoint.get_device_states, torch.random.fork_rng

    @functools.wraps(get_device_states)
    def saved(*args: Any) -> Any:
        redraws = _on_streams.get(torch.accelerator.current_stream())
        if redraws is None:
            return get_device_states(*args)
        devices, states = get_device_states(*args) if redraws.notes else ([], [])
        saved_on = _Saved(devices)
        offset = redraws.default.get_offset() if redraws.notes else 0
        saved_on.recomputed = functools.partial(redraws.recomputed, offset)
        return saved_on, states

    @functools.wraps(fork_rng)
    @contextmanager
    def forked(devices: Any = None, *args: Any, **kwargs: Any) -> Iterator[None]:
        region = devices.recomputed() if isinstance(devices, _Saved) else nullcontext()
        with fork_rng(devices, *args, **kwargs), region:
            yield

    checkpoint.get_device_states, torch.random.fork_rng = saved, forked
