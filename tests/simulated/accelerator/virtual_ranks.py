"""Virtual ranks: threads of one process, each with a simulated device and a `torch.distributed` of
its own.

Every simulated device has its own autograd thread, so a hook may block until another rank's hook
has come. While ranks run, what `torch.distributed` keeps for the process is kept for each rank; see
`_Worlds`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d

from shardgrad.sharding import mesh
from tests.simulated.accelerator import collectives, device
from tests.support.processes import FairClock
from tests.support.ranks import RankError

_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keeps other ranks out, around what uses the process's random numbers, such as building a
    model.

    No collective may happen inside.
    """
    with _one_at_a_time:
        yield


class VirtualRanks:
    """`world_size` ranks; rank r has device r.

    Args:
        world_size: up to as many as there are simulated devices.
        collective_timeout_s: how long a rank waits for the others in one collective.
    """

    def __init__(self, world_size: int, collective_timeout_s: float = 300.0) -> None:
        self.world_size = world_size
        self._timeout_s = collective_timeout_s

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Returns what `function` returned on each rank.

        Raises:
            RankError: a rank raised, or took longer than `timeout_s`. The message holds the
                tracebacks; if all raised the same class of error first, the error of the lowest
                rank is its cause.
        """
        device.adopt_ops()
        run = _Run(self.world_size, self._timeout_s)
        with _Worlds(self.world_size) as worlds:
            threads = [
                threading.Thread(
                    target=run.rank, args=(rank, worlds, function, args, kwargs), daemon=True
                )
                for rank in range(self.world_size)
            ]
            for thread in threads:
                thread.start()
            run.wait_for(threads, timeout_s)
        return run.results_or_raise()


def on_virtual_ranks(
    world_size: int, *, checks: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test run on virtual ranks, with its parameters; `checks` makes a hazard an error."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(**parameters: Any) -> None:
            with device.checked() if checks else contextlib.nullcontext():
                VirtualRanks(world_size).run(function, **parameters)

        return test

    return decorate


class _Run:
    """One call of `VirtualRanks.run`."""

    def __init__(self, world_size: int, collective_timeout_s: float) -> None:
        self._world_size = world_size
        self._timeout = timedelta(seconds=collective_timeout_s)
        self._store = dist.HashStore()
        self._results: list[Any] = [None] * world_size
        self._failures: dict[int, tuple[float, BaseException, str]] = {}

    def rank(
        self, rank: int, worlds: _Worlds, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """The life of one rank."""
        try:
            worlds.enter(rank)
            torch.accelerator.set_device_index(rank)
            dist.init_process_group(
                collectives.BACKEND,
                store=self._store,
                rank=rank,
                world_size=self._world_size,
                timeout=self._timeout,
            )
            self._results[rank] = function(*args, **kwargs)
            dist.destroy_process_group()
        except BaseException as error:
            self._failures[rank] = (time.monotonic(), error, traceback.format_exc())
            # Whoever waits for this rank shall hear of it now, not at the time limit.
            first = str(error).splitlines()[:1]
            collectives.abort(f"rank {rank} raised {type(error).__name__}: {''.join(first)}")

    def wait_for(self, threads: list[threading.Thread], timeout_s: float) -> None:
        """Waits for the ranks; those that are late are told to stop, and the test goes on without
        them.
        """
        clock = FairClock()
        for thread in threads:
            while thread.is_alive() and clock.elapsed_s() < timeout_s:
                thread.join(0.2)
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            frames = sys._current_frames()
            where = {rank: traceback.format_stack(frames[threads[rank].ident]) for rank in late}
            collectives.abort(f"ranks {late} did not finish within {timeout_s:.0f} s")
            for thread in threads:
                thread.join(2.0)
            for rank, calls in where.items():
                error = RankError(f"rank {rank} did not finish within {timeout_s:.0f} s")
                self._failures[rank] = (0.0, error, f"{error}; it was here:\n{''.join(calls)}")

    def results_or_raise(self) -> list[Any]:
        """Returns the results, or raises with every rank's traceback, the first failure first."""
        if not self._failures:
            return self._results
        order = sorted(self._failures, key=lambda rank: self._failures[rank][0])
        texts = [f"rank {rank}:\n{self._failures[rank][2]}" for rank in order]
        raise RankError("\n".join(texts)) from self._failures[order[0]][1]


