"""The watchdog: finds out through the store which rank the others wait for, and why.

[Note: Watchdog]
A collective cannot be used to find out why a collective hangs, so ranks exchange their status
through the store of the process group. A thread on every rank compares the time with that of the
last collective, and does nothing else until 10 s have passed. From then on it publishes the rank's
status repeatedly, and reads the statuses of the others at growing intervals. Only statuses that
are renewed count: a rank without a new status is running, suspended, or disconnected.

The watchdog usually only warns, since a collective that looks stuck may still complete, and a
thread that waits inside torch cannot be interrupted. If the engine waits over gloo for a rank that
has failed or ended, the wait is aborted with a `CollectiveError`. A rank that is late or silent may
still join, and is not reported.

Over NCCL, hosts wait for the device and not in a collective. There a rank counts as waiting if its
host stays on one line and its stream has pending work. So a rank that is busy with its own host
work does not count.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from traceback import FrameSummary, extract_tb
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardgrad.diagnosis.flight_recorder import recorder
from shardgrad.diagnosis.rank_status import Diagnosis, RankStatus, diagnose, rank_status
from shardgrad.diagnosis.thread_stacks import calls_of_thread, passes_collective
from shardgrad.errors import CollectiveError

STALL_S = 10.0
PERIOD_S = 0.5
_TOLD_PER_S = 512.0  # statuses per second of all ranks together; one host serves the store
_LATER = 1.25  # the others' statuses are read again when a stall has lasted so many times as long
_LAST_CHECK_S = 10.0  # how long `close` waits for a check; that of an unreachable store never ends
_LOOKING = 8  # the lowest ranks read all statuses; not all ranks, to bound the store's traffic
_MOST_RANKS = 1024
_BACKENDS = ("gloo", "nccl", "xccl", "hccl")
_ENDED = "ended"  # key of the status of a rank that has ended; that of another is under its number


class WaitingRanksWarning(UserWarning):
    """Ranks wait for each other in different collectives, or for a rank that has ended."""


class Watchdog(threading.Thread):
    """Publishes the status of this rank when it stalls, and reads the statuses of the others.

    The thread that creates it is the training thread.

    Args:
        store: the store that the process group was initialized with; the watchdog opens another
            connection to it.
        rank: the rank of this process.
        world_size: number of ranks.
        device: the device of the collectives. If it is not the CPU, hosts wait for the device.

    Attributes:
        period_s: seconds between two checks of the clock.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, device: torch.device | None = None
    ) -> None:
        super().__init__(name="shardgrad watchdog", daemon=True)
        world = dist.group.WORLD
        prefix = f"shardgrad/watchdog/{getattr(world, 'group_name', '')}"
        # A thread that waits for the store holds its connection's lock: the watchdog has its own.
        shared: Any = store  # whose annotations lack `clone`, and bytes in `set`
        self._store: Any = PrefixStore(prefix, shared.clone())
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._world = _default_group()
        self._training_thread = threading.get_ident()
        recorder.progress_s = time.monotonic()  # what came before it is not watched
        self._heard: dict[int, RankStatus | None] = {}  # the statuses that were last read
        self._is_closing = threading.Event()
        self._farewell: Callable[[], None] | None = None
        self.period_s = max(PERIOD_S, world_size / _TOLD_PER_S)

    def close(self) -> None:
        """Ends the thread once a running check is done.

        Waits for the thread for up to 10 seconds, since a thread that returns from the store after
        the interpreter began to shut down would abort the process.
        """
        self._is_closing.set()
        self.join(self.period_s + _LAST_CHECK_S)

    @property
    def is_current(self) -> bool:
        """True if the default process group is still the one that the watchdog was created for."""
        return self._world == _default_group()

    def end(self, error: BaseException | None) -> None:
        """Ends the thread, which first tells ranks that may wait for this one that it has ended.

        The existing thread does it, since an interpreter that is shutting down starts no other one.
        """
        self._farewell = partial(self._say_farewell, error)
        self.close()

    def _say_farewell(self, error: BaseException | None) -> None:
        """Publishes that this rank has ended, or explains the collective's error that ended it."""
        calls = () if error is None else extract_tb(error.__traceback__)[::-1]
        if isinstance(error, RuntimeError) and passes_collective(calls):
            own = rank_status(recorder, self._rank, calls, waits="collective")
            statuses = {t.rank: t for t in (own, self._told(_ENDED)) if t is not None}
            recorder.waits_in = None  # no wait is left to abort
            found = diagnose(statuses, self._world_size)
            if found is not None:
                _warn_or_give_up(found, statuses)
        else:
            if error is not None:
                recorder.report(error)
            self._tell(_ENDED, rank_status(recorder, self._rank, calls, has_ended=True))

    # -- the thread

    def run(self) -> None:
        """Watches until `close`, or until the store is gone."""
        with suppress(Exception):  # here and below: of a store that is gone
            self._tell(str(self._rank), rank_status(recorder, self._rank))
        while self._goes_on():
            since_s = recorder.progress_s
            if time.monotonic() - since_s >= STALL_S:
                try:
                    self._watch_stall(since_s)
                except dist.DistNetworkError:  # torch logs a page for every call of such a store
                    return
                except Exception:  # a filter may turn warnings into errors
                    continue
        self._is_closing.wait()
        if self._farewell is not None:
            with suppress(Exception):
                self._farewell()

    def _goes_on(self) -> bool:
        """Waits for a period; returns False if the thread is to end."""
        return not self._is_closing.wait(self.period_s) and self.is_current

    def _watch_stall(self, since_s: float) -> None:
        """Publishes this rank's status until it makes progress again, and reads the others'."""
        calls, look_s, former, said = calls_of_thread(self._training_thread), 0.0, None, None
        while recorder.progress_s == since_s and self._goes_on():
            before, calls = calls, calls_of_thread(self._training_thread)
            waits = self._waits(calls) if calls == before else ""
            own = rank_status(recorder, self._rank, calls, waits=waits)
            self._tell(str(self._rank), own)
            idle_s = time.monotonic() - since_s
            if idle_s < look_s:
                continue
            look_s = _LATER * idle_s
            statuses, unwatched = self._statuses(own)
            found = diagnose(statuses, self._world_size, unwatched)
            # A diagnosis that is the same in two reads in a row is not a transient state.
            if found is not None and found == former != said and recorder.progress_s == since_s:
                said = found
                _warn_or_give_up(found, statuses)
            former = found

    def _waits(self, calls: Sequence[FrameSummary]) -> str:
        """Returns what the host waits for if it stays in these calls; see `rank_status`."""
        if passes_collective(calls):
            return "collective"
        # During a capture, a query of a stream would fail and could invalidate the capture.
        if self._device is None or any("/shardgrad/graphs/" in call.filename for call in calls):
            return ""
        return "" if torch.accelerator.current_stream(self._device).query() else "device"

    # -- statuses of ranks

    def _statuses(self, own: RankStatus) -> tuple[dict[int, RankStatus], list[int]]:
        """Returns the statuses of ranks that have ended or stalled, and the ranks that have never
        started a watchdog.
        """
        ranks = range(self._world_size if self._rank < _LOOKING else 0)
        told = {rank: self._told(str(rank)) for rank in ranks}
        # A status that has not been renewed since the last read may be old.
        statuses = {rank: t for rank, t in told.items() if t != self._heard.get(rank)}
        self._heard = told
        statuses |= {t.rank: t for t in (own, self._told(_ENDED)) if t is not None}
        return statuses, [rank for rank, t in told.items() if t is None and rank not in statuses]

    def _tell(self, key: str, status: RankStatus) -> None:
        self._store.set(key, pickle.dumps(status))

    def _told(self, key: str) -> Any:
        """Returns the status under a key, or None."""
        return pickle.loads(self._store.get(key)) if self._store.check([key]) else None