class _World:
    """What `torch.distributed` knows in one process."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.pg_config_info: list[dict[str, Any]] = []
        self.pg_flight_recorder_hooks: dict[Any, Any] = {}  # from torch 2.15 on


class _Worlds:
    """Stands where `torch.distributed` keeps its world, and passes every access on to the calling
    rank's.

    A rank's own thread says who it is. Autograd's threads work for one device each, and so for one
    rank. All other threads see the world that was there before.
    """

    def __init__(self, world_size: int) -> None:
        self.__dict__["_before"] = c10d._world
        self.__dict__["_owner"] = threading.get_ident()
        self.__dict__["_patches"] = contextlib.ExitStack()
        self.__dict__["_ranks"] = [_World() for _ in range(world_size)]

    def enter(self, rank: int) -> None:
        """Makes the calling thread a rank's."""
        device.rank_thread.rank = rank

    def _current(self) -> Any:
        rank = getattr(device.rank_thread, "rank", None)
        if rank is None and threading.get_ident() != self._owner and _is_autograd_thread():
            rank = device.native().current_device()
        return self._before if rank is None or rank >= len(self._ranks) else self._ranks[rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._current(), name, value)

    def __enter__(self) -> _Worlds:
        def replace(owner: Any, name: str, value: Any) -> None:
            self._patches.enter_context(mock.patch.object(owner, name, value))

        replace(c10d, "_world", self)
        registry = _Registry()
        self._patches.callback(registry.forget)
        for name in _Registry.PATCHED:
            replace(c10d, name, getattr(registry, name))
        # Meshes made of others are the engine's for a process: here for each rank, and for one run.
        for name in ("_subdivided", "_flattened"):
            replace(mesh, name, _for_each_rank(getattr(mesh, name).__wrapped__))
        # Fake tensors remember answers for the process, without the current device. DTensor asks
        # them what an operator returns, and a rank would be answered with the device of another
        # one, for some of its tensors or for all: here they work each answer out.
        replace(FakeTensorMode, "_cached_dispatch_impl", FakeTensorMode._dispatch_impl)
        for index in range(len(self._ranks)):
            device.native().set_host(index, 1 + index)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        for index in range(len(self._ranks)):
            device.native().set_host(index, 0)
        collectives.forget()


class _Registry:
    """Keeps the ranks' groups apart in the table of the process by which groups are found by name.

    A group that all its members call "1" is there as "1@rank0", "1@rank1", and so on. Any thread
    may look one up, autograd's included, so the table cannot be one for each thread.
    """

    PATCHED = (
        "_register_process_group",
        "_unregister_process_group",
        "_unregister_all_process_groups",
    )

    def __init__(self) -> None:
        self._registered: dict[str, int] = {}
        self._originals = {name: getattr(c10d, name) for name in self.PATCHED}

    def _register_process_group(self, name: str, group: Any) -> None:
        own = collectives.own_name(name, device.rank_thread.rank)
        self._originals["_register_process_group"](own, group)
        self._registered[own] = device.rank_thread.rank

    def _unregister_process_group(self, name: str) -> None:
        own = (
            name
            if name in self._registered
            else collectives.own_name(name, device.rank_thread.rank)
        )
        del self._registered[own]
        self._originals["_unregister_process_group"](own)

    def _unregister_all_process_groups(self) -> None:
        for own, rank in list(self._registered.items()):
            if rank == device.rank_thread.rank:
                self._unregister_process_group(own)

    def forget(self) -> None:
        """Takes out the groups of ranks that failed."""
        for own in self._registered:
            self._originals["_unregister_process_group"](own)


def _for_each_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that remembers what it returned to each rank."""

    @cache
    def found(rank: int, *args: Any) -> Any:
        return function(*args)

    return lambda *args: found(device.rank_thread.rank, *args)


def _is_autograd_thread() -> bool:
    # Python did not start it, and the test's own thread is named "MainThread".
    return isinstance(threading.current_thread(), threading._DummyThread)