def _default_group() -> weakref.ref[Any] | None:
    """Returns a reference to the default process group. One to a group that is gone equals no
    other.
    """
    return None if dist.group.WORLD is None else weakref.ref(dist.group.WORLD)


_current: Watchdog | None = None  # the watchdog of this process


def watch_ranks(device: torch.device) -> Watchdog | None:
    """Returns the watchdog of the default process group, and starts it if there is none; None if it
    is disabled.

    The environment variable `SHARDGRAD_WATCHDOG=0` disables it, and `1` enables it for more than
    1,024 ranks.

    Args:
        device: the device on which parameters compute.
    """
    global _current
    world, switch = dist.group.WORLD, os.environ.get("SHARDGRAD_WATCHDOG", "")
    if world is None or switch == "0":
        return None
    if _current is not None and _current.is_current:
        return _current
    size = dist.get_world_size()
    is_known = any(name in dist.get_backend_config(world) for name in _BACKENDS)
    if size == 1 or not is_known or (size > _MOST_RANKS and switch != "1"):
        return None
    if _current is not None:
        _current.close()
    Finalize(None, _end, exitpriority=100)  # runs in multiprocessing's processes, unlike atexit
    watchdog = Watchdog(
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        size,
        device=None if device.type == "cpu" else device,
    )
    watchdog.start()  # raises if the system has no thread left
    _current = watchdog
    return watchdog


def _warn_or_give_up(diagnosis: Diagnosis, statuses: dict[int, RankStatus]) -> None:
    """Aborts the wait of the training thread if its collective cannot complete; else warns."""
    lost = {rank for rank, t in statuses.items() if t.failure or t.has_ended}
    if dist.get_rank() in lost:
        return
    entry = recorder.waits_in
    if entry is not None and lost.intersection(entry.ranks):
        error = CollectiveError(
            f"the {entry.name} cannot complete: {diagnosis.sentence.rstrip('.')}",
            expected="every rank to join it",
            where=f"rank {dist.get_rank()}",
            fix=diagnosis.fix,
        )
        recorder.verdict = entry, error
    else:
        text = f"shardgrad: {diagnosis.sentence} Try: {diagnosis.fix}"
        warnings.warn(text, WaitingRanksWarning, stacklevel=2)


def _end() -> None:
    global _current
    if _current is not None:
        _current.end(sys.exc_info()[1] or getattr(sys, "last_value", None))
    _current = None
